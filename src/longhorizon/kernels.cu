// Convolutions for few channels on tensor cores: the tangents of a small network.
//
// A tangent of a convolution y = x * w is dy = dx * w + x * dw, for every column n. One program makes both products for a
// strip of one image of one column, so that dx is read once, dy is written once, and no copy folds columns into channels.
// The same for the gradient of the image and of the weight.
//
// Numbers are multiplied as TF32 (10 bits) with float32 sums. TERMS = 3 splits each into two TF32 parts and makes the three
// products that matter, which is nearly as accurate as float32; TERMS = 1 rounds.
//
// Given by the caller as macros:
//   C, O          channels that are summed over, and of the result (of a weight's gradient: in and out)
//   SIDE          of the smaller image, which is square; the larger one is STRIDE times that
//   TAPS, STRIDE  3 with a margin of one pixel, stride 1 or 2; or 1 without a margin, stride 2
//   ROWS, LINES   of a strip of the smaller image, and of what is read for it, with its margin
//   PLANE         floats of a channel in shared memory, chosen so that the lanes of a warp read from different banks
//   TERMS         3 or 1
//   OWN, SHARED   whether there is a product with every column's own image, and one with the image that all share
//   EACH          whether the other factor of a column's own image is its own, too (training runs side by side)
//   M, T          tiles of a warp: M of 16 rows by T of 8 columns

#define PADDED ((C + 7) / 8 * 8)
#define STRIPS (SIDE / ROWS)
#define ALONG (SIDE / 8)  // tiles of pixels in a row
#define FIRST (TAPS == 3 ? 0 : 1)
#define PITCH(side) ((side) + 4)  // of a row in shared memory: 0 | - | - | 0 | pixels …; the 0 in front ends the row before

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The TF32 part of a number and what is left of it.
__device__ __forceinline__ void split(float x, unsigned &large, unsigned &small) {
#if TERMS == 3
    large = __float_as_uint(x) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(large));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(large) : "f"(x));
    small = 0;
#endif
}

template <int SIZE> struct Part {  // of a factor: what one lane holds
    unsigned large[SIZE], small[SIZE];
    __device__ __forceinline__ void set(int i, float x) { split(x, large[i], small[i]); }
};
typedef Part<4> A;
typedef Part<2> B;

__device__ __forceinline__ void add_product(float (&sum)[4], const A &a, const B &b) {
#if TERMS == 3
    multiply(sum, a.small, b.large);
    multiply(sum, a.large, b.small);
#endif
    multiply(sum, a.large, b.large);
}

__device__ __forceinline__ void fill_with_zeros(float *tile, int size) {
    for (int i = threadIdx.x * 4; i < size; i += blockDim.x * 4) *(float4 *)(tile + i) = make_float4(0, 0, 0, 0);
}

// Lines of an image, from the one before `first` (in rows of the image). The columns of the margin are zero already.
template <int CHANNELS, int IMAGE>
__device__ __forceinline__ void load_with_margin(float *tile, const float *image, int first) {
    constexpr int per_row = IMAGE / 4, per_channel = LINES * per_row;
    for (int i = threadIdx.x; i < CHANNELS * per_channel; i += blockDim.x) {
        int c = i / per_channel, row = i % per_channel / per_row, x = i % per_row * 4, y = first + row - 1;
        float4 pixels = make_float4(0, 0, 0, 0);
        if (y >= 0 && y < IMAGE) pixels = *(const float4 *)(image + (c * IMAGE + y) * IMAGE + x);
        *(float4 *)(tile + c * PLANE + row * PITCH(IMAGE) + 4 + x) = pixels;
    }
}

// Weights come as [tap][channels / 8][outputs / 16][lane], four to a lane.
#define STEPS (PADDED / 8)
__device__ __forceinline__ void load_weight(A (&a)[M], const float4 *weight, int tap, int step) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        float4 w = __ldg(weight + ((tap * STEPS + step) * (O / 16) + m) * 32);
        a[m].set(0, w.x), a[m].set(1, w.y), a[m].set(2, w.z), a[m].set(3, w.w);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolution. Sum over channels: outputs are the rows of a product, pixels its columns. A warp makes M tiles of 16 outputs
// by T tiles of 8 pixels.

#ifdef CONVOLVE

#define LARGE (SIDE * STRIDE)
#define ACROSS (O / 16 / M)  // warps over outputs
#define THREADS (32 * ACROSS * (ROWS * ALONG / T))

__device__ __forceinline__ void convolve_one(float (&sum)[M][T][4], float *tile, const float *image, const float4 *weight,
                                             int strip) {
    __syncthreads();
    load_with_margin<C, LARGE>(tile, image, strip * ROWS * STRIDE);
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp / ACROSS * T;
    const float *mine = tile + t * PLANE + g * STRIDE + 3;
    weight += warp % ACROSS * M * 32 + lane;
#pragma unroll 1
    for (int dy = FIRST; dy < FIRST + TAPS; dy++) {
#pragma unroll
        for (int dx = FIRST; dx < FIRST + TAPS; dx++) {
#pragma unroll(STEPS <= 2 ? STEPS : 2)
            for (int step = 0; step < STEPS; step++) {
                A a[M];
                load_weight(a, weight, (dy - FIRST) * TAPS + dx - FIRST, step);
#pragma unroll
                for (int i = 0; i < T; i++) {
                    int place = first + i;
                    const float *from = mine + step * 8 * PLANE + (place / ALONG * STRIDE + dy) * PITCH(LARGE) +
                                        place % ALONG * 8 * STRIDE + dx;
                    B b;
                    b.set(0, from[0]), b.set(1, from[4 * PLANE]);
#pragma unroll
                    for (int m = 0; m < M; m++) add_product(sum[m][i], a[m], b);
                }
            }
        }
    }
}

// result[n, i] = images[n, i] * weight + image[i] * weights[n]
extern "C" __global__ void __launch_bounds__(THREADS)
convolve(const float *images, const float4 *weight, const float *image, const float4 *weights, float *result, int columns,
         int count) {
    extern __shared__ float4 memory[];
    float *tile = (float *)memory;
    const int n = blockIdx.x % columns, strip = blockIdx.x / columns % STRIPS, i = blockIdx.x / columns / STRIPS;
    const long long place = (long long)n * count + i;
    float sum[M][T][4] = {};
    fill_with_zeros(tile, PADDED * PLANE);
    const int weights_before = n * (TAPS * TAPS * STEPS * (O / 16) * 32);
    if (OWN) convolve_one(sum, tile, images + place * (C * LARGE * LARGE), weight + EACH * weights_before, strip);
    weights += weights_before;
    if (SHARED) convolve_one(sum, tile, image + (long long)i * (C * LARGE * LARGE), weights, strip);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float *to = result + ((place * O + warp % ACROSS * M * 16 + g) * SIDE + strip * ROWS) * SIDE + t * 2;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int j = 0; j < T; j++) {
            float *pixel = to + m * 16 * SIDE * SIDE + (warp / ACROSS * T + j) * 8;
            *(float2 *)pixel = make_float2(sum[m][j][0], sum[m][j][1]);
            *(float2 *)(pixel + 8 * SIDE * SIDE) = make_float2(sum[m][j][2], sum[m][j][3]);
        }
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Gradient of the image at stride two: pixels of the gradient are spread over four times as many. Row 2Y of the image has
// seen row Y of the gradient through the middle tap; row 2Y + 1 has seen row Y + 1 through tap 0 and row Y through tap 2.
// So each tap belongs to one of four phases, of which a warp makes all four.

#ifdef SPREAD

#define LARGE (SIDE * 2)
#define ACROSS (O / 16 / M)
#define THREADS (32 * ACROSS * (ROWS * ALONG / T))

__device__ __forceinline__ void spread_one(float (&sum)[4][M][T][4], float *tile, const float *grad, const float4 *weight,
                                           int strip) {
    __syncthreads();
    load_with_margin<C, SIDE>(tile, grad, strip * ROWS);
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first = warp / ACROSS * T;
    const float *mine = tile + t * PLANE + g + 4;
    weight += warp % ACROSS * M * 32 + lane;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int near = 0; near < (TAPS == 3 ? 4 : 1); near++) {  // this pixel of the gradient, the next one, the next row's
            B b[T];
#pragma unroll
            for (int i = 0; i < T; i++) {
                int place = first + i;
                const float *from = mine + step * 8 * PLANE + (place / ALONG + 1 + near / 2) * PITCH(SIDE) +
                                    place % ALONG * 8 + near % 2;
                b[i].set(0, from[0]), b[i].set(1, from[4 * PLANE]);
            }
#pragma unroll
            for (int tap = 0; tap < TAPS * TAPS; tap++) {
                const int dy = FIRST + tap / TAPS, dx = FIRST + tap % TAPS;
                if ((dy == 0) * 2 + (dx == 0) != near) continue;
                A a[M];
                load_weight(a, weight, tap, step);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < T; i++) add_product(sum[(dy != 1) * 2 + (dx != 1)][m][i], a[m], b[i]);
            }
        }
    }
}

// result[n, i]: what images[n, i] and image[i], gradients of a convolution's result, say of its image
extern "C" __global__ void __launch_bounds__(THREADS)
spread(const float *images, const float4 *weight, const float *image, const float4 *weights, float *result, int columns,
       int count) {
    extern __shared__ float4 memory[];
    float *tile = (float *)memory;
    const int n = blockIdx.x % columns, strip = blockIdx.x / columns % STRIPS, i = blockIdx.x / columns / STRIPS;
    const long long place = (long long)n * count + i;
    float sum[4][M][T][4] = {};
    fill_with_zeros(tile, PADDED * PLANE);
    const int weights_before = n * (TAPS * TAPS * STEPS * (O / 16) * 32);
    if (OWN) spread_one(sum, tile, images + place * (C * SIDE * SIDE), weight + EACH * weights_before, strip);
    weights += weights_before;
    if (SHARED) spread_one(sum, tile, image + (long long)i * (C * SIDE * SIDE), weights, strip);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float *to = result + ((place * O + warp % ACROSS * M * 16 + g) * LARGE + strip * ROWS * 2) * LARGE + t * 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < T; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)  // outputs g and g + 8
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    int tile_of = warp / ACROSS * T + j;
                    float *pixel = to + (m * 16 + half * 8) * LARGE * LARGE + (tile_of / ALONG * 2 + row) * LARGE +
                                   tile_of % ALONG * 16;
                    const float *left = sum[row * 2][m][j] + half * 2, *right = sum[row * 2 + 1][m][j] + half * 2;
                    *(float4 *)pixel = make_float4(left[0], right[0], left[1], right[1]);
                }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Gradient of the weight. Sum over pixels: outputs are the rows of a product, channels its columns. A warp makes M tiles of 16
// outputs by T tiles of 8 channels, for all taps, from its share of the pixels. GROUP channels are dealt with in one program.

#ifdef WEIGH

#define LARGE (SIDE * STRIDE)
#define FLAT (ROWS * SIDE + 4)
#define ACROSS (O / 16 / M)
#define DOWN (GROUP / 8 / T)
#define THREADS (32 * ACROSS * DOWN * SHARES)

__device__ __forceinline__ void weigh_one(float (&sum)[M][T][TAPS * TAPS][4], float *tile, float *flat, const float *grad,
                                          const float *image, int strip) {
    __syncthreads();
    load_with_margin<(C < GROUP ? C : GROUP), LARGE>(tile, image, strip * ROWS * STRIDE);
    for (int i = threadIdx.x * 4; i < O * ROWS * SIDE; i += blockDim.x * 4) {
        int o = i / (ROWS * SIDE), p = i % (ROWS * SIDE);
        *(float4 *)(flat + o * FLAT + p) = *(const float4 *)(grad + o * SIDE * SIDE + strip * ROWS * SIDE + p);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int across = warp % ACROSS, down = warp / ACROSS % DOWN, share = warp / ACROSS / DOWN;
    const float *left = flat + (across * M * 16 + g) * FLAT + t;
    const float *right = tile + (down * T * 8 + g) * PLANE + t * STRIDE + 3;
#pragma unroll 1
    for (int place = share; place < ROWS * ALONG; place += SHARES) {
        A a[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float *from = left + m * 16 * FLAT + place * 8;
            a[m].set(0, from[0]), a[m].set(1, from[8 * FLAT]), a[m].set(2, from[4]), a[m].set(3, from[8 * FLAT + 4]);
        }
        const float *from = right + place / ALONG * STRIDE * PITCH(LARGE) + place % ALONG * 8 * STRIDE;
#pragma unroll
        for (int c = 0; c < T; c++) {
#pragma unroll
            for (int tap = 0; tap < TAPS * TAPS; tap++) {
                const float *here = from + c * 8 * PLANE + (FIRST + tap / TAPS) * PITCH(LARGE) + FIRST + tap % TAPS;
                B b;
                b.set(0, here[0]), b.set(1, here[4 * STRIDE]);
#pragma unroll
                for (int m = 0; m < M; m++) add_product(sum[m][c][tap], a[m], b);
            }
        }
    }
}

// result[part, n] = sum over a part of the strips of all images, of grads[n] by image, plus grad by images[n]
extern "C" __global__ void __launch_bounds__(THREADS)
weigh(const float *images, const float *grad, const float *image, const float *grads, float *result, int columns, int count,
      int per_part) {
    extern __shared__ float4 memory[];
    float *tile = (float *)memory, *flat = tile + GROUP * PLANE;
    const int n = blockIdx.y, part = blockIdx.x, channel = blockIdx.z * GROUP;
    float sum[M][T][TAPS * TAPS][4] = {};
    fill_with_zeros(tile, GROUP * PLANE);
    for (int unit = part * per_part; unit < min(count * STRIPS, (part + 1) * per_part); unit++) {
        const int i = unit / STRIPS, strip = unit % STRIPS;
        const long long place = (long long)n * count + i;
        if (OWN)
            weigh_one(sum, tile, flat, grad + (EACH ? place : i) * (O * SIDE * SIDE),
                      images + (place * C + channel) * LARGE * LARGE, strip);
        if (SHARED)
            weigh_one(sum, tile, flat, grads + place * (O * SIDE * SIDE),
                      image + ((long long)i * C + channel) * LARGE * LARGE, strip);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int across = warp % ACROSS, down = warp / ACROSS % DOWN, share = warp / ACROSS / DOWN;
    float *to = result + ((long long)part * columns + n) * (O * C * TAPS * TAPS);
    float *shared_sum = SHARES > 1 ? tile : to;  // shares are added one after the other, always in the same order
    for (int turn = 0; turn < SHARES; turn++) {
        __syncthreads();
        if (share == turn) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int c = 0; c < T; c++)
#pragma unroll
                    for (int tap = 0; tap < TAPS * TAPS; tap++)
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            int o = (across * M + m) * 16 + g + k / 2 * 8;
                            int into = channel + (down * T + c) * 8 + t * 2 + k % 2;
                            float *here = shared_sum + (o * C + into) * TAPS * TAPS + tap;
                            if (into < C) *here = (turn ? *here : 0) + sum[m][c][tap][k];
                        }
        }
    }
    if (SHARES > 1) {  // then there is one group of channels
        __syncthreads();
        for (int i = threadIdx.x; i < O * C * TAPS * TAPS; i += blockDim.x) to[i] = shared_sum[i];
    }
}

#endif

// ---------------------------------------------------------------------------------------------------------------------
// The model's own convolution, summed in float64: what a ReLU does depends on its last bits. A warp makes M tiles of 8
// outputs by T tiles of 8 pixels; weights come as [tap][channels / 4][outputs / 8][lane].

#ifdef PRECISE

#define LARGE (SIDE * STRIDE)
#define ACROSS (O / 8 / M)
#define THREADS (32 * ACROSS * (ROWS * ALONG / T))
#define QUARTERS ((C + 3) / 4)

extern "C" __global__ void __launch_bounds__(THREADS)
precise(const float *image, const float *weight, float *result, int count) {
    extern __shared__ float4 memory[];
    float *tile = (float *)memory;
    const int strip = blockIdx.x % STRIPS;
    const long long place = blockIdx.x / STRIPS;
    fill_with_zeros(tile, QUARTERS * 4 * PLANE);
    __syncthreads();
    load_with_margin<C, LARGE>(tile, image + place * (C * LARGE * LARGE), strip * ROWS * STRIDE);
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int across = warp % ACROSS, first = warp / ACROSS * T;
    const float *mine = tile + t * PLANE + g * STRIDE + 3;
    weight += across * M * 32 + lane;
    double sum[M][T][2] = {};
#pragma unroll 1
    for (int dy = FIRST; dy < FIRST + TAPS; dy++) {
#pragma unroll 1
        for (int dx = FIRST; dx < FIRST + TAPS; dx++) {
#pragma unroll 2
            for (int step = 0; step < QUARTERS; step++) {
                double a[M];
#pragma unroll
                for (int m = 0; m < M; m++)
                    a[m] = weight[((((dy - FIRST) * TAPS + dx - FIRST) * QUARTERS + step) * (O / 8) + m) * 32];
#pragma unroll
                for (int i = 0; i < T; i++) {
                    int here = first + i;
                    double b = mine[step * 4 * PLANE + (here / ALONG * STRIDE + dy) * PITCH(LARGE) +
                                    here % ALONG * 8 * STRIDE + dx];
#pragma unroll
                    for (int m = 0; m < M; m++)
                        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                            : "+d"(sum[m][i][0]), "+d"(sum[m][i][1])
                            : "d"(a[m]), "d"(b));
                }
            }
        }
    }
    float *to = result + ((place * O + across * M * 8 + g) * SIDE + strip * ROWS) * SIDE + t * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < T; i++)
            *(float2 *)(to + m * 8 * SIDE * SIDE + (first + i) * 8) = make_float2(sum[m][i][0], sum[m][i][1]);
}

#endif
