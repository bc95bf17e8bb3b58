// The two experiments on persisting L2, and the look-up table in shared memory instead.
//
// Their access pattern is the experiment: one 4-byte access an iteration, a 64-bit remainder in the index, plain loads and stores.
// They are not vectorised or unrolled, because the gain by persistence depends on how far a thread waits for its table.

using size = unsigned long long;

// Repeats a look-up table through a stream of data (CUDA L2 Persistent Cache, Lei Mao: data reset). The table is read again and
// again, the stream is written once.
template <class T>
__global__ void reset_data(T* data_streaming, T const* lut_persistent, size data_streaming_size, size lut_persistent_size)
{
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockDim.x) * blockIdx.x + threadIdx.x; i < data_streaming_size; i += stride) {
        data_streaming[i] = lut_persistent[i % lut_persistent_size];
    }
}

// The same with the table in shared memory (CUDA L2 Persistent Cache, Lei Mao: persistent cache or shared memory?). Each block reads the
// whole table once; the index arithmetic of the loop is the same. The launch gives as much dynamic shared memory as the table has.
template <class T>
__global__ void reset_data_shared(T* data_streaming, T const* lut_persistent, size data_streaming_size, size lut_persistent_size)
{
    static_assert(sizeof(T) == sizeof(int), "an element is a word of shared memory");
    extern __shared__ int words[];  // of one type in all instances, as the language demands
    T* const table = reinterpret_cast<T*>(words);
    for (size i = threadIdx.x; i < lut_persistent_size; i += blockDim.x) {
        table[i] = lut_persistent[i];
    }
    __syncthreads();
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockDim.x) * blockIdx.x + threadIdx.x; i < data_streaming_size; i += stride) {
        data_streaming[i] = table[i % lut_persistent_size];
    }
}

// Every thread reads and writes one element of the persistent and one of the streaming data (CUDA C++ Best Practices Guide
// 9.2.2.2). Two departures from the guide's arithmetic keep the result defined and the data alive; the accesses are the same:
//  - the guide doubles the persistent element, which threads that share it race for; x | 1 is the same result however often and
//    in whatever order it is applied;
//  - doubling an int 32 times leaves zero; 3 x is a bijection modulo 2^32, so the data stays random over any number of launches.
__global__ void sliding_window(unsigned* data_persistent, unsigned* data_streaming, size freq_size, size data_size)
{
    size const stride = static_cast<size>(blockDim.x) * gridDim.x;
    for (size i = static_cast<size>(blockDim.x) * blockIdx.x + threadIdx.x; i < data_size; i += stride) {
        data_persistent[i % freq_size] = data_persistent[i % freq_size] | 1u;
        data_streaming[i] = 3u * data_streaming[i];
    }
}
