"""The sources of the device's kernels."""

# %globaltimer counts nanoseconds; __nanosleep keeps the one thread from flooding the host link with
# reads. The SM's cycles and the nanoseconds of the hold give the clock that really ran (nvbench
# does so around each sample).
HOLD_SOURCE = r"""
extern "C" __global__ void gpumem_hold(volatile unsigned int* slot, unsigned long long timeout_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    const long long began = clock64();
    unsigned int outcome = 1;
    while (slot[0] == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > timeout_ns) {
            outcome = 2;
            break;
        }
        __nanosleep(100);
    }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    volatile unsigned long long* took = (volatile unsigned long long*)slot;
    took[1] = clock64() - began;
    took[2] = now - start;
    slot[1] = outcome;
    __threadfence_system();
}
"""
HOLD = "gpumem_hold"

CONTENT_SOURCE = r"""
typedef unsigned long long u64;

__device__ inline u64 mixed(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct half_bits { unsigned short bits; };
struct boolean { unsigned char value; };

template <typename T> __device__ inline T value(u64 z) { return (T)z; }
template <> __device__ inline float value<float>(u64 z) { return (float)(z >> 40) * 0x1p-24f; }
template <> __device__ inline double value<double>(u64 z) { return (double)(z >> 11) * 0x1p-53; }
template <> __device__ inline half_bits value<half_bits>(u64 z) {
    half_bits h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"((float)(z >> 53) * 0x1p-11f));
    return h;
}
template <> __device__ inline boolean value<boolean>(u64 z) {
    boolean b;
    b.value = z >> 63;
    return b;
}

__device__ inline double number(float x) { return x; }
__device__ inline double number(double x) { return x; }
__device__ inline double number(half_bits x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
    return f;
}

template <typename T> struct exact {
    static __device__ bool differs(T a, T e, double) { return a != e; }
};
template <typename T> struct close {
    // NaN fails both comparisons: it equals nothing. Equal infinities pass the first.
    static __device__ bool differs(T a, T e, double tolerance) {
        const double x = number(a), y = number(e);
        return !(x == y || fabs(x - y) <= tolerance * fmax(fabs(y), 1e-30));
    }
};

template <typename T> __global__ void gpumem_fill_random(T* out, long long n, u64 start) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        out[i] = value<T>(mixed(start + (u64)(i + 1) * 0x9E3779B97F4A7C15ull));
    }
}

template <typename T, typename Rule>
__global__ void gpumem_mismatch(
    const T* actual, const T* expected, long long n, double tolerance, u64* result
) {
    u64 count = 0, first = ~0ull;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        if (Rule::differs(actual[i], expected[i], tolerance)) {
            if (count++ == 0) first = i;
        }
    }
    if (count) {
        atomicAdd(&result[0], count);
        atomicMin(&result[1], first);
    }
}
"""

CPP_TYPES = {
    "f2": "half_bits",
    "f4": "float",
    "f8": "double",
    "b1": "boolean",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned int",
    "u8": "unsigned long long",
}


def fill(element: str) -> str:
    """The kernel that fills memory with values of a type of `CPP_TYPES`, in the source
    `CONTENT`."""
    return f"gpumem_fill_random<{CPP_TYPES[element]}>"


def mismatch(element: str, rule: str) -> str:
    """The kernel that compares elements of a type of `CPP_TYPES` by a rule, in the source
    `CONTENT`."""
    return f"gpumem_mismatch<{CPP_TYPES[element]}, {rule}<{CPP_TYPES[element]}>>"
