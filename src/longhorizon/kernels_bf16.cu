// Convolutions of training runs side by side, on tensor cores, in bfloat16: every run (lane) has weights of its own.
//
// Images lie as [lane][image][row][column][channel] in bfloat16, so that a tap is a shift by whole pixels: a strip of an image
// is copied to shared memory once, and every tap reads it from there in the form that the tensor cores want (ldmatrix). Sums
// are float32. Weights come in float32 as torch has them, and are packed first.
//
// A warp makes tiles of 16 pixels beside each other (at a side of 8: in two images, or in two rows), one below the other: what
// it reads of a line serves up to three of them. With a stride of two the columns of an image lie sorted, even ones first, so
// that the pixels of a tile are neighbours.
//
// Given by the caller as macros:
//   C, O          channels that are summed over (a multiple of 8), and of the result; of a weight's gradient: in and out
//   REAL          channels that there really are, where C has been filled up
//   SIDE          of the smaller image, which is square
//   TAPS, STRIDE  3 with a margin of one pixel, or 1 without; the other image is STRIDE times larger
//   ROWS, IMAGES  of a strip: rows of the smaller image, and images of which a program takes as many rows each
//   T, G          tiles of a warp: T of 16 pixels by G of 8 outputs (of a weight's gradient: T of 16 outputs by G of 8 channels)
//   TURNED        packing: outputs and channels change places, and taps are turned round (for the gradient of an image)

typedef unsigned int u32;

#define LARGE (SIDE * STRIDE)
#ifdef SPREAD
#define BEFORE 0  // lines and columns of the margin
#define AFTER (TAPS == 3 ? 1 : 0)
#define STEP 1  // from a pixel to the next one, in a strip
#define JUMP 1  // and from what is read for a strip to the next one
#define SOURCE SIDE
#define LINES (ROWS + AFTER)
#else
#define BEFORE (TAPS == 3 ? 1 : 0)
#define AFTER BEFORE
#define STEP (TAPS == 3 ? STRIDE : 1)
#define JUMP (TAPS == 3 ? 1 : STRIDE)
#define SOURCE LARGE
#define LINES ((ROWS - 1) * STEP + TAPS)
#endif
#define WIDTH (SIDE * STEP + BEFORE + AFTER)
#define PITCH(channels) ((channels) == 8 ? 16 : (channels) * 2 + 16)  // bytes of a pixel: eight in a row meet no bank twice
#define STRIPS (SIDE / ROWS)
#define STEPS (C == 8 ? 1 : C / 16)
#define HALVES (C == 8 ? 1 : 2)  // registers of a factor's column: 8 channels each

#define PAIRED (SIDE == 8 && IMAGES % 2 == 0)  // a tile is a row of two images
#define DEEP (SIDE == 8 && !PAIRED ? 2 : 1)    // rows of a tile
#define COLUMNS (SIDE >= 16 ? IMAGES * SIDE / 16 : PAIRED ? IMAGES / 2 : IMAGES)  // of tiles
#define APART (DEEP * STEP)                    // lines from a tile to the one below

__device__ __forceinline__ u32 two(float low, float high) {  // as bfloat16
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(pointer));
    return address;
}

// Begins to copy 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy(u32 to, const char *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights [lane][out][in][tap] to [lane][tap][step][group][thread of a warp][G * HALVES], two channels in each: the columns of
// G tiles are dealt out so that a thread's results lie side by side.

#ifdef PACK

extern "C" __global__ void __launch_bounds__(256) pack(const float *weights, u32 *packed, int total) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    int rest = i;
    const int half = rest % HALVES, tile = rest / HALVES % G, thread = rest / (HALVES * G) % 32;
    rest /= HALVES * G * 32;
    const int group = rest % (O / 8 / G), step = rest / (O / 8 / G) % STEPS, tap = rest / (O / 8 / G * STEPS) % (TAPS * TAPS);
    const int lane = rest / (O / 8 / G * STEPS * TAPS * TAPS);
    const int n = thread / 4, out = group * 8 * G + 2 * G * (n / 2) + 2 * tile + n % 2;
    const int in = step * 16 + half * 8 + thread % 4 * 2;
    float value[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
#if TURNED
        value[e] = weights[((lane * C + in + e) * O + out) * (TAPS * TAPS) + TAPS * TAPS - 1 - tap];
#else
        value[e] = in + e < REAL ? weights[((lane * O + out) * REAL + in + e) * (TAPS * TAPS) + tap] : 0.f;
#endif
    }
    packed[i] = two(value[0], value[1]);
}

#endif

// ---------------------------------------------------------------------------------------------------------------------

#if defined(WEIGH) || defined(ADD_UP)
#define ACROSS (O / 16 / T)  // warps over outputs
#define DOWN (C / 8 / G)     // over channels
#define THREADS (32 * ACROSS * DOWN * SHARES)
#else
#define ACROSS (O / 8 / G)
#define THREADS (32 * ACROSS * COLUMNS * (ROWS / DEEP / T))
#endif

#ifndef PACK

// Copies strips with their margin to shared memory; what lies outside the image is zero. Where a thread reads and writes is
// the same for every strip, but for the lines above the first and below the last one.
struct Loader {
    static constexpr int chunks = C / 8, all = IMAGES * LINES * WIDTH * chunks, turns = (all + THREADS - 1) / THREADS;
    static_assert(turns <= 32, "a bit for every turn");
    int from[turns];
    u32 there, above, below;  // a bit for every turn

    __device__ __forceinline__ Loader() : there(0), above(0), below(0) {
#pragma unroll
        for (int k = 0; k < turns; k++) {
            const int i = threadIdx.x + k * THREADS, pixel = i / chunks, image = pixel / WIDTH / LINES;
            const int line = pixel / WIDTH % LINES, place = pixel % WIDTH;
            const int column = STEP == 1 ? place : place < WIDTH / 2 ? 2 * place : 2 * place - WIDTH + 1;
            const int x = (column - BEFORE) * JUMP, y = (line - BEFORE) * JUMP;
            from[k] = ((image * SOURCE + y) * SOURCE + x) * (C * 2) + i % chunks * 16;
            there |= (u32)(i < all && x >= 0 && x < SOURCE) << k;
            if (BEFORE) above |= (u32)(line == 0) << k;
            if (AFTER && STEP == 1) below |= (u32)(line == LINES - 1) << k;
        }
    }

    // Begin to copy, from the image that a strip begins in.
    __device__ __forceinline__ void operator()(u32 tile, const char *image, int strip) const {
        image += strip * (ROWS * (SOURCE / SIDE) * SOURCE * C * 2);
        u32 reads = there;
        if (strip == 0) reads &= ~above;
        if (strip == STRIPS - 1) reads &= ~below;
        const u32 to = tile + threadIdx.x / chunks * PITCH(C) + threadIdx.x % chunks * 16;
#pragma unroll
        for (int k = 0; k < turns; k++) {
            const bool read = reads >> k & 1;
            if (k + 1 < turns || (int)threadIdx.x + k * THREADS < all)
                copy(to + k * (THREADS / chunks * PITCH(C)), read ? image + from[k] : image, read);
        }
    }
};

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load2(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}
__device__ __forceinline__ void load4_turned(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load2_turned(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
}

__device__ __forceinline__ void multiply16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply8(float (&sum)[4], const u32 (&a)[4], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <int COUNT> __device__ __forceinline__ void load_weights(u32 (&b)[COUNT], const u32 *weight) {
#pragma unroll
    for (int k = 0; k < COUNT; k += COUNT < 4 ? 2 : 4) {
        if (COUNT < 4) {
            uint2 w = __ldg((const uint2 *)(weight + k));
            b[k] = w.x, b[k + 1] = w.y;
        } else {
            uint4 w = __ldg((const uint4 *)(weight + k));
            b[k] = w.x, b[k + 1] = w.y, b[k + 2] = w.z, b[k + 3] = w.w;
        }
    }
}

// Where a pixel of a tile lies: of the tile that begins a column, so many rows down.
struct Place {
    int image, y, x;
    __device__ __forceinline__ Place(int column, int row, int pixel)
        : image(SIDE >= 16 ? column / (SIDE / 16) : PAIRED ? column * 2 + pixel / 8 : column),
          y(row + (DEEP == 2 ? pixel / 8 : 0)), x(SIDE >= 16 ? column % (SIDE / 16) * 16 + pixel : pixel % 8) {}
    __device__ __forceinline__ u32 in_strip() const { return ((image * LINES + y * STEP) * WIDTH + x) * PITCH(C); }
};

// From the first tap to another one of a line.
__device__ constexpr u32 tap_at(int dx) { return (STEP == 1 ? dx : dx % 2 * (WIDTH / 2) + dx / 2) * PITCH(C); }

#if defined(CONVOLVE) || defined(SPREAD)

// Writes the results of pixels g and g + 8 of a tile, with what is added to them; `at` is for the first of them, in words.
__device__ __forceinline__ void put(u32 *to, const u32 *added, const float (&sum)[G][4], int at, int apart) {
#pragma unroll
    for (int half = 0; half < 2; half++, at += apart) {
        u32 made[G];
        if (ADDED) {
#pragma unroll
            for (int k = 0; k < G; k += 2) {
                const uint2 x = *(const uint2 *)(added + at + k);
                made[k] = x.x, made[k + 1] = x.y;
            }
        }
#pragma unroll
        for (int j = 0; j < G; j++) {
            float low = sum[j][half * 2], high = sum[j][half * 2 + 1];
            if (ADDED) low += __uint_as_float(made[j] << 16), high += __uint_as_float(made[j] & 0xffff0000u);
            made[j] = two(low, high);
        }
#pragma unroll
        for (int k = 0; k < G; k += G < 4 ? 2 : 4) {
            if (G < 4) *(uint2 *)(to + at + k) = make_uint2(made[k], made[k + 1]);
            else *(uint4 *)(to + at + k) = make_uint4(made[k], made[k + 1], made[k + 2], made[k + 3]);
        }
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Convolution: pixels are the rows of a product, outputs its columns.

#ifdef CONVOLVE

// Whether a line below the first one of a warp's tiles is read by one of them.
__device__ constexpr bool wanted(int line) {
    for (int i = 0; i < T; i++)
        if (line >= i * APART && line < i * APART + TAPS) return true;
    return false;
}

// result[lane, image] = images[lane, image] * weights[lane] (+ other[lane, image]); a program makes `per_part` strips, and reads
// one while it makes another
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const char *images, const u32 *packed, const char *other, char *result, int count, int per_part) {
    extern __shared__ uint4 memory[];
    const u32 tiles = shared_address(memory);
    constexpr int bytes = IMAGES * LINES * WIDTH * PITCH(C), held = G * HALVES;
    constexpr bool keep = TAPS * TAPS * STEPS * held <= 36;  // weights of all taps in registers
    const int lane_of = blockIdx.y, units = count / IMAGES * STRIPS;
    const int begin = blockIdx.x * per_part, end = min(units, begin + per_part);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp % ACROSS;
    const int column = warp / ACROSS % COLUMNS, row = warp / ACROSS / COLUMNS * T * DEEP;
    const Loader load;
    images += (long long)lane_of * count * (SOURCE * SOURCE * C * 2);
    if (begin < end) load(tiles, images + (long long)(begin / STRIPS * IMAGES) * (SOURCE * SOURCE * C * 2), begin % STRIPS);
    commit();
    const u32 from = Place(column, row, lane % 16).in_strip() + (C == 8 ? 0 : lane / 16 * 16);
    const Place first(column, row, g), second(column, row, g + 8);
    const int to = (first.image * SIDE + first.y) * SIDE + first.x;
    const int apart = (second.image * SIDE + second.y) * SIDE + second.x - to;
    packed += ((long long)lane_of * (TAPS * TAPS * STEPS * ACROSS) + group) * (32 * held) + lane * held;
    u32 weights[keep ? TAPS * TAPS * STEPS : TAPS][held];
    if (keep)
#pragma unroll
        for (int k = 0; k < TAPS * TAPS * STEPS; k++) load_weights(weights[k], packed + k * (ACROSS * 32 * held));
    for (int unit = begin; unit < end; unit++) {
        const u32 tile = tiles + (unit - begin) % 2 * bytes;
        if (unit + 1 < end)
            load(tiles + (unit + 1 - begin) % 2 * bytes,
                 images + (long long)((unit + 1) / STRIPS * IMAGES) * (SOURCE * SOURCE * C * 2), (unit + 1) % STRIPS);
        commit();
        wait_for<1>();
        __syncthreads();
        float sum[T][G][4] = {};
#pragma unroll
        for (int k = 0; k < TAPS * STEPS; k++) {
            const int step = k % STEPS, dx = k / STEPS;
            if (!keep)
#pragma unroll
                for (int dy = 0; dy < TAPS; dy++)
                    load_weights(weights[dy], packed + ((dy * TAPS + dx) * STEPS + step) * (ACROSS * 32 * held));
#pragma unroll
            for (int line = 0; line < (T - 1) * APART + TAPS; line++) {
                if (!wanted(line)) continue;
                u32 a[4];
                const u32 here = tile + from + line * (WIDTH * PITCH(C)) + tap_at(dx) + step * 32;
                if (C == 8) load2(a, here);
                else load4(a, here);
#pragma unroll
                for (int i = 0; i < T; i++) {
                    const int dy = line - i * APART;
                    if (dy < 0 || dy >= TAPS) continue;
                    const u32(&b)[held] = weights[keep ? (dy * TAPS + dx) * STEPS + step : dy];
#pragma unroll
                    for (int j = 0; j < G; j++) {
                        if (C == 8) multiply8(sum[i][j], a, b[j]);
                        else multiply16(sum[i][j], a, b[j * HALVES], b[j * HALVES + HALVES - 1]);
                    }
                }
            }
        }
        const long long place = (long long)lane_of * count + unit / STRIPS * IMAGES;
        const long long start = ((place * SIDE + unit % STRIPS * ROWS) * SIDE + to) * O + group * 8 * G + t * 2 * G;
#pragma unroll
        for (int i = 0; i < T; i++)
            put((u32 *)(result + start * 2), (const u32 *)(other + start * 2), sum[i], i * (DEEP * SIDE * O / 2), apart * (O / 2));
        __syncthreads();
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Gradient of the image at stride two. Its pixels are of four kinds, by whether their row and column are even: each kind is read
// by taps of its own, one, two, two or four of the nine. So four pixels are made of what lies at, beside and below one.

#ifdef SPREAD

// result[lane, image] = (images[lane, image], spread to twice their side) * weights[lane] (+ other[lane, image])
extern "C" __global__ void __launch_bounds__(THREADS)
spread(const char *images, const u32 *packed, const char *other, char *result, int count, int per_part) {
    extern __shared__ uint4 memory[];
    const u32 tiles = shared_address(memory);
    constexpr int bytes = IMAGES * LINES * WIDTH * PITCH(C), held = G * HALVES, lines = (T - 1) * DEEP + 1 + AFTER;
    const int lane_of = blockIdx.y, units = count / IMAGES * STRIPS;
    const int begin = blockIdx.x * per_part, end = min(units, begin + per_part);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, group = warp % ACROSS;
    const int column = warp / ACROSS % COLUMNS, row = warp / ACROSS / COLUMNS * T * DEEP;
    const Loader load;
    images += (long long)lane_of * count * (SIDE * SIDE * C * 2);
    if (begin < end) load(tiles, images + (long long)(begin / STRIPS * IMAGES) * (SIDE * SIDE * C * 2), begin % STRIPS);
    commit();
    const u32 from = Place(column, row, lane % 16).in_strip() + lane / 16 * 16;
    const Place first(column, row, g), second(column, row, g + 8);
    const int to = (first.image * LARGE + first.y * 2) * LARGE + first.x * 2;
    const int apart = (second.image * LARGE + second.y * 2) * LARGE + second.x * 2 - to;
    packed += ((long long)lane_of * (TAPS * TAPS * STEPS * ACROSS) + group) * (32 * held) + lane * held;
    for (int unit = begin; unit < end; unit++) {
        const u32 tile = tiles + (unit - begin) % 2 * bytes;
        if (unit + 1 < end)
            load(tiles + (unit + 1 - begin) % 2 * bytes,
                 images + (long long)((unit + 1) / STRIPS * IMAGES) * (SIDE * SIDE * C * 2), (unit + 1) % STRIPS);
        commit();
        wait_for<1>();
        __syncthreads();
        float sum[4][T][G][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 a[lines][1 + AFTER][4];
#pragma unroll
            for (int line = 0; line < lines; line++)
#pragma unroll
                for (int beside = 0; beside <= AFTER; beside++)
                    load4(a[line][beside], tile + from + (line * WIDTH + beside) * PITCH(C) + step * 32);
#pragma unroll
            for (int tap = 0; tap < TAPS * TAPS; tap++) {
                const int dy = TAPS == 3 ? tap / 3 : 1, dx = TAPS == 3 ? tap % 3 : 1;
                const int kind = (dy != 1) * 2 + (dx != 1), below = dy == 2, beside = dx == 2;
                u32 b[held];
                load_weights(b, packed + (tap * STEPS + step) * (ACROSS * 32 * held));
#pragma unroll
                for (int i = 0; i < T; i++)
#pragma unroll
                    for (int j = 0; j < G; j++)
                        multiply16(sum[kind][i][j], a[i * DEEP + below][beside], b[j * HALVES], b[j * HALVES + HALVES - 1]);
            }
        }
        const long long place = (long long)lane_of * count + unit / STRIPS * IMAGES;
        const long long start = ((place * LARGE + unit % STRIPS * ROWS * 2) * LARGE + to) * O + group * 8 * G + t * 2 * G;
#pragma unroll
        for (int i = 0; i < T; i++)
#pragma unroll
            for (int kind = 0; kind < 4; kind++)
                put((u32 *)(result + start * 2), (const u32 *)(other + start * 2), sum[kind][i],
                    ((i * DEEP * 2 + kind / 2) * LARGE + kind % 2) * (O / 2), apart * (O / 2));
        __syncthreads();
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Gradient of the weight: outputs are the rows of a product, channels its columns, and the sum goes over pixels. A warp makes T
// tiles of 16 outputs by G tiles of 8 channels, for all taps, from its share of the pixels: it walks down columns of them, and
// what it reads of a line of images serves the gradients of up to three rows.

#if defined(WEIGH) || defined(ADD_UP)

#define IMAGE_BYTES (IMAGES * LINES * WIDTH * PITCH(C))
#define GRAD_BYTES (IMAGES * ROWS * SIDE * PITCH(O))

#ifdef WEIGH

#define WALK (COLUMNS >= SHARES ? ROWS : ROWS * COLUMNS / SHARES)  // rows
#define KEPT ((TAPS - 1) / APART)                                 // rows above that still need a line
static_assert(WALK % DEEP == 0 && ROWS % WALK == 0, "whole tiles");

__device__ __forceinline__ void load_both(const Loader &load, u32 tile, const char *images, const char *grads,
                                          long long place, int strip) {
    load(tile, images + place * (LARGE * LARGE * C * 2), strip);
    const char *from = grads + (place * SIDE + strip * ROWS) * (SIDE * O * 2);
    constexpr int chunks = O / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < IMAGES * ROWS * SIDE * chunks; i += THREADS)
        copy(tile + IMAGE_BYTES + i / chunks * PITCH(O) + i % chunks * 16, from + (long long)i * 16, true);
    commit();
}

// Adds what the lines of a turn, up to the tile below, give with the gradients `a` of that tile (unless it is `PAST` the last
// one) and of those above it, which the lines are further taps of.
template <int PAST>
__device__ __forceinline__ void lines(float (&sum)[T][G][TAPS * TAPS][4], const u32 (&a)[KEPT + 1][T][4], u32 here) {
#pragma unroll
    for (int line = 0; line < APART && line + PAST * APART < TAPS; line++)
#pragma unroll
        for (int dx = 0; dx < TAPS; dx++)
#pragma unroll
            for (int j = 0; j < G; j += 2) {
                u32 b[4];
                const u32 at = here + line * (WIDTH * PITCH(C)) + tap_at(dx) + j * 16;
                if (G == 1) load2_turned(b, at);
                else load4_turned(b, at);
#pragma unroll
                for (int above = PAST; above <= KEPT; above++) {
                    if (line + above * APART >= TAPS) continue;
                    const int tap = (line + above * APART) * TAPS + dx;
#pragma unroll
                    for (int i = 0; i < T; i++) {
                        multiply16(sum[i][j][tap], a[above][i], b[0], b[1]);
                        if (G > 1) multiply16(sum[i][j + (G > 1)][tap], a[above][i], b[2], b[3]);
                    }
                }
            }
}

// result[part, lane] = sum over a part of the strips of all images, of grads[lane] by images[lane], as [tap][out][in]
extern "C" __global__ void __launch_bounds__(THREADS)
weigh(const char *images, const char *grads, float *result, int lanes, int count, int per_part) {
    extern __shared__ uint4 memory[];
    const u32 tiles = shared_address(memory);
    const int lane_of = blockIdx.y, units = count / IMAGES * STRIPS;
    const int begin = blockIdx.x * per_part, end = min(units, begin + per_part);
    const long long before = (long long)lane_of * count;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i8 = lane / 8;
    const int across = warp % ACROSS, down = warp / ACROSS % DOWN, share = warp / ACROSS / DOWN;
    const u32 left = IMAGE_BYTES + (across * T * 16 + i8 % 2 * 8) * 2, right = (down * G * 8 + (G == 1 ? 0 : i8 / 2 * 8)) * 2;
    float sum[T][G][TAPS * TAPS][4] = {};
    const Loader load;
    if (begin < end) load_both(load, tiles, images, grads, before + begin / STRIPS * IMAGES, begin % STRIPS);
    for (int unit = begin; unit < end; unit++) {
        const u32 tile = tiles + (unit - begin) % 2 * (IMAGE_BYTES + GRAD_BYTES);
        if (unit + 1 < end) {
            load_both(load, tiles + (unit + 1 - begin) % 2 * (IMAGE_BYTES + GRAD_BYTES), images, grads,
                      before + (unit + 1) / STRIPS * IMAGES, (unit + 1) % STRIPS);
            wait_for<1>();
        } else {
            wait_for<0>();
        }
        __syncthreads();
#pragma unroll 1
        for (int walk = share; walk < COLUMNS * (ROWS / WALK); walk += SHARES) {
            const int column = walk % COLUMNS, row = walk / COLUMNS * WALK;
            const Place of_grad(column, row, i8 / 2 * 8 + lane % 8), of_image(column, row, i8 % 2 * 8 + lane % 8);
            u32 grad = tile + left + ((of_grad.image * ROWS + of_grad.y) * SIDE + of_grad.x) * PITCH(O);
            u32 here = tile + right + of_image.in_strip();
            u32 a[KEPT + 1][T][4] = {};  // the tile of this turn, and those above it
            for (int i = 0; i < WALK / DEEP; i++) {
#pragma unroll
                for (int k = KEPT; k > 0; k--)
#pragma unroll
                    for (int m = 0; m < T * 4; m++) a[k][m / 4][m % 4] = a[k - 1][m / 4][m % 4];
#pragma unroll
                for (int m = 0; m < T; m++) load4_turned(a[0][m], grad + m * 32);
                lines<0>(sum, a, here);
                grad += DEEP * SIDE * PITCH(O), here += APART * WIDTH * PITCH(C);
            }
#pragma unroll
            for (int past = 1; past <= KEPT; past++, here += APART * WIDTH * PITCH(C)) {  // below the last tile
#pragma unroll
                for (int k = KEPT; k >= past; k--)
#pragma unroll
                    for (int m = 0; m < T * 4; m++) a[k][m / 4][m % 4] = a[k - 1][m / 4][m % 4];
                if (past == 1) lines<1>(sum, a, here);
                else lines<2>(sum, a, here);
            }
        }
        __syncthreads();
    }
    const int g = lane / 4, t = lane % 4;
    float *to = result + ((long long)blockIdx.x * lanes + lane_of) * (O * C * TAPS * TAPS);
    float *gathered = SHARES > 1 ? (float *)memory : to;  // shares are added one after the other, always in the same order
    for (int turn = 0; turn < SHARES; turn++) {
        if (share == turn) {
#pragma unroll
            for (int i = 0; i < T; i++)
#pragma unroll
                for (int j = 0; j < G; j++)
#pragma unroll
                    for (int tap = 0; tap < TAPS * TAPS; tap++)
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            const int o = (across * T + i) * 16 + g + k / 2 * 8, c = (down * G + j) * 8 + t * 2 + k % 2;
                            float *here = gathered + (tap * O + o) * C + c;
                            *here = (turn ? *here : 0) + sum[i][j][tap][k];
                        }
        }
        __syncthreads();
    }
    if (SHARES > 1)
        for (int i = threadIdx.x; i < O * C * TAPS * TAPS; i += blockDim.x) to[i] = gathered[i];
}

#endif

// result[lane][out][in][tap], as torch has it, from parts [part][lane][tap][out][in]
#ifdef ADD_UP
extern "C" __global__ void __launch_bounds__(256) add_up(const float *given, float *result, int lanes, int parts) {
    const int i = blockIdx.x * 256 + threadIdx.x, size = O * C * TAPS * TAPS;
    if (i >= lanes * size) return;
    const int c = i % C, o = i / C % O, tap = i / (C * O) % (TAPS * TAPS), lane_of = i / size;
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; part++) sum += given[(long long)part * lanes * size + i];
    if (c < REAL) result[((lane_of * O + o) * REAL + c) * (TAPS * TAPS) + tap] = sum;
}
#endif

#endif

#endif
