"""The content of memory, and where managed pages lie. What `values` does with NumPy, kernels do
here, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import runtime as R

from pytest_gpumem.devices import values
from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import CONTENT_SOURCE, Compiler, KernelCall, fill, mismatch
from pytest_gpumem.devices.cuda.context import LEGACY_DEFAULT, Context, CudaStream, check
from pytest_gpumem.devices.cuda.places import on_gpu
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Advice,
    Allocation,
    DeviceError,
    Stream,
    Unsupported,
    check_copy,
)
from pytest_gpumem.kernels.kernel import LaunchShape
from pytest_gpumem.kernels.latency import NODE_BYTES, random_cycle
from pytest_gpumem.records.device import DeviceFacts

_THREADS = 256
_FILL_BLOCKS_PER_SM = 32
_MISMATCH_BLOCKS_PER_SM = 8
_NONE = 2**64 - 1
_WORKING_COPIES = 6  # times the bytes of arguments that a reference and a comparison may take
_TOO_OLD = (
    "cudaErrorNotSupported",
    "cudaErrorCallRequiresNewerDriver",
    "cudaErrorInsufficientDriver",
)
"""Errors of a driver without a call."""
_ANY = R.cudaMemcpyKind.cudaMemcpyDefault  # unified addressing tells the direction


def copy(destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
    """Queue a copy. From or to pageable memory it may wait."""
    check_copy(destination, source, nbytes)
    to = destination.host_address or destination.address
    begin = source.host_address or source.address
    doing = f"copying {nbytes} bytes from {source.kind.value} to {destination.kind.value} memory"
    check(R.cudaMemcpyAsync(to, begin, nbytes, _ANY, stream.handle), doing)


class CudaContent:
    """Memory without `address`, which no kernel reaches, is pageable or not mapped: the host
    writes it."""

    def __init__(
        self, index: int, compiler: Compiler, facts: DeviceFacts, memory: CudaMemory
    ) -> None:
        self._index, self._facts = index, facts
        self._compiler = compiler
        self._memory = memory

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        element, parts = values.plain_type(dtype)
        size = allocation.nbytes // np.dtype(dtype).itemsize * parts
        if not size:
            return
        if allocation.kind.on_peer:  # which a kernel of this GPU may not reach
            content = np.empty(size, element)
            values.fill(content, seed)
            self.from_host(allocation, content)
        elif not allocation.address:
            _wait(stream)
            values.fill(places.array(allocation, element, size), seed)
        else:
            address, start = np.uint64(allocation.address), np.uint64(values.start_of(seed))
            arguments = (address, np.int64(size), start)
            self._queue(fill(element), _FILL_BLOCKS_PER_SM, size, arguments, stream)

    def _queue(
        self, entry: str, per_sm: int, size: int, arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        function = self._compiler.private(CONTENT_SOURCE, entry)
        shape = LaunchShape(min(per_sm * self._facts.sm_count, -(-size // _THREADS)), _THREADS)
        KernelCall(function, shape, arguments, f"launching {entry}").queue(stream)

    def fill_cycle(self, allocation: Allocation, stream: Stream) -> None:
        nodes, words = allocation.nbytes // NODE_BYTES, NODE_BYTES // 4
        following = np.ascontiguousarray(random_cycle(nodes), dtype=np.int32)
        if not allocation.address:
            _wait(stream)
            places.array(allocation, "i4", nodes * words).reshape(nodes, words)[:, 0] = following
            return
        # One word of each node: rows of 4 bytes, as far apart as the nodes.
        address, source = allocation.address, following.ctypes.data
        result = R.cudaMemcpy2DAsync(address, NODE_BYTES, source, 4, 4, nodes, _ANY, stream.handle)
        check(result, "writing a cycle")
        _wait(stream)

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        address, nbytes, doing = allocation.address, allocation.nbytes, "poisoning memory"
        if allocation.kind.on_peer:
            _wait(stream)
            # On that GPU: it needs no peer access, as a kernel of this one would.
            with on_gpu(self._memory.peer):
                check(R.cudaMemset(address, 0xFF, nbytes), doing)
                check(R.cudaDeviceSynchronize(), doing)
        elif address:
            check(R.cudaMemsetAsync(address, 0xFF, nbytes, stream.handle), doing)
        else:
            _wait(stream)
            places.array(allocation, "u1", nbytes)[:] = 0xFF

    copy = staticmethod(copy)

    @property
    def on_host(self) -> bool:
        return Context.destroyed

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        # A copy does not move managed pages as the host's reads would.
        result, doing = np.empty(size, dtype=dtype), "reading memory"
        check_copy(allocation, allocation, result.nbytes)
        check(R.cudaDeviceSynchronize(), doing)
        if allocation.address:
            to = result.ctypes.data
            check(R.cudaMemcpy(to, allocation.address, result.nbytes, _ANY), doing)
        else:
            result[:] = places.array(allocation, dtype, size)
        return result

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        doing = "copying to compare"
        needed = sum(size * np.dtype(dtype).itemsize for _, dtype, size in wanted)
        free, _total = check(R.cudaMemGetInfo(), doing)
        if self.on_host or _WORKING_COPIES * needed > free:
            return [self.to_host(*array) for array in wanted]
        import cupy  # the reference computes with arrays of the library

        check(R.cudaDeviceSynchronize(), doing)
        made = []
        for allocation, dtype, size in wanted:
            array = cupy.empty(size, dtype=dtype)
            begin = allocation.address or allocation.host_address
            check(R.cudaMemcpy(array.data.ptr, begin, array.nbytes, _ANY), doing)
            made.append(array)
        check(R.cudaDeviceSynchronize(), doing)
        return made

    def from_host(self, allocation: Allocation, content: Any) -> None:
        source, doing = np.ascontiguousarray(content), "writing memory"
        check_copy(allocation, allocation, source.nbytes)
        check(R.cudaDeviceSynchronize(), doing)
        if allocation.address:
            begin = source.ctypes.data
            check(R.cudaMemcpy(allocation.address, begin, source.nbytes, _ANY), doing)
            # cudaMemcpy returns once pageable memory is staged (CUDA Runtime API, synchronization
            # behaviour), and our streams do not wait for the default stream.
            check(R.cudaDeviceSynchronize(), doing)
        else:
            places.array(allocation, "u1", source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        nbytes = allocation.nbytes
        result = places.prefetch(allocation.address, nbytes, self._index, to_host, stream.handle)
        check(result, f"prefetching {nbytes} bytes to the {'host' if to_host else 'device'}")

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        where = places.location(self._index, to_host)  # which the driver ignores for ReadMostly
        nbytes, number = allocation.nbytes, places.advice_number(advice, on=on)
        result = R.cudaMemAdvise(allocation.address, nbytes, number, where)
        check(result, f"{number.name} on {nbytes} bytes")

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        call = getattr(R, "cudaMemDiscardBatchAsync", None)
        if call is None:
            raise Unsupported("discarding needs CUDA 13: cuda-bindings is older")
        result = call([allocation.address], [allocation.nbytes], 1, 0, stream.handle)
        if result[0].name in _TOO_OLD:
            R.cudaGetLastError()
            raise Unsupported(f"the driver has no cudaMemDiscardBatchAsync: {result[0].name}")
        check(result, f"discarding {allocation.nbytes} bytes")

    def mismatch(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        if actual.size != expected.size:
            raise DeviceError(
                f"the result has {actual.size} elements, the reference {expected.size}"
            )
        if actual.size == 0:
            return None
        dtype = actual.dtype
        if isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray):
            actual, expected = _flat(np, actual, dtype), _flat(np, expected, dtype)
            return values.mismatch(actual, expected, tolerance)
        import cupy

        # what wrote the arrays ran on other streams
        check(R.cudaDeviceSynchronize(), "comparing results")
        actual, expected = _flat(cupy, actual, dtype), _flat(cupy, expected, dtype)
        element, parts = values.compared_type(actual.dtype)
        size = actual.size * parts
        result = self._memory.allocate(16, MemoryKind.DEVICE)  # a count, and the first place
        try:
            self.from_host(result, np.array([0, _NONE], dtype=np.uint64))
            arguments = (
                np.uint64(actual.data.ptr),
                np.uint64(expected.data.ptr),
                np.int64(size),
                np.float64(tolerance),
                np.uint64(result.address),
            )
            entry, stream = mismatch(element), CudaStream(LEGACY_DEFAULT)
            self._queue(entry, _MISMATCH_BLOCKS_PER_SM, size, arguments, stream)
            count, first = (int(number) for number in self.to_host(result, "u8", 2))
        finally:
            self._memory.free(result)
        return (count, first // parts) if count else None


def _flat(library: Any, array: Any, dtype: Any) -> Any:
    # A reference may have computed in a wider type than the kernel stores.
    return library.ascontiguousarray(library.asarray(array), dtype=dtype).reshape(-1)


def _wait(stream: Stream) -> None:
    check(R.cudaStreamSynchronize(stream.handle), "waiting for the stream")
