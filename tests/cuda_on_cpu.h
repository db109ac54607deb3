// A graphics processor to test kernels on, in a few hundred lines: what cuda_on_cpu.py puts in front of a .cu file.
//
// Programs of a grid run one after the other. The threads of a program are fibers: one runs until it has to wait for the
// others of its warp (a matrix instruction, a shuffle) or of its program (__syncthreads). Where nobody can go on, threads have
// parted ways, and that is said. A warp goes on as far as it can before the next one has its turn, shared memory is NaN at
// first, and copies to it are made when they are waited for; `backwards`, the last warp is the first, and copies are made at
// once. So a wait or a barrier that is missing shows in one of the two results.

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static int min(int a, int b) { return a < b ? a : b; }
template <class T> static T __ldg(const T *at) {
    if ((uintptr_t)at % sizeof(T)) throw std::runtime_error("a read that is not aligned");
    return *at;
}
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }

namespace on_cpu {

constexpr unsigned POISON = 0xffffffffu;  // NaN in every format
constexpr size_t STACK = 256 * 1024;

struct Copy {
    unsigned to;
    const char *from;
    int size;
    void make() const;
};
struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf place;       // and where it is
    Index thread;
    bool begun = false, done = false;
    long of_warp = 0, of_program = 0;         // how often it has waited for others
    std::vector<std::vector<Copy>> copies{1};  // groups of copies that were begun; the last one is still open
};
struct Slot { unsigned words[2][8]; };  // what a lane shows the others of its warp, by turns

static std::vector<Fiber> fibers;
static std::vector<long> arrived;  // at each warp's waits
static std::vector<Slot> slots;
static std::vector<char> stacks, shared;
static long arrived_program;
static Fiber *now;
static jmp_buf back;
static bool reversed;
static Index block, blocks, size;
static std::function<void()> body;
static std::string failed;

static int me() { return now->thread.x; }
static void take_turns() {  // without the system, which swapcontext would ask every time
    if (!_setjmp(now->place)) _longjmp(back, 1);
}
static void go_on(Fiber &f) {
    now = &f;
    if (_setjmp(back)) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}
static bool may_go_on(const Fiber &f) {
    const long warp_size = fibers.size() < 32 ? fibers.size() : 32;
    return arrived[f.thread.x / 32] >= f.of_warp * warp_size && arrived_program >= f.of_program * (long)fibers.size();
}
static void wait_for_warp() { now->of_warp++, arrived[me() / 32]++, take_turns(); }
static void wait_for_program() { now->of_program++, arrived_program++, take_turns(); }

// Shows words to the warp; `of(lane, k)` then is another lane's.
struct Shown {
    int turn, first;
    Shown(std::initializer_list<unsigned> words) : turn(now->of_warp % 2), first(me() / 32 * 32) {
        int k = 0;
        for (unsigned word : words) slots[me()].words[turn][k++] = word;
        wait_for_warp();
    }
    unsigned of(int lane, int k) const { return slots[first + lane].words[turn][k]; }
};

static void run_one() {
    try { body(); } catch (const std::exception &error) { failed = error.what(); }
    now->done = true;
    take_turns();
}

static void run_program(int threads, int bytes) {
    const int warps = (threads + 31) / 32;
    shared.assign(bytes + 16, (char)POISON);
    fibers.assign(threads, Fiber());
    arrived.assign(warps, 0), slots.assign(threads, Slot()), arrived_program = 0;
    stacks.resize(threads * STACK);
    for (int i = 0; i < threads; i++) {
        Fiber &f = fibers[i];
        f.thread = {i, 0, 0};
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks.data() + i * STACK, f.context.uc_stack.ss_size = STACK;
        makecontext(&f.context, run_one, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (int w = 0; w < warps; w++) {
            const int first = (reversed ? warps - 1 - w : w) * 32;
            for (bool more = true; more;) {
                more = false;
                for (int i = first; i < first + 32 && i < threads; i++) {
                    if (fibers[i].done || !may_go_on(fibers[i])) continue;
                    go_on(fibers[i]);
                    if (!failed.empty()) return;
                    more = any = true;
                }
            }
        }
    }
    for (const Fiber &f : fibers)
        if (!f.done) failed = "threads wait for others that do not come";
}

// What a program has of shared memory that its caller gave it.
static char *dynamic() { return (char *)(((uintptr_t)shared.data() + 15) / 16 * 16); }
static char *at(unsigned address, int bytes) {
    if (address % bytes) throw std::runtime_error("a place in shared memory that is not aligned");
    if (address + bytes > shared.size() - 16) throw std::runtime_error("a place beyond shared memory");
    return dynamic() + address;
}

inline void Copy::make() const {
    char *there = at(to, 16);
    memset(there, 0, 16);
    memcpy(there, from, size);
}

static unsigned bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (std::isnan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float low(unsigned pair) { return __uint_as_float(pair << 16); }
static float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
static float half(unsigned pair, int which) { return which ? high(pair) : low(pair); }
static float tf32(unsigned bits) { return __uint_as_float(bits & 0xffffe000u); }

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void **given, std::index_sequence<I...>) { kernel(*(A *)given[I]...); }

template <class... A>
static const char *launch(void (*kernel)(A...), void **given, const int *grid, int threads, int bytes, int backwards) {
    failed.clear();
    reversed = backwards;
    blocks = {grid[0], grid[1], grid[2]}, size = {threads, 1, 1};
    body = [=] { call(kernel, given, std::index_sequence_for<A...>()); };
    for (int z = 0; z < grid[2]; z++)
        for (int y = 0; y < grid[1]; y++)
            for (int x = 0; x < grid[0] && failed.empty(); x++) block = {x, y, z}, run_program(threads, bytes);
    return failed.empty() ? nullptr : failed.c_str();
}

}  // namespace on_cpu

#define threadIdx (on_cpu::now->thread)
#define blockIdx (on_cpu::block)
#define blockDim (on_cpu::size)
#define gridDim (on_cpu::blocks)

static void __syncthreads() { on_cpu::wait_for_program(); }
static float __shfl_xor_sync(unsigned, float x, int mask) {
    on_cpu::Shown shown{__float_as_uint(x)};
    return __uint_as_float(shown.of(on_cpu::me() % 32 ^ mask, 0));
}

// ---------------------------------------------------------------------------------------------------------------------
// Instructions, by their names in PTX. Operands come in their order, results first.

static void cvt_rn_bf16x2_f32(unsigned &both, float high, float low) { both = on_cpu::bf16(high) << 16 | on_cpu::bf16(low); }
static void cvt_rna_tf32_f32(unsigned &made, float x) { made = (__float_as_uint(x) + 0x1000) & 0xffffe000u; }
static void cvta_to_shared_u64(unsigned &address, const void *pointer) { address = (const char *)pointer - on_cpu::dynamic(); }

static void cp_async_cg_shared_global(unsigned to, const char *from, int size) {
    if (size && (uintptr_t)from % 16) throw std::runtime_error("a copy from a place that is not aligned");
    on_cpu::Copy copy{to, from, size};
    if (on_cpu::reversed) copy.make();
    else on_cpu::now->copies.back().push_back(copy);
}
static void cp_async_commit_group() { on_cpu::now->copies.emplace_back(); }
static void cp_async_wait_group(int left) {
    auto &copies = on_cpu::now->copies;
    while ((int)copies.size() - 1 > left) {
        for (const on_cpu::Copy &copy : copies.front()) copy.make();
        copies.erase(copies.begin());
    }
}

template <int COUNT, bool TURNED> static void load_matrices(unsigned *const (&r)[COUNT], unsigned address) {
    const on_cpu::Shown shown{address};
    const int lane = on_cpu::me() % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < COUNT; k++) {
        uint16_t pair[2];
        for (int e = 0; e < 2; e++) {
            const int row = TURNED ? 2 * t + e : g, column = TURNED ? g : 2 * t + e;
            memcpy(&pair[e], on_cpu::at(shown.of(k * 8 + row, 0), 16) + column * 2, 2);
        }
        *r[k] = pair[0] | (unsigned)pair[1] << 16;
    }
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address) {
    load_matrices<4, false>({&a, &b, &c, &d}, address);
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address) {
    load_matrices<4, true>({&a, &b, &c, &d}, address);
}
static void ldmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned &a, unsigned &b, unsigned address) {
    load_matrices<2, false>({&a, &b}, address);
}
static void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned &a, unsigned &b, unsigned address) {
    load_matrices<2, true>({&a, &b}, address);
}

// sums (16 x 8) of a thread: row g and column 2t, 2t + 1, then row g + 8; A's rows are those, B's columns its g
template <class Left, class Right> static void sum_up(float *const (&sum)[4], int depth, Left left, Right right) {
    const int lane = on_cpu::me() % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 4; k++) {
        double total = *sum[k];
        for (int i = 0; i < depth; i++) total += (double)left(g + k / 2 * 8, i) * right(i, 2 * t + k % 2);
        *sum[k] = total;
    }
}
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float &s0, float &s1, float &s2, float &s3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const on_cpu::Shown shown{a0, a1, a2, a3, b0, b1};
    sum_up(
        {&s0, &s1, &s2, &s3}, 16,
        [&](int row, int i) { return on_cpu::half(shown.of(row % 8 * 4 + i % 8 / 2, i / 8 * 2 + row / 8), i % 2); },
        [&](int i, int column) { return on_cpu::half(shown.of(column * 4 + i % 8 / 2, 4 + i / 8), i % 2); });
}
static void mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32(float &s0, float &s1, float &s2, float &s3, unsigned a0,
                                                               unsigned a1, unsigned b) {
    const on_cpu::Shown shown{a0, a1, b};
    sum_up(
        {&s0, &s1, &s2, &s3}, 8, [&](int row, int i) { return on_cpu::half(shown.of(row % 8 * 4 + i / 2, row / 8), i % 2); },
        [&](int i, int column) { return on_cpu::half(shown.of(column * 4 + i / 2, 2), i % 2); });
}
static void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float &s0, float &s1, float &s2, float &s3, unsigned a0,
                                                               unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const on_cpu::Shown shown{a0, a1, a2, a3, b0, b1};
    sum_up(
        {&s0, &s1, &s2, &s3}, 8,
        [&](int row, int i) { return on_cpu::tf32(shown.of(row % 8 * 4 + i % 4, i / 4 * 2 + row / 8)); },
        [&](int i, int column) { return on_cpu::tf32(shown.of(column * 4 + i % 4, 4 + i / 4)); });
}
static void mma_sync_aligned_m8n8k4_row_col_f64_f64_f64_f64(double &s0, double &s1, double a, double b) {
    unsigned words[4];
    memcpy(words, &a, 8), memcpy(words + 2, &b, 8);
    const on_cpu::Shown shown{words[0], words[1], words[2], words[3]};
    const auto of = [&](int lane, int first) {
        const unsigned both[2] = {shown.of(lane, first), shown.of(lane, first + 1)};
        double x;
        memcpy(&x, both, 8);
        return x;
    };
    const int lane = on_cpu::me() % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        s0 += of(g * 4 + i, 0) * of(2 * t * 4 + i, 2);
        s1 += of(g * 4 + i, 0) * of((2 * t + 1) * 4 + i, 2);
    }
}
