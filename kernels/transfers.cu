// Work for data that is copied in pieces while other pieces are computed, and for data that stays on the host (CUDA C++ Best Practices
// Guide 9.1.2 and 9.1.3).

using size = unsigned long long;

// x = 3.75 x (1 - x), `rounds` times, in place. One thread an element, as in the guide; `rounds` sets the time of the kernel against
// that of the transfer. The logistic map keeps x between 0 and 0.9375 but for rounding and does not settle, so the data stays random
// over any number of launches. No product feeds an addition: nothing can be fused, and the result is NumPy's to the last bit.
template <class T>
__global__ void elementwise(T* x, size n, size rounds)
{
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        T value = x[i];
        for (size round = 0; round < rounds; ++round) {
            value = T(3.75) * value * (T(1) - value);
        }
        x[i] = value;
    }
}

// y = x, read `times` times over, neighbouring threads `stride` elements apart: y[i] = x[(i % (n / stride)) * stride + i / (n / stride)].
// Between two reads of an element lies the whole array. The reads are volatile: each goes to where x lies, as one of a later launch would.
template <class T>
__global__ void reread(T* y, T const volatile* x, size n, size times, size stride)
{
    size const step = static_cast<size>(blockDim.x) * gridDim.x;
    size const rows = n / stride;
    for (size time = 0; time < times; ++time) {
        for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
            y[i] = x[(i % rows) * stride + i / rows];
        }
    }
}
