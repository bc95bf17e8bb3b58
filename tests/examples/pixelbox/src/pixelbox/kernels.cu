// One channel of an image: its pixels begin at `first` and lie `step` floats apart.
extern "C" __global__ void channel(float* out, const float* image, long long first, long long step, long long pixels) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < pixels) {
        out[i] = image[first + i * step];
    }
}
