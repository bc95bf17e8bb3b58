// Copies whose warps touch more, or no more, sectors than they need (CUDA C++ Best Practices Guide 9.2.1).
//
// One thread handles one 4-byte word: the pattern is the experiment, so nothing is vectorised.

using size = unsigned long long;

// Words offset .. n-1: a warp's 128 bytes begin at offset words, so they touch four sectors, or five if offset % 8 != 0 (9.2.1.3).
template <class T>
__global__ void offset_copy(T* odata, T const* idata, size n, size offset)
{
    size const step = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x + offset; i < n; i += step) {
        odata[i] = idata[i];
    }
}

// Words 0, stride, 2 stride, ...: a warp touches min(32, 4 stride) sectors (9.2.1.4).
template <class T>
__global__ void stride_copy(T* odata, T const* idata, size n, size stride)
{
    size const step = static_cast<size>(blockDim.x) * gridDim.x * stride;
    for (size i = (static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x) * stride; i < n; i += step) {
        odata[i] = idata[i];
    }
}

// All words, the lanes of a warp in another order within its aligned 128 bytes: four sectors, as without (9.2.1.1).
template <class T>
__global__ void permuted_copy(T* odata, T const* idata, size n)
{
    // An odd factor modulo 32 is a bijection: every lane gets a word of its own.
    size const lane = (threadIdx.x % 32 * 11 + 7) % 32;
    size const step = static_cast<size>(blockDim.x) * gridDim.x;
    // The loop's bound holds for the warp as a whole, since lanes swap words across the end of the array.
    for (size warp = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x / 32 * 32; warp < n; warp += step) {
        size const i = warp + lane;
        if (i < n) {
            odata[i] = idata[i];
        }
    }
}
