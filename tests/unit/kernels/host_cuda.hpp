// As much CUDA as the kernels use, on the host: one thread after the other, or, where a kernel exchanges values within a warp, the
// 32 threads of a warp side by side.
#include <barrier>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

inline float __fmul_rn(float x, float y) { return x * y; }  // compiled with -ffp-contract=off
inline double __dmul_rn(double x, double y) { return x * y; }

template <class T>
T __ldcg(T const* address)
{
    return *address;
}

inline std::barrier<> warp_barrier{32};
inline double warp_value[32];

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask)
{
    unsigned const lane = threadIdx.x % 32;
    warp_value[lane] = value;
    warp_barrier.arrive_and_wait();
    T const result = static_cast<T>(warp_value[lane ^ mask]);
    warp_barrier.arrive_and_wait();
    return result;
}

// A pointer that becomes whatever a kernel's parameter asks for.
struct Pointer {
    void* address;
    template <class T>
    operator T*() const
    {
        return static_cast<T*>(address);
    }
};

template <class Body>
void launch(unsigned blocks, unsigned threads, bool shuffles, Body body)
{
    auto const one = [=](unsigned block, unsigned thread) {
        blockDim = {threads}, gridDim = {blocks}, blockIdx = {block}, threadIdx = {thread};
        body();
    };
    for (unsigned block = 0; block < blocks; ++block) {
        for (unsigned first = 0; first < threads; first += 32) {
            std::vector<std::thread> lanes;
            for (unsigned thread = first; thread < first + 32 && thread < threads; ++thread) {
                if (shuffles) {
                    lanes.emplace_back(one, block, thread);
                } else {
                    one(block, thread);
                }
            }
            for (auto& lane : lanes) {
                lane.join();
            }
        }
    }
}
