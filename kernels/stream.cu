// STREAM (McCalpin, with BabelStream's names): copy, mul, add, triad, dot, and the one-way read and write.
//
// Memory decides their time, so they are written to keep it busy: accesses of 16 bytes, consecutive threads at consecutive
// addresses, and as many bytes in flight as the memory's latency asks for: by many threads with one load of each source where a
// kernel also writes, by eight loads of a thread where it only reads. By default a block handles one tile and ends; any grid gives
// the same result. Buffers are aligned to 256 bytes.

using size = unsigned long long;

// 16 bytes of elements: one load or store instruction.
template <class T>
struct alignas(16) Vector {
    static constexpr int WIDTH = 16 / sizeof(T);
    T element[WIDTH];
};

// One rounding an operation, as NumPy does it: __fmul_rn is never fused into a multiply-add, so results agree to the last bit.
// Integers wrap around.
__device__ inline float product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double product(double x, double y) { return __dmul_rn(x, y); }
__device__ inline int product(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) * static_cast<unsigned>(y)); }
__device__ inline float sum(float x, float y) { return x + y; }
__device__ inline double sum(double x, double y) { return x + y; }
__device__ inline int sum(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) + static_cast<unsigned>(y)); }

template <class T>
__device__ Vector<T> vector(T const* array, size index)
{
    return reinterpret_cast<Vector<T> const*>(array)[index];
}

template <class T, class Operation, class... Vectors>
__device__ Vector<T> by_element(Operation operation, Vectors const&... vectors)
{
    Vector<T> result;
#pragma unroll
    for (int e = 0; e < Vector<T>::WIDTH; ++e) {
        result.element[e] = operation(vectors.element[e]...);
    }
    return result;
}

// The sum over a warp, in every lane.
template <class T>
__device__ T over_warp(T total)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        total = sum(total, __shfl_xor_sync(0xFFFFFFFFu, total, distance));
    }
    return total;
}

// destination[i] = operation(sources[i]...) for all i < n. A tile is VECTORS x blockDim.x vectors.
template <class T, int VECTORS, class Operation, class... Sources>
__device__ void map(T* destination, size n, Operation operation, Sources const*... sources)
{
    auto* const out = reinterpret_cast<Vector<T>*>(destination);
    size const vectors = n / Vector<T>::WIDTH;
    size const tile = static_cast<size>(blockDim.x) * VECTORS;

    for (size first = blockIdx.x * tile; first < vectors; first += gridDim.x * tile) {
        size const mine = first + threadIdx.x;
        if (first + tile <= vectors) {
            // All loads are issued before the first store, which could alias them as far as the compiler knows.
            Vector<T> result[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                result[v] = by_element<T>(operation, vector(sources, mine + v * blockDim.x)...);
            }
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                out[mine + v * blockDim.x] = result[v];
            }
        } else {
            for (size v = mine; v < vectors; v += blockDim.x) {
                out[v] = by_element<T>(operation, vector(sources, v)...);
            }
        }
    }

    // Fewer elements than one vector are left.
    size const rest = vectors * Vector<T>::WIDTH + static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (rest < n) {
        destination[rest] = operation(sources[rest]...);
    }
}

// sums[t] = sum over tile t of operation(sources[i]...). A block of THREADS threads adds up one tile of THREADS x VECTORS vectors of
// each source, in a fixed order: the result depends on the data alone, not on the grid. n is a whole number of tiles.
//
// Each sum is a write between the reads, so a tile is a whole block's and not a warp's. On an H200 tiles of 8 to 256 KiB are as fast
// within 1 %.
template <class T, int THREADS, int VECTORS, class Operation, class... Sources>
__device__ void reduce(T* sums, size n, Operation operation, Sources const*... sources)
{
    constexpr int WARP = 32;
    constexpr size TILE = static_cast<size>(THREADS) * VECTORS;
    __shared__ T of_warp[THREADS / WARP];
    size const tiles = n / (TILE * Vector<T>::WIDTH);

    for (size t = blockIdx.x; t < tiles; t += gridDim.x) {
        Vector<T> value[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            value[v] = by_element<T>(operation, vector(sources, t * TILE + v * THREADS + threadIdx.x)...);
        }
        T total = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int e = 0; e < Vector<T>::WIDTH; ++e) {
                total = sum(total, value[v].element[e]);
            }
        }
        total = over_warp(total);
        if (threadIdx.x % WARP == 0) {
            of_warp[threadIdx.x / WARP] = total;
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            total = over_warp(threadIdx.x < THREADS / WARP ? of_warp[threadIdx.x] : T(0));
            if (threadIdx.x == 0) {
                sums[t] = total;
            }
        }
        __syncthreads();  // before the next tile's sums take the place of these
    }
}

// c = a
template <class T, int VECTORS>
__global__ void copy(T* __restrict__ c, T const* __restrict__ a, size n)
{
    map<T, VECTORS>(c, n, [](T x) { return x; }, a);
}

// b = s c
template <class T, int VECTORS>
__global__ void mul(T* __restrict__ b, T const* __restrict__ c, T s, size n)
{
    map<T, VECTORS>(b, n, [s](T x) { return product(s, x); }, c);
}

// c = a + b
template <class T, int VECTORS>
__global__ void stream_add(T* __restrict__ c, T const* __restrict__ a, T const* __restrict__ b, size n)
{
    map<T, VECTORS>(c, n, [](T x, T y) { return sum(x, y); }, a, b);
}

// a = b + s c
template <class T, int VECTORS>
__global__ void triad(T* __restrict__ a, T const* __restrict__ b, T const* __restrict__ c, T s, size n)
{
    map<T, VECTORS>(a, n, [s](T x, T y) { return sum(x, product(s, y)); }, b, c);
}

// a = value
template <class T, int VECTORS>
__global__ void write(T* __restrict__ a, T value, size n)
{
    map<T, VECTORS>(a, n, [value]() { return value; });
}

// sums[t] = sum of tile t of a: what keeps the loads from being removed.
template <class T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS) read(T const* __restrict__ a, T* __restrict__ sums, size n)
{
    reduce<T, THREADS, VECTORS>(sums, n, [](T x) { return x; }, a);
}

// sums[t] = a . b over tile t
template <class T, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS) dot(T const* __restrict__ a, T const* __restrict__ b, T* __restrict__ sums, size n)
{
    reduce<T, THREADS, VECTORS>(sums, n, [](T x, T y) { return product(x, y); }, a, b);
}
