// Managed memory: a vector addition that faults its pages in, and two ways of touching them on the GPU first.
//
// Who touches which page when is the experiment, so the loops are the plain grid-stride loops of the text, not vectorised.

using size = unsigned long long;

// y = x + y (Unified memory, 2.7.1)
template <class T>
__global__ void add(T const* x, T* y, size n)
{
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        y[i] = x[i] + y[i];
    }
}

// x = value: the grid touches many pages at once, and warps of several blocks fault on the same page (Unified memory, 2.7.2).
template <class T>
__global__ void init(T* x, T value, size n)
{
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        x[i] = value;
    }
}

// x = value, one warp to each page of `elements`: no two warps fault on the same page (Unified memory, 2.7.2, warp per page).
//
// The text's page is a constant of 64 KiB; here it is an argument, so that other sizes can be tried.
template <class T>
__global__ void init_warp_per_page(T* x, T value, size elements, size n)
{
    constexpr size WARP = 32;
    size const pages = (n + elements - 1) / elements;
    size const warps = static_cast<size>(gridDim.x) * blockDim.x / WARP;
    size const lane = threadIdx.x % WARP;

    for (size page = (static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; page < pages; page += warps) {
#pragma unroll 16
        for (size repeat = 0; repeat < elements / WARP; ++repeat) {
            size const i = page * elements + repeat * WARP + lane;
            if (i < n) {
                x[i] = value;
            }
        }
    }
}
