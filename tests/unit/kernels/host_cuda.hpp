// As much CUDA as the kernels use, on the host: one thread after the other, or side by side the 32 threads of a warp where a kernel
// exchanges values within it, or all threads of a block where they share memory.
#include <algorithm>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static  // of one block: blocks run one after the other

// Dynamic shared memory of the block that runs, and guard bytes behind it. `extern __shared__` becomes a pointer to it.
unsigned const shared_guard = 256;
inline std::vector<unsigned char> dynamic_shared;
inline bool shared_overrun = false;

struct int4 {
    int x, y, z, w;
};
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

struct Warp {
    std::barrier<> barrier{32};
    double value[32];  // holds every 32-bit integer exactly, too
};
inline Warp warps[32];

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask)
{
    Warp& warp = warps[threadIdx.x / 32];
    unsigned const lane = threadIdx.x % 32;
    warp.value[lane] = value;
    warp.barrier.arrive_and_wait();
    T const result = static_cast<T>(warp.value[lane ^ mask]);
    warp.barrier.arrive_and_wait();
    return result;
}

inline std::unique_ptr<std::barrier<>> block_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }

// A pointer that becomes whatever a kernel's parameter asks for.
struct Pointer {
    void* address;
    template <class T>
    operator T*() const
    {
        return static_cast<T*>(address);
    }
};

// Threads that run side by side: 1, 32, or all of a block.
template <class Body>
void launch(unsigned blocks, unsigned threads, unsigned shared_bytes, unsigned side_by_side, Body body)
{
    shared_overrun = false;
    auto const one = [=](unsigned block, unsigned thread) {
        blockDim = {threads}, gridDim = {blocks}, blockIdx = {block}, threadIdx = {thread};
        body();
    };
    for (unsigned block = 0; block < blocks; ++block) {
        block_barrier = std::make_unique<std::barrier<>>(threads);
        dynamic_shared.assign(shared_bytes + shared_guard, 0xA5);  // a block finds in it what it will
        for (unsigned first = 0; first < threads; first += side_by_side) {
            std::vector<std::thread> together;
            for (unsigned thread = first; thread < first + side_by_side && thread < threads; ++thread) {
                if (side_by_side > 1) {
                    together.emplace_back(one, block, thread);
                } else {
                    one(block, thread);
                }
            }
            for (auto& thread : together) {
                thread.join();
            }
        }
        auto const guard = dynamic_shared.begin() + shared_bytes;
        shared_overrun |= !std::all_of(guard, dynamic_shared.end(), [](unsigned char byte) { return byte == 0xA5; });
    }
}
