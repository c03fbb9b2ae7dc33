// WGrad on Hopper: D [N, K] = A [N, T] · B [K, T]ᵀ, FP8 E4M3 codes with one fp32 scale per row and 128 tokens of each.
//
// Compiled by NVRTC for sm_90a. 128 products are summed in the tensor core, multiplied by the product of both scales and
// added to an fp32 accumulator, group after group of tokens: the arithmetic of DeepGEMM's 1D1D kernel, whose bits these
// are. D is written once, in its own dtype.
//
// A cluster of two blocks computes two tiles of 256x128 side by side; each loads half of the rows of A for both. In a
// block one thread loads, and two warpgroups of 128 rows each multiply, 64 rows by 128 columns at a time, in turns: left
// alone they wait for the same loads and then scale at the same time, while the tensor core has nothing to do. A turn is
// given while half of its products are still being summed.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TILE_N = 256, TILE_K = 128, GROUP = 128, STAGES = 4, WARPGROUPS = 2, BAND = 8;
constexpr int WARPS = 4 * WARPGROUPS, WARPGROUP_N = TILE_N / WARPGROUPS, HALVES = WARPGROUP_N / 64;
constexpr u32 A_BYTES = TILE_N * GROUP, B_BYTES = TILE_K * GROUP, A_SCALES = 4 * TILE_N, B_SCALES = 4 * TILE_K;
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES + A_SCALES + B_SCALES;
constexpr u32 D_BYTES = 16 * 128;  // a warp's 16 rows of 128 bytes
constexpr u32 AT_A = 0, AT_B = AT_A + STAGES * A_BYTES, AT_D = AT_B + STAGES * B_BYTES;
constexpr u32 AT_A_SCALES = AT_D + WARPS * D_BYTES, AT_B_SCALES = AT_A_SCALES + STAGES * A_SCALES;
constexpr u32 AT_FULL = AT_B_SCALES + STAGES * B_SCALES, AT_EMPTY = AT_FULL + 8 * STAGES;

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// ------------------------------------------------------------------------------------------------- instructions

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The address of a block's barrier as another block of the cluster, or the same one, reaches it.
__device__ __forceinline__ u32 barrier_of(u32 barrier, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    return there;
}

__device__ __forceinline__ void barrier_arrive(u32 there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap &map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Into both blocks of the cluster, at the same place of each.
__device__ __forceinline__ void load_for_both(u32 to, const TensorMap &map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

// Of a map whose rows come 16 at a time, in the order that `column` undoes.
__device__ __forceinline__ void load_sixteens(u32 to, const TensorMap &map, int x, int sixteen, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %5, %5, %5, "
        "%3}], [%4];" ::"r"(to), "l"(&map), "r"(x), "r"(sixteen), "r"(barrier), "r"(0)
        : "memory");
}

__device__ __forceinline__ float read(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}

__device__ __forceinline__ float4 read_four(u32 at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
    return x;
}

// One warpgroup's turn at the tensor core.
__device__ __forceinline__ void await_turn(int warpgroup) {
    asm volatile("bar.sync %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

__device__ __forceinline__ void give_turn(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - warpgroup) : "memory");
}

// The lower half of the description of rows of 128 bytes, swizzled as TMA lays them down, eight in 1024 bytes.
__device__ __forceinline__ u32 operand(u32 at) {
    return 1u << 16 | (at & 0x3FFFF) >> 4;
}

__device__ __forceinline__ u64 whole(u32 operand) {
    return (u64)(1u << 30 | 64) << 32 | operand;
}

#define PARTS4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define PARTS16(x, i) PARTS4(x, i), PARTS4(x, i + 4), PARTS4(x, i + 8), PARTS4(x, i + 12)

// products (+)= 64 rows of A times 128 rows of B over 32 tokens.
__device__ __forceinline__ void multiply(float (&p)[64], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, add, 1, 1;\n}"
        : PARTS16(p, 0), PARTS16(p, 16), PARTS16(p, 32), PARTS16(p, 48)
        : "l"(a), "l"(b), "r"(add));
}

// Nothing that reads or writes the products is moved across this.
__device__ __forceinline__ void pin(float (&products)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(products[i])::"memory");
}

// ------------------------------------------------------------------------------------------------------- result

// Tiles of a cluster's turn: bands of 8 lines, column by column, so that what runs together reads few rows of A and B.
__device__ __forceinline__ void place(int turn, int lines, int pairs, int &line, int &pair) {
    int band = turn / (BAND * pairs), within = turn % (BAND * pairs), height = min(lines - band * BAND, BAND);
    line = band * BAND + within % height;
    pair = within / height;
}

// The column of a lane's products 4 i and 4 i + 2; the next one is that of 4 i + 1 and 4 i + 3.
__device__ __forceinline__ int column(int i, int lane) {
    return i / 2 * 16 + lane % 4 * 4 + i % 2 * 2;
}

__device__ __forceinline__ void put(u32 at, float low, float high, float *) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
}

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ void put(u32 at, float low, float high, bf16 *) {
    asm volatile("{\n.reg .b32 both;\ncvt.rn.bf16x2.f32 both, %1, %2;\nst.shared.b32 [%0], both;\n}" ::"r"(at), "f"(high),
                 "f"(low)
                 : "memory");
}

// A warp's 16 rows, 128 bytes of each at a time, by way of shared memory, so that whole lines are written.
template <typename Out>
__device__ __forceinline__ void store(const float (&sums)[64], u32 buffer, Out *d, int row, int col, int N, int K) {
    constexpr int WIDE = 128 / sizeof(Out);
    const int lane = threadIdx.x % 32, line = lane / 4;
#pragma unroll
    for (int part = 0; part < TILE_K / WIDE; ++part) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < WIDE / 8; ++i) {
            const float *four = sums + 4 * (part * (WIDE / 8) + i);
            const u32 at = buffer + 128 * line + ((u32)sizeof(Out) * column(i, lane) ^ 16 * line);  // across all banks
            put(at, four[0], four[1], d);
            put(at + 8 * 128, four[2], four[3], d);
        }
        __syncwarp();
        const int to = col + part * WIDE + lane % 8 * (WIDE / 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = 4 * i + lane / 8;
            const float4 piece = read_four(buffer + 128 * r + 16 * (lane % 8 ^ r % 8));
            if (row + r < N && to < K) *(float4 *)(d + (u64)(row + r) * K + to) = piece;
        }
    }
}

// ------------------------------------------------------------------------------------------------------- kernel

__device__ __forceinline__ void load_all(const TensorMap &a, const TensorMap &b, const TensorMap &a_scales,
                                         const TensorMap &b_scales, u32 base, int lines, int pairs, int groups) {
    const u32 rank = cluster_rank();
    u32 stage = 0, phase = 0;
    for (int turn = blockIdx.x / 2; turn < lines * pairs; turn += gridDim.x / 2) {
        int line, pair;
        place(turn, lines, pairs, line, pair);
        const int row = line * TILE_N, col = (2 * pair + rank) * TILE_K, half = rank * (TILE_N / 2);
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const u32 full = base + AT_FULL + 8 * stage;
            barrier_wait(base + AT_EMPTY + 8 * stage, phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_for_both(base + AT_A + stage * A_BYTES + half * GROUP, a, group * GROUP, row + half, full);
            load_sixteens(base + AT_B + stage * B_BYTES, b, group * GROUP, col / 16, full);
            load(base + AT_A_SCALES + stage * A_SCALES, a_scales, row, group, full);
            load(base + AT_B_SCALES + stage * B_SCALES, b_scales, col, group, full);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

template <typename Out>
__device__ __forceinline__ void multiply_all(Out *d, u32 base, int warp, int N, int K, int lines, int pairs, int groups) {
    const int lane = threadIdx.x % 32, warpgroup = warp / 4, first = warpgroup * WARPGROUP_N + warp % 4 * 16;
    const u32 all_a = __shfl_sync(~0u, operand(base + AT_A + warpgroup * WARPGROUP_N * GROUP), 0);
    const u32 all_b = __shfl_sync(~0u, operand(base + AT_B), 0);
    const u32 all_rows = base + AT_A_SCALES + 4 * (first + lane / 4), all_columns = base + AT_B_SCALES + 16 * (lane % 4);
    const u32 all_empty = lane < 2 ? barrier_of(base + AT_EMPTY, lane) : 0;
    u32 stage = 0, phase = 0;
    if (warpgroup == 1) give_turn(warpgroup);
    for (int turn = blockIdx.x / 2; turn < lines * pairs; turn += gridDim.x / 2) {
        float sums[HALVES][64] = {}, products[64];
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const u32 a = all_a + stage * (A_BYTES / 16), b = all_b + stage * (B_BYTES / 16);
            const u32 rows = all_rows + stage * A_SCALES, columns = all_columns + stage * B_SCALES;
            float4 right[TILE_K / 16];
            barrier_wait(base + AT_FULL + 8 * stage, phase);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                pin(products);
                await_turn(warpgroup);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    multiply(products, whole(a + half * 64 * GROUP / 16 + 2 * step), whole(b + 2 * step), step);
                    if (step % 2) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                }
                const float upper = read(rows + 256 * half), lower = read(rows + 256 * half + 32);
                if (half == 0)
#pragma unroll
                    for (int i = 0; i < TILE_K / 16; ++i) right[i] = read_four(columns + 64 * i);
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                give_turn(warpgroup);
                pin(products);
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                pin(products);
                if (half == HALVES - 1) {
                    __syncwarp();
                    if (all_empty) barrier_arrive(all_empty + 8 * stage);
                }
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float x = i % 2 ? right[i / 2].z : right[i / 2].x, y = i % 2 ? right[i / 2].w : right[i / 2].y;
                    const float *product = products + 4 * i;
                    float *sum = sums[half] + 4 * i;
                    sum[0] = __fmaf_rn(__fmul_rn(upper, x), product[0], sum[0]);
                    sum[1] = __fmaf_rn(__fmul_rn(upper, y), product[1], sum[1]);
                    sum[2] = __fmaf_rn(__fmul_rn(lower, x), product[2], sum[2]);
                    sum[3] = __fmaf_rn(__fmul_rn(lower, y), product[3], sum[3]);
                }
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        int line, pair;
        place(turn, lines, pairs, line, pair);
        const int row = line * TILE_N + first, col = (2 * pair + cluster_rank()) * TILE_K;
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            store(sums[half], base + AT_D + warp * D_BYTES, d, row + 64 * half, col, N, K);
    }
    if (warpgroup == 0) await_turn(warpgroup);  // the last one given
}

template <typename Out>
__device__ __forceinline__ void wgrad(const TensorMap &a, const TensorMap &b, const TensorMap &a_scales,
                                      const TensorMap &b_scales, Out *d, int N, int K, int groups) {
    extern __shared__ unsigned char memory[];
    const u32 base = __shfl_sync(~0u, ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, 0);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int lines = (N + TILE_N - 1) / TILE_N, pairs = (K + 2 * TILE_K - 1) / (2 * TILE_K);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(base + AT_FULL + 8 * stage, 1);
            barrier_init(base + AT_EMPTY + 8 * stage, 2 * WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 32 * WARPS) load_all(a, b, a_scales, b_scales, base, lines, pairs, groups);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        multiply_all(d, base, warp, N, K, lines, pairs, groups);
    }
    __syncwarp();
    cluster_sync();  // the other block may still arrive at this one's barriers
}

#define WGRAD(name, Out)                                                                                              \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32 * (WARPS + 4), 1)                       \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,                                \
             const __grid_constant__ TensorMap a_scales, const __grid_constant__ TensorMap b_scales, Out *d, int N,   \
             int K, int groups) {                                                                                     \
        wgrad(a, b, a_scales, b_scales, d, N, K, groups);                                                             \
    }

WGRAD(wgrad_bf16, bf16)
WGRAD(wgrad_fp32, float)
