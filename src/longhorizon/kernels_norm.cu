// BatchNorm of training runs side by side, in bfloat16: every run (lane) has statistics, a scale and an offset of its own.
//
// Images lie as [lane][pixel][channel], pixels of all images in a row. A thread takes eight channels of a pixel at a time, always
// the same eight, so that what it knows of them and what it sums stays in registers. Sums are float32, and in the same order
// whenever they are made.
//
// Given by the caller as macros:
//   C             channels, a power of two from 8 to 256
//   RELU          1: what is below zero becomes zero, or the gradient does there
//   ADDED         1: something else is added to the result

typedef unsigned int u32;

#define THREADS 256
#define GROUPS (C / 8)
#define EACH 8  // channels of a thread

// Eight bfloat16 numbers as float32.
__device__ __forceinline__ void opened(float (&to)[EACH], uint4 from) {
    const u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        to[2 * k] = __uint_as_float(pairs[k] << 16);
        to[2 * k + 1] = __uint_as_float(pairs[k] & 0xffff0000u);
    }
}

__device__ __forceinline__ u32 two(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ uint4 closed(const float (&from)[EACH]) {
    return make_uint4(two(from[0], from[1]), two(from[2], from[3]), two(from[4], from[5]), two(from[6], from[7]));
}

// A number per lane and channel: those of a thread.
__device__ __forceinline__ void known(float (&to)[EACH], const float *from) {
    const float4 *at = (const float4 *)(from + blockIdx.y * C + threadIdx.x % GROUPS * EACH);
    const float4 low = __ldg(at), high = __ldg(at + 1);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// ---------------------------------------------------------------------------------------------------------------------

#if defined(MOMENTS) || defined(SLOPES)

// The sums of all threads of a program, to [part][lane][2][channel].
__device__ __forceinline__ void gathered(const float (&first)[EACH], const float (&second)[EACH], float *parts) {
    __shared__ float of_warp[THREADS / 32][2][C];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < 2 * EACH; k++) {
        float sum = k < EACH ? first[k % EACH] : second[k % EACH];
#pragma unroll
        for (int apart = 16; apart >= GROUPS; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (lane < GROUPS) of_warp[warp][k / EACH][lane * EACH + k % EACH] = sum;
    }
    __syncthreads();
    float *to = parts + ((long long)blockIdx.x * gridDim.y + blockIdx.y) * (2 * C);
    for (int i = threadIdx.x; i < 2 * C; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) sum += of_warp[w][i / C][i % C];
        to[i] = sum;
    }
}

#endif

#ifdef MOMENTS

// Sums of the pixels of a part and of their squares, less the first pixel: so near to the mean, mostly, that the variance
// is right to 1e-4 with one that is ten deviations off.
extern "C" __global__ void __launch_bounds__(THREADS) moments(const uint4 *images, float *parts, int pixels, int per_part) {
    images += (long long)blockIdx.y * pixels * GROUPS;
    const int end = min(pixels, (int)(blockIdx.x + 1) * per_part) * GROUPS;
    float shift[EACH], sum[EACH] = {}, square[EACH] = {};
    opened(shift, __ldg(images + threadIdx.x % GROUPS));
    for (int i = blockIdx.x * per_part * GROUPS + threadIdx.x; i < end; i += 4 * THREADS) {
        uint4 given[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * THREADS < end) given[k] = images[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k * THREADS >= end) break;
            float x[EACH];
            opened(x, given[k]);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const float off = x[e] - shift[e];
                sum[e] += off;
                square[e] = fmaf(off, off, square[e]);
            }
        }
    }
    gathered(sum, square, parts);
}

#endif

#ifdef MEAN_AND_VARIANCE

// result[2][lane][channel] from parts [part][lane][2][channel]
extern "C" __global__ void __launch_bounds__(THREADS)
mean_and_variance(const unsigned short *images, const float *parts, float *result, int lanes, int count, int pixels) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= lanes * C) return;
    const int lane = i / C, c = i % C;
    float sum = 0, square = 0;
#pragma unroll 4
    for (int part = 0; part < count; part++) {
        const float *at = parts + ((long long)part * lanes + lane) * (2 * C) + c;
        sum += at[0];
        square += at[C];
    }
    const float shift = __uint_as_float((u32)images[(long long)lane * pixels * C + c] << 16);
    const float mean = sum / pixels, variance = square / pixels - mean * mean;
    result[i] = shift + mean;
    result[lanes * C + i] = variance < 0.f ? 0.f : variance;  // one that is no number stays none
}

#endif

#ifdef TOTALS

// result[2][lane][channel] from parts [part][lane][2][channel]
extern "C" __global__ void __launch_bounds__(THREADS) totals(const float *parts, float *result, int lanes, int count) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= 2 * lanes * C) return;
    const int which = i / (lanes * C), lane = i / C % lanes, c = i % C;
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < count; part++) sum += parts[((long long)part * lanes + lane) * (2 * C) + which * C + c];
    result[i] = sum;
}

#endif

// ---------------------------------------------------------------------------------------------------------------------

#ifdef SCALED

// result = images * scale + offset
extern "C" __global__ void __launch_bounds__(THREADS)
scaled(const uint4 *images, const float *scale, const float *offset, uint4 *result, int pixels, int per_part) {
    images += (long long)blockIdx.y * pixels * GROUPS;
    result += (long long)blockIdx.y * pixels * GROUPS;
    const int end = min(pixels, (int)(blockIdx.x + 1) * per_part) * GROUPS;
    float by[EACH], to[EACH];
    known(by, scale);
    known(to, offset);
    for (int i = blockIdx.x * per_part * GROUPS + threadIdx.x; i < end; i += 4 * THREADS) {
        uint4 given[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + k * THREADS < end) given[k] = images[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i + k * THREADS >= end) break;
            float x[EACH];
            opened(x, given[k]);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                x[e] = fmaf(x[e], by[e], to[e]);
                if (RELU) x[e] = x[e] < 0.f ? 0.f : x[e];
            }
            result[i + k * THREADS] = closed(x);
        }
    }
}

#endif

// Gradients of what was scaled; none where that was cut off at zero.
#if defined(SLOPES) || defined(UNSCALED)
__device__ __forceinline__ void kept(float (&grad)[EACH], const float (&x)[EACH], const float (&by)[EACH], const float (&to)[EACH]) {
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (RELU && fmaf(x[e], by[e], to[e]) <= 0.f) grad[e] = 0.f;
}
#endif

#ifdef SLOPES

// Sums of the gradients of a part, and of their products with images less the mean.
extern "C" __global__ void __launch_bounds__(THREADS)
slopes(const uint4 *images, const uint4 *grads, const float *scale, const float *offset, const float *mean, float *parts,
       int pixels, int per_part) {
    images += (long long)blockIdx.y * pixels * GROUPS;
    grads += (long long)blockIdx.y * pixels * GROUPS;
    const int end = min(pixels, (int)(blockIdx.x + 1) * per_part) * GROUPS;
    float by[EACH], to[EACH], middle[EACH], sum[EACH] = {}, product[EACH] = {};
    known(by, scale);
    known(to, offset);
    known(middle, mean);
    for (int i = blockIdx.x * per_part * GROUPS + threadIdx.x; i < end; i += 2 * THREADS) {
        uint4 given[2], slope[2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (i + k * THREADS < end) given[k] = images[i + k * THREADS], slope[k] = grads[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (i + k * THREADS >= end) break;
            float x[EACH], grad[EACH];
            opened(x, given[k]);
            opened(grad, slope[k]);
            kept(grad, x, by, to);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                sum[e] += grad[e];
                product[e] = fmaf(grad[e], x[e] - middle[e], product[e]);
            }
        }
    }
    gathered(sum, product, parts);
}

#endif

#ifdef UNSCALED

// result = grads * scale + images * slope + rest (+ other)
extern "C" __global__ void __launch_bounds__(THREADS)
unscaled(const uint4 *images, const uint4 *grads, const uint4 *other, const float *scale, const float *offset, const float *slope,
         const float *rest, uint4 *result, int pixels, int per_part) {
    const long long before = (long long)blockIdx.y * pixels * GROUPS;
    images += before;
    grads += before;
    other += before;
    result += before;
    const int end = min(pixels, (int)(blockIdx.x + 1) * per_part) * GROUPS;
    float by[EACH], to[EACH], of[EACH], less[EACH];
    known(by, scale);
    known(to, offset);
    known(of, slope);
    known(less, rest);
    for (int i = blockIdx.x * per_part * GROUPS + threadIdx.x; i < end; i += 2 * THREADS) {
        uint4 given[2], back[2], beside[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (i + k * THREADS >= end) continue;
            given[k] = images[i + k * THREADS], back[k] = grads[i + k * THREADS];
            if (ADDED) beside[k] = other[i + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (i + k * THREADS >= end) break;
            float x[EACH], grad[EACH], more[EACH];
            opened(x, given[k]);
            opened(grad, back[k]);
            kept(grad, x, by, to);
            if (ADDED) opened(more, beside[k]);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                x[e] = fmaf(grad[e], by[e], fmaf(x[e], of[e], less[e]));
                if (ADDED) x[e] += more[e];
            }
            result[i + k * THREADS] = closed(x);
        }
    }
}

#endif
