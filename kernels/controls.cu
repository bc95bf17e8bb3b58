// Control kernels: what a session reads to see whether the device itself is as it was for the baseline.
//
// They are no part of what is measured, and stay as they are: a reading of another text of this file is not compared with one of this.

using size = unsigned long long;

constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int VECTORS = 8;

// sums[t] = sum of tile t of a, read `passes` times over; integers wrap around. A tile is what a warp reads at once, 32 x VECTORS vectors
// of 16 bytes; n is a whole number of tiles. The loads bypass L1 (ld.global.cg). With 0 passes nothing is read, and nothing is written.
__global__ void __launch_bounds__(THREADS, 4) control_read(int const* __restrict__ a, int* __restrict__ sums, size n, size passes)
{
    constexpr size TILE = static_cast<size>(WARP) * VECTORS;
    auto const* const vectors = reinterpret_cast<int4 const*>(a);
    size const tiles = n / (TILE * 4);
    size const warps = static_cast<size>(gridDim.x) * blockDim.x / WARP;
    size const first = (static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    unsigned const lane = threadIdx.x % WARP;

    for (size pass = 0; pass < passes; ++pass) {
        for (size tile = first; tile < tiles; tile += warps) {
            int4 value[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                value[v] = __ldcg(vectors + tile * TILE + v * WARP + lane);
            }
            unsigned total = 0;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                total += static_cast<unsigned>(value[v].x) + static_cast<unsigned>(value[v].y) + static_cast<unsigned>(value[v].z) +
                         static_cast<unsigned>(value[v].w);
            }
#pragma unroll
            for (int distance = WARP / 2; distance > 0; distance /= 2) {
                total += __shfl_xor_sync(0xFFFFFFFFu, total, distance);
            }
            if (lane == 0) {
                sums[tile] = static_cast<int>(total);
            }
        }
    }
}
