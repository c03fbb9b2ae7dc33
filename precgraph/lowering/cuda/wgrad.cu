// WGrad on Hopper: D [N, K] = A [N, T] · B [K, T]ᵀ, FP8 E4M3 codes with one fp32 scale per row and 128 tokens of each.
//
// Compiled by NVRTC for sm_90a. 128 products are summed in the tensor core, multiplied by the product of both scales
// and added to an fp32 accumulator, group after group of tokens: the arithmetic of DeepGEMM's 1D1D kernel, whose bits
// these are. What differs is where the time goes: the scales of columns stay in shared memory, so that registers are
// left for three warpgroups whose multiplying and scaling overlap, and D is written once, in its own dtype.
//
// A cluster of two blocks computes two tiles of 192x128 side by side. They share the rows of A, which the first block
// loads into the shared memory of both. In a block one thread loads, and each of three warpgroups multiplies 64 rows.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TILE_N = 192, TILE_K = 128, GROUP = 128, STAGES = 4, WARPS = 12, BAND = 8;
constexpr int AHEAD = 4;  // pairs of column scales that are read while products are summed
constexpr u32 A_BYTES = TILE_N * GROUP, B_BYTES = TILE_K * GROUP;
constexpr u32 A_SCALES = TILE_N * 4, B_SCALES = TILE_K * 4;
constexpr u32 AT_A = 0, AT_B = AT_A + STAGES * A_BYTES, AT_D = AT_B + STAGES * B_BYTES;
constexpr u32 D_BYTES = 16 * 128;  // a warp's 16 rows of 64 bf16
constexpr u32 AT_A_SCALES = AT_D + WARPS * D_BYTES, AT_B_SCALES = AT_A_SCALES + STAGES * A_SCALES;
constexpr u32 AT_FULL = AT_B_SCALES + STAGES * B_SCALES, AT_EMPTY = AT_FULL + 8 * STAGES;

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// ------------------------------------------------------------------------------------------------- instructions

__device__ __forceinline__ u32 lane_id() {
    return threadIdx.x % 32;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap &map, u32 token, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(token), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_tile_of_both(u32 to, const TensorMap &map, u32 token, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
        "%3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(token), "r"(row), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

__device__ __forceinline__ void load_scales(u32 to, const float *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ float read(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}

__device__ __forceinline__ float2 read_pair(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}

// Rows of 128 bytes, their 16-byte pieces exchanged by the row's last three bits, as TMA lays them down.
__device__ __forceinline__ u64 operand(u32 at) {
    return (u64)(at >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

#define PARTS4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define PARTS16(x, i) PARTS4(x, i), PARTS4(x, i + 4), PARTS4(x, i + 8), PARTS4(x, i + 12)

// products (+)= 64 rows of A times 128 rows of B over 32 tokens.
__device__ __forceinline__ void multiply_step(float (&p)[64], u64 a, u64 b, int add) {
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

// Start 64 rows of A times 128 rows of B over a group of tokens.
__device__ __forceinline__ void multiply(float (&products)[64], u32 a, u32 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply_step(products, operand(a + step * 32), operand(b + step * 32), step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for the products; nothing that reads them is moved before this.
__device__ __forceinline__ void multiplied(float (&products)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(products[i])::"memory");
}

// ------------------------------------------------------------------------------------------------------- result

// Tile coordinates of a cluster's turn: bands of 8 tiles of rows, each column by column, so that what runs together
// reads few rows of A and of B.
__device__ __forceinline__ void place(int turn, int tiles_n, int pairs_k, int &n, int &k) {
    int band = turn / (BAND * pairs_k), within = turn % (BAND * pairs_k);
    int height = min(tiles_n - band * BAND, BAND);
    n = band * BAND + within % height;
    k = 2 * (within / height) + cluster_rank();
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// A warp's 16 rows of a tile, rounded to bf16: dealt out anew through shared memory, for writes of 16 bytes a thread.
__device__ __forceinline__ void store(const float (&sum)[64], u32 scratch, unsigned short *out, int row, int col, int N,
                                      int K, u64 stride) {
    u32 lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                u32 r = lane / 4 + 8 * lower, at = scratch + r * 128 + ((i ^ (r % 8)) * 16) + lane % 4 * 4;
                const float *x = sum + (half * 8 + i) * 4 + lower * 2;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack(x[0], x[1])) : "memory");
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 r = i * 4 + lane / 8, piece = lane % 8, at = scratch + r * 128 + ((piece ^ (r % 8)) * 16);
            uint4 x;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                         : "r"(at));
            int to = col + half * 64 + piece * 8;
            if (row + (int)r < N && to < K) *(uint4 *)(out + (row + r) * stride + to) = x;
        }
    }
}

// The same rows in fp32.
__device__ __forceinline__ void store(const float (&sum)[64], u32, float *out, int row, int col, int N, int K,
                                      u64 stride) {
    u32 lane = lane_id();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int r = row + lane / 4 + i % 2 * 8, to = col + i / 2 * 8 + lane % 4 * 2;
        if (r < N && to < K) *(float2 *)(out + r * stride + to) = make_float2(sum[i * 2], sum[i * 2 + 1]);
    }
}

// ------------------------------------------------------------------------------------------------------- kernel

template <typename Out>
__device__ __forceinline__ void wgrad(const TensorMap &map_a, const TensorMap &map_b, const float *a_scales,
                                      const float *b_scales, Out *out, int N, int K, int groups, u64 a_step, u64 b_step,
                                      u64 stride) {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory);
    int tiles_n = (N + TILE_N - 1) / TILE_N, pairs_k = (K + 2 * TILE_K - 1) / (2 * TILE_K);
    u32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(base + AT_FULL + 8 * s, 1);
            barrier_init(base + AT_EMPTY + 8 * s, 2 * WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    u32 stage = 0, phase = 0;
    auto advance = [&] {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    };

    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (warp == WARPS && lane_id() == 0)
            for (int turn = blockIdx.x / 2; turn < tiles_n * pairs_k; turn += gridDim.x / 2) {
                int n, k;
                place(turn, tiles_n, pairs_k, n, k);
                u32 a_bytes = 4 * min(N - n * TILE_N, TILE_N), b_bytes = 4 * max(min(K - k * TILE_K, TILE_K), 0);
#pragma unroll 1
                for (int g = 0; g < groups; ++g, advance()) {
                    u32 full = base + AT_FULL + 8 * stage;
                    barrier_wait(base + AT_EMPTY + 8 * stage, phase ^ 1);
                    barrier_expect(full, A_BYTES + B_BYTES + a_bytes + b_bytes);
                    if (cluster_rank() == 0)
                        load_tile_of_both(base + AT_A + stage * A_BYTES, map_a, g * GROUP, n * TILE_N, full);
                    load_tile(base + AT_B + stage * B_BYTES, map_b, g * GROUP, k * TILE_K, full);
                    load_scales(base + AT_A_SCALES + stage * A_SCALES, a_scales + g * a_step + n * TILE_N, a_bytes, full);
                    if (b_bytes)
                        load_scales(base + AT_B_SCALES + stage * B_SCALES, b_scales + g * b_step + k * TILE_K, b_bytes,
                                    full);
                }
            }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        u32 lane = lane_id();
        for (int turn = blockIdx.x / 2; turn < tiles_n * pairs_k; turn += gridDim.x / 2) {
            int n, k;
            place(turn, tiles_n, pairs_k, n, k);
            float sum[64] = {};
            for (int g = 0; g < groups; ++g, advance()) {
                u32 a = base + AT_A + stage * A_BYTES + warp / 4 * (64 * GROUP), b = base + AT_B + stage * B_BYTES;
                u32 rows = base + AT_A_SCALES + stage * A_SCALES + (warp * 16 + lane / 4) * 4;
                u32 cols = base + AT_B_SCALES + stage * B_SCALES + lane % 4 * 8;
                float products[64];
                barrier_wait(base + AT_FULL + 8 * stage, phase);
                float upper = read(rows), lower = read(rows + 32);
                multiply(products, a, b);
                float2 scales[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) scales[i] = read_pair(cols + i * 32);
                multiplied(products);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    float2 scale = scales[i % AHEAD];
                    if (i + AHEAD < 16) scales[i % AHEAD] = read_pair(cols + (i + AHEAD) * 32);
                    sum[i * 4 + 0] += upper * scale.x * products[i * 4 + 0];
                    sum[i * 4 + 1] += upper * scale.y * products[i * 4 + 1];
                    sum[i * 4 + 2] += lower * scale.x * products[i * 4 + 2];
                    sum[i * 4 + 3] += lower * scale.y * products[i * 4 + 3];
                }
                __syncwarp();  // all lanes have read their scales
                if (lane < 2) barrier_arrive(base + AT_EMPTY + 8 * stage, lane);
            }
            store(sum, base + AT_D + warp * D_BYTES, out, n * TILE_N + warp * 16, k * TILE_K, N, K, stride);
        }
    }
    cluster_sync();  // no block may end while the other still arrives at its barriers
}

#define KERNEL(NAME, OUT)                                                                                              \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1)                                     \
        NAME(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const float *a_scales,  \
             const float *b_scales, OUT *out, int N, int K, int groups, u64 a_step, u64 b_step, u64 stride) {          \
        wgrad(map_a, map_b, a_scales, b_scales, out, N, K, groups, a_step, b_step, stride);                            \
    }

KERNEL(wgrad_bf16, unsigned short)
KERNEL(wgrad_fp32, float)
