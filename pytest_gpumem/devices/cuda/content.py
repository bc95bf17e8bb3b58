"""The content of memory: seeded random values, poison, a random cycle; and copies between any two kinds.

Random values are a hash of the seed and the element's index alone (SplitMix64: Steele, Lea, Flood, OOPSLA 2014), so that the grid, the
kind of memory and the size of the buffer do not change them. NumPy fills what the device cannot see with the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import cupy
import numpy as np
from cupy.cuda import runtime

from pytest_gpumem.devices.checks import nodes_of
from pytest_gpumem.devices.cuda import host, links
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.comparing import Comparing
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.errors import translated
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Content, DeviceError, Stream
from pytest_gpumem.kernels.latency import random_cycle
from pytest_gpumem.records.device import DeviceFacts

SOURCE = r"""
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
template <> __device__ inline boolean value<boolean>(u64 z) { boolean b; b.value = z >> 63; return b; }

template <typename T> __global__ void gpumem_fill_random(T* out, long long n, u64 start) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        out[i] = value<T>(mixed(start + (u64)(i + 1) * 0x9E3779B97F4A7C15ull));
    }
}
"""

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FILLED_AS = {
    "f2": "half_bits",
    "f4": "float",
    "f8": "double",
    "b1": "boolean",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned int",
    "u8": "unsigned long long",
}
_THREADS = 256
_BLOCKS_PER_SM = 32
_CHUNK = 1 << 20  # elements that NumPy hashes at a time: its temporaries stay in the host's cache


class CudaContent:
    """Fills, copies, reads and compares memory of one device."""

    def __init__(self, compiler: Compiler, facts: DeviceFacts, memory: CudaMemory) -> None:
        self._compiler = compiler
        self._memory = memory
        self._comparing = Comparing(compiler, facts)
        self._blocks = _BLOCKS_PER_SM * facts.sm_count
        self._fills: dict[str, Any] = {}

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        """As `Content.fill_random`; booleans are 0 or 1 with equal probability, complex numbers are two floats each."""
        with self._reached(allocation, stream) as here:
            self._fill_random(here, dtype, seed, cast(CudaStream, stream))

    @contextmanager
    def _reached(self, allocation: Allocation, stream: Stream) -> Iterator[Allocation]:
        """Memory to write the new content of an allocation to: its own, or, where a kernel of this GPU may not reach it, memory that is
        copied there afterwards."""
        if not allocation.kind.on_peer:
            yield allocation
            return
        here = self._memory.allocate(allocation.nbytes, MemoryKind.DEVICE)
        try:
            yield here
            copy(allocation, here, allocation.nbytes, stream)
            _wait(stream)
        finally:
            self._memory.free(here)

    def _fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: CudaStream) -> None:
        element, parts = plain_type(dtype)
        size = allocation.nbytes // np.dtype(dtype).itemsize * parts
        if not size:
            return
        if not allocation.address:
            _wait(stream)
            fill_on_host(host.array(allocation, element, size), seed)
            return
        function = self._fills.get(element)
        if function is None:
            function = self._fills[element] = self._compiler.private(SOURCE, f"gpumem_fill_random<{_FILLED_AS[element]}>")
        blocks = min(self._blocks, -(-size // _THREADS))
        with translated("filling memory"):
            function((blocks,), (_THREADS,), (np.uint64(allocation.address), np.int64(size), np.uint64(start_of(seed))), stream=stream.cupy)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream, *, length: int | None = None) -> None:
        nodes = nodes_of(allocation, node_bytes)
        following = random_cycle(nodes, seed, length)
        words, queue = node_bytes // 4, cast(CudaStream, stream).cupy
        with translated("writing a cycle"):
            if not allocation.address:
                runtime.streamSynchronize(stream.handle)
                host.array(allocation, "i4", nodes * words).reshape(nodes, words)[:, 0] = following
                return
            # Straight from cudaMalloc and back: blocks that a pool kept would change where later buffers lie.
            with self._reached(allocation, stream) as here, cupy.cuda.using_allocator(None), queue:
                memory = cupy.cuda.UnownedMemory(here.address, here.nbytes, here, int(queue.device_id))
                slots = cupy.ndarray((nodes, words), dtype=np.int32, memptr=cupy.cuda.MemoryPointer(memory, 0))
                staged = cupy.asarray(following)
                slots[:, 0] = staged
                runtime.streamSynchronize(stream.handle)
                del staged

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        if allocation.kind.on_peer:
            _wait(stream)
            with translated("poisoning the other GPU's memory"):
                links.set_bytes_on_peer(allocation.address, 0xFF, allocation.nbytes, self._memory.peer)
            return
        with translated("poisoning memory"):
            if allocation.address:
                runtime.memsetAsync(allocation.address, 0xFF, allocation.nbytes, stream.handle)
            else:
                runtime.streamSynchronize(stream.handle)
                host.array(allocation, "u1", allocation.nbytes)[:] = 0xFF

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
        copy(destination, source, nbytes, stream)

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        # A copy does not move managed pages as the host's own reads would.
        result = np.empty(size, dtype=dtype)
        if allocation.freed or result.nbytes > allocation.nbytes:
            raise DeviceError(f"cannot read {result.nbytes} bytes from {'freed' if allocation.freed else allocation.nbytes}")
        with translated("reading memory"):
            runtime.deviceSynchronize()
            if allocation.address:
                runtime.memcpy(result.__array_interface__["data"][0], allocation.address, result.nbytes, runtime.memcpyDefault)
            else:
                result[:] = host.array(allocation, dtype, size)
        return result

    def from_host(self, allocation: Allocation, content: Any) -> None:
        source = np.ascontiguousarray(content)
        if allocation.freed or source.nbytes > allocation.nbytes:
            raise DeviceError(f"cannot write {source.nbytes} bytes to {'freed' if allocation.freed else allocation.nbytes}")
        with translated("writing memory"):
            runtime.deviceSynchronize()
            if allocation.address:
                runtime.memcpy(allocation.address, source.__array_interface__["data"][0], source.nbytes, runtime.memcpyDefault)
                # From pageable memory, cudaMemcpy returns once the data is staged (CUDA Runtime API, synchronization behaviour), and our
                # streams do not wait for the default stream.
                runtime.deviceSynchronize()
            else:
                host.array(allocation, "u1", source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        return self._comparing.mismatch(actual, expected, relative_tolerance)


def copy(destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
    """Queue a copy; unified addressing tells the direction (cudaMemcpyDefault). From or to pageable memory it may wait."""
    if nbytes > min(destination.nbytes, source.nbytes):
        raise DeviceError(f"cannot copy {nbytes} bytes from {source.nbytes} to {destination.nbytes}")
    if destination.freed or source.freed:
        raise DeviceError("cannot copy: the memory is freed")
    with translated(f"copying {nbytes} bytes from {source.kind.value} to {destination.kind.value} memory"):
        runtime.memcpyAsync(
            destination.host_address or destination.address,
            source.host_address or source.address,
            nbytes,
            runtime.memcpyDefault,
            stream.handle,
        )


def _wait(stream: Stream) -> None:
    with translated("waiting for the stream"):
        runtime.streamSynchronize(stream.handle)


def plain_type(dtype: str) -> tuple[str, int]:
    """The type that an element is filled as, and how many of them it holds: two floats for a complex number, bytes for what is rare."""
    element = np.dtype(dtype)
    if element.kind in "iu":
        return f"u{element.itemsize}", 1
    if element.kind == "c" and element.itemsize in (8, 16):
        return f"f{element.itemsize // 2}", 2
    if element.str[1:] in _FILLED_AS:
        return element.str[1:], 1
    return "u1", element.itemsize


def start_of(seed: int) -> int:
    """Where a seed's sequence starts: a hash, because neighbouring seeds would give overlapping sequences."""
    return int(_mixed(np.array([seed & (2**64 - 1)], dtype=np.uint64))[0])


def fill_on_host(out: Any, seed: int) -> None:
    """NumPy's way to the same values as the kernel's, bit for bit; `out` is one-dimensional and of a plain type."""
    start = np.uint64(start_of(seed))
    for first in range(0, out.size, _CHUNK):
        piece = out[first : first + _CHUNK]
        index = np.arange(first + 1, first + 1 + piece.size, dtype=np.uint64)
        z = _mixed(start + index * np.uint64(_GOLDEN))
        if piece.dtype.kind == "f":
            bits = {2: 11, 4: 24, 8: 53}[piece.dtype.itemsize]
            piece[:] = (z >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
        elif piece.dtype.kind == "b":
            piece[:] = z >> np.uint64(63)
        else:
            piece[:] = z.astype(piece.dtype)


def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


_: type[Content] = CudaContent
