"""Comparing two arrays on the device in one pass, without temporaries of their size."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.errors import translated
from pytest_gpumem.devices.protocol import DeviceError, Unsupported
from pytest_gpumem.records.device import DeviceFacts

# |expected| below it counts as it: the protocol's rule.
_LEAST = 1e-30

SOURCE = r"""
typedef unsigned long long u64;

struct half_bits { unsigned short bits; };

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

template <typename T, typename Rule>
__global__ void gpumem_mismatch(const T* actual, const T* expected, long long n, double tolerance, u64* result) {
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

_TYPES = {
    "f2": "half_bits",
    "f4": "float",
    "f8": "double",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned int",
    "u8": "unsigned long long",
}
_THREADS = 256
_BLOCKS_PER_SM = 8
_CHUNK = 1 << 20
_NONE = 2**64 - 1


class Comparing:
    """Compares on one device."""

    def __init__(self, compiler: Compiler, facts: DeviceFacts) -> None:
        self._compiler = compiler
        self._blocks = _BLOCKS_PER_SM * facts.sm_count
        self._functions: dict[str, Any] = {}

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        """None, or how many elements differ and the index of the first, counted along the flattened arrays.
        Raises `DeviceError`: the arrays have different sizes.
        Raises `Unsupported`: elements that are no numbers.
        """
        if actual.size != expected.size:
            raise DeviceError(f"the result has {actual.size} elements, the reference {expected.size}")
        if actual.size == 0:
            return None
        on_host = isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray)
        library: Any = np if on_host else cupy
        with translated("comparing results"):
            if not on_host:
                runtime.deviceSynchronize()  # what wrote the arrays ran on other streams
            # A reference may have computed in a wider type than the kernel stores.
            element = actual.dtype
            first, second = (library.ascontiguousarray(library.asarray(a), dtype=element).reshape(-1) for a in (actual, expected))
            if on_host:
                return mismatch_on_host(first, second, relative_tolerance)
            return self._on_device(first, second, relative_tolerance)

    def _on_device(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        element, parts, rule = rule_of(actual.dtype)
        function = self._functions.get(element + rule)
        if function is None:
            entry = f"gpumem_mismatch<{_TYPES[element]}, {rule}<{_TYPES[element]}>>"
            function = self._functions[element + rule] = self._compiler.private(SOURCE, entry)
        result = cupy.asarray(np.array([0, _NONE], dtype=np.uint64))
        size = actual.size * parts
        function(
            (min(self._blocks, -(-size // _THREADS)),),
            (_THREADS,),
            (np.uint64(actual.data.ptr), np.uint64(expected.data.ptr), np.int64(size), np.float64(tolerance), np.uint64(result.data.ptr)),
        )
        count, first = (int(v) for v in result.get())
        return (count, first // parts) if count else None


def rule_of(dtype: Any) -> tuple[str, int, str]:
    """Type compared, how many of it one element holds, and the rule: floats closely, integers and booleans exactly."""
    element = np.dtype(dtype)
    if element.kind in "iub":
        return f"u{element.itemsize}", 1, "exact"
    if element.kind == "f" and element.str[1:] in _TYPES:
        return element.str[1:], 1, "close"
    if element.kind == "c" and element.itemsize in (8, 16):
        return f"f{element.itemsize // 2}", 2, "close"
    raise Unsupported(f"elements of {element} cannot be compared")


def mismatch_on_host(actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
    """The same rule with NumPy, piece by piece."""
    element, parts, rule = rule_of(actual.dtype)
    actual, expected = actual.view(element), expected.view(element)
    count, first = 0, -1
    for start in range(0, actual.size, _CHUNK):
        a, e = actual[start : start + _CHUNK], expected[start : start + _CHUNK]
        if rule == "exact":
            differs = a != e
        else:
            x, y = a.astype(np.float64), e.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                differs = ~((x == y) | (np.abs(x - y) <= tolerance * np.maximum(np.abs(y), _LEAST)))
        found = int(np.count_nonzero(differs))
        if found and first < 0:
            first = start + int(np.argmax(differs))
        count += found
    return (count, first // parts) if count else None
