// As much CUDA as the kernels use, on the host: one thread after the other, or side by side the 32 threads of a warp where a kernel
// exchanges values within it, or all threads of a block where they share memory. Side by side means on one thread of the system, each as
// far as its barriers let it: the first threads run ahead in one block, the last ones in the next, so a missing barrier is met every time.
#include <algorithm>
#include <memory>
#include <ucontext.h>
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
inline Index threadIdx, blockIdx, blockDim, gridDim;

inline float __fmul_rn(float x, float y) { return x * y; }  // compiled with -ffp-contract=off
inline double __dmul_rn(double x, double y) { return x * y; }

template <class T>
T __ldcg(T const* address)
{
    return *address;
}

template <class T>
T __ldca(T const* address)
{
    return *address;
}

// Threads that wait for each other.
struct Barrier {
    unsigned expected, arrived, passed;
    void arrive_and_wait();
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    Index index;
    Barrier const* barrier;
    unsigned round;  // of the barrier, while the thread waits at it
    bool done;
    static std::size_t const stack_bytes = 1 << 16;

    bool ready() const { return !done && (barrier == nullptr || barrier->passed != round); }
};
inline std::vector<Thread> together;
inline Thread* running;
inline ucontext_t scheduler;
inline void (*kernel)(void const*);
inline void const* kernel_arguments;
inline unsigned passed_barriers;
inline bool stuck;

inline void Barrier::arrive_and_wait()
{
    if (++arrived == expected) {
        arrived = 0, ++passed, ++passed_barriers;
        return;
    }
    running->barrier = this, running->round = passed;
    swapcontext(&running->context, &scheduler);
    running->barrier = nullptr;
}

inline void run_kernel()
{
    kernel(kernel_arguments);
    running->done = true;
}

inline void run_together(unsigned first, unsigned count, bool last_first)
{
    while (together.size() < count) {
        together.emplace_back();
    }
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = together[i];
        thread.index = {first + i}, thread.barrier = nullptr, thread.done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = Thread::stack_bytes;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_kernel, 0);
    }
    for (unsigned i = 0; i < count;) {
        Thread& thread = together[last_first ? count - 1 - i : i];
        ++i;
        if (thread.ready()) {
            unsigned const passed = passed_barriers;
            running = &thread, threadIdx = thread.index;
            swapcontext(&scheduler, &thread.context);
            // Whoever has precedence may go on.
            i = passed_barriers == passed ? i : 0;
        }
    }
    stuck |= !std::all_of(together.begin(), together.begin() + count, [](Thread const& thread) { return thread.done; });
}

struct Warp {
    Barrier barrier;
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

inline Barrier block_barrier;

inline void __syncthreads() { block_barrier.arrive_and_wait(); }

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
    shared_overrun = stuck = false;
    kernel = [](void const* arguments) { (*static_cast<Body const*>(arguments))(); };
    kernel_arguments = &body;
    blockDim = {threads}, gridDim = {blocks};
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx = {block};
        block_barrier = {threads, 0, 0};
        for (Warp& warp : warps) {
            warp.barrier = {32, 0, 0};
        }
        dynamic_shared.assign(shared_bytes + shared_guard, 0xA5);  // a block finds in it what it will
        for (unsigned first = 0; first < threads; first += side_by_side) {
            if (side_by_side > 1) {
                run_together(first, std::min(side_by_side, threads - first), block % 2 == 1);
            } else {
                threadIdx = {first};
                body();
            }
        }
        auto const guard = dynamic_shared.begin() + shared_bytes;
        shared_overrun |= !std::all_of(guard, dynamic_shared.end(), [](unsigned char byte) { return byte == 0xA5; });
    }
}
