// Work for data that is copied in pieces while other pieces are computed (CUDA C++ Best Practices Guide 9.1.2).

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
