"""Kernels through NVRTC, and the sources of those that are not in the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as D

from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.protocol import DeviceError, Stream
from pytest_gpumem.kernels.kernel import COMPILE_OPTIONS, Kernel, LaunchShape, read_source

OPTIONS = (*COMPILE_OPTIONS, "-ftz=true")
"""As CuPy compiles: denormal numbers are flushed to zero."""
_NEEDS = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
_DEFAULT_SHARED_BYTES = 48 * 1024
"""Above it, a kernel must opt in (CUDA Programming Guide, compute capabilities)."""


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    """The architecture of a GPU: a virtual one, which the driver translates, if NVRTC is older."""
    wanted = 10 * capability[0] + capability[1]
    known = [int(number) for number in _value(nvrtc.nvrtcGetSupportedArchs())]
    if wanted in known:
        return f"sm_{wanted}"
    older = [architecture for architecture in known if architecture < wanted]
    if not older:
        raise DeviceError(
            f"the installed NVRTC compiles for compute capability {min(known) / 10:.1f} and newer, "
            f"this GPU has {wanted / 10:.1f}: "
            "pip install -e '.[cuda12]' in the clone, in place of the newer CUDA"
        )
    return f"compute_{max(older)}"


def first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower():
            return line
    return lines[0] if lines else "the compiler gave no message"


def _loaded() -> Any:
    """Import NVRTC, which few processes need."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as missing:
        reason = str(missing).partition("\n")[0]
        raise DeviceError(f"NVRTC cannot be loaded ({reason}): {_NEEDS}") from None
    return nvrtc


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    # Never a bytes object: NVRTC writes into it, and Python shares those of length 1.
    content = bytearray(_value(getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    _value(getattr(nvrtc, f"nvrtcGet{what}")(program, content))
    return bytes(content)


def _value(result: Any) -> Any:
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f"NVRTC: {status.name}")
    return values[0] if values else None


class KernelCall:
    """A kernel with all that a launch needs besides its stream. `arguments`: NumPy scalars of the
    kernel's types; `doing`: for the text of an error."""

    def __init__(
        self, function: Any, shape: LaunchShape, arguments: Sequence[Any], doing: str
    ) -> None:
        values = np.zeros((len(arguments), 2), dtype=np.uint64)  # 16 bytes hold any of them
        for value, argument in zip(values, arguments, strict=True):
            content = np.frombuffer(argument.tobytes(), dtype=np.uint8)
            value.view(np.uint8)[: argument.nbytes] = content
        # The driver reads each argument through a pointer, and is done with both before a call
        # returns.
        pointers = (values.ctypes.data + 16 * np.arange(len(arguments))).astype(np.uint64)
        self._kept = (values, pointers)
        self._address = int(pointers.ctypes.data)
        self._function, self._shape, self._doing = function, shape, doing
        self._launch = function, shape.blocks, 1, 1, shape.threads, 1, 1, shape.shared_bytes

    def queue(self, stream: Stream) -> None:
        result = D.cuLaunchKernel(*self._launch, stream.handle, self._address, 0)
        check(result, self._doing)

    def queue_with(self, stream: Stream, attribute: Any) -> None:
        config = D.CUlaunchConfig()
        config.gridDimX, config.blockDimX = self._shape.blocks, self._shape.threads
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._shape.shared_bytes
        config.hStream = D.CUstream(stream.handle)
        config.attrs = [attribute]
        config.numAttrs = 1
        result = D.cuLaunchKernelEx(config, self._function, self._address, 0)
        check(result, f"{self._doing} with a window")


class Compiler:
    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._functions: dict[tuple[str, str], Any] = {}  # by source and entry
        self._largest_shared: dict[tuple[str, str], int] = {}

    def function(self, kernel: Kernel, dtype: str, shape: LaunchShape) -> Any:
        """The kernel for an element type, with the shape's dynamic shared memory. Raises
        `DeviceError` with the compiler's first error line."""
        assert kernel.source is not None, "a copy has nothing to compile"
        key = kernel.source, kernel.expression(dtype, shape)
        if key not in self._functions:
            self._functions[key] = self._load(read_source(kernel.source), *key)
        function, nbytes = self._functions[key], shape.shared_bytes
        if nbytes > max(_DEFAULT_SHARED_BYTES, self._largest_shared.get(key, 0)):
            attribute = D.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = D.cuFuncSetAttribute(function, attribute, nbytes)
            check(result, f"asking for {nbytes} bytes of shared memory")
            self._largest_shared[key] = nbytes
        return function

    def private(self, source: str, entry: str) -> Any:
        key = "gpumem.cu", entry
        if key not in self._functions:
            self._functions[key] = self._load(source, *key)
        return self._functions[key]

    def _load(self, source: str, name: str, entry: str) -> Any:
        """Compile a kernel by its C++ name expression; `name` is the source's in errors."""
        nvrtc = _loaded()
        architecture = _architecture(nvrtc, self._capability)
        program = _value(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
        try:
            _value(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
            options = [f"--gpu-architecture={architecture}".encode()]
            options += [option.encode() for option in OPTIONS]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            if int(status) != 0:
                log = _bytes(nvrtc, program, "ProgramLog").decode(errors="replace").rstrip("\0")
                reason = first_error(log) if log.strip() else status.name
                raise DeviceError(f"{entry} does not compile for {architecture}: {reason}")
            code = _bytes(nvrtc, program, "PTX" if architecture.startswith("compute_") else "CUBIN")
            symbol = _value(nvrtc.nvrtcGetLoweredName(program, entry.encode()))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        # The module lives as long as the context: no function outlives it.
        module = check(D.cuModuleLoadData(code), f"loading {entry}")
        return check(D.cuModuleGetFunction(module, symbol), f"loading {entry}")


# `slot`: u32 released, u32 outcome (1: released, 2: expired), u64 cycles, u64 nanoseconds.
# __nanosleep spares the host link. Cycles over nanoseconds are the clock that really ran.
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
"""By the types as which `values` fills and compares elements."""


def fill(element: str) -> str:
    return f"gpumem_fill_random<{CPP_TYPES[element]}>"


def mismatch(element: str) -> str:
    rule = "close" if element[0] == "f" else "exact"
    return f"gpumem_mismatch<{CPP_TYPES[element]}, {rule}<{CPP_TYPES[element]}>>"
