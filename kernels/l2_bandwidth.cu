// Read bandwidth of L2: a footprint that is read over and over within one launch, by all SMs.

using size = unsigned long long;

constexpr int WARP = 32;
constexpr int THREADS = 256;

// 16-byte loads that a thread has in flight before it uses the first.
constexpr int VECTORS = 8;

// sums[t * repeats + p] = sum of tile t of a, as pass p read it; integers wrap around. A tile is what a warp reads at once, 32 x VECTORS
// vectors of 16 bytes; n is a whole number of tiles. The loads bypass L1 (ld.global.cg). One sum for each tile and pass is the proof that
// every pass read every tile.
//
// Tiles and passes are dealt to the warps in one sequence, so that a footprint smaller than what all warps read at once keeps them all
// busy, and no warp waits between passes. 4 blocks an SM leave the registers to issue all loads before the first addition.
__global__ void __launch_bounds__(THREADS, 4) l2_read(int const* __restrict__ a, int* __restrict__ sums, size n, size repeats)
{
    constexpr size TILE = static_cast<size>(WARP) * VECTORS;
    auto const* const vectors = reinterpret_cast<int4 const*>(a);
    size const tiles = n / (TILE * 4);
    size const warps = static_cast<size>(gridDim.x) * blockDim.x / WARP;
    size const warp = (static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    unsigned const lane = threadIdx.x % WARP;

    // The next tile of this warp is `warps` further in the sequence; found without a division.
    size const tiles_on = warps % tiles, passes_on = warps / tiles;
    size tile = warp % tiles, pass = warp / tiles;
    while (pass < repeats) {
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
            sums[tile * repeats + pass] = static_cast<int>(total);
        }
        tile += tiles_on;
        pass += passes_on;
        if (tile >= tiles) {
            tile -= tiles;
            ++pass;
        }
    }
}
