"""The content of memory: seeded random values, poison, a random cycle; copies between any two kinds; and comparing two arrays in one pass,
without temporaries of their size. What `values` does with NumPy, kernels do here, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import cupy
import numpy as np
from cupy.cuda import runtime

from pytest_gpumem.devices import values
from pytest_gpumem.devices.checks import check_copy, nodes_of
from pytest_gpumem.devices.cuda import host
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.errors import translated
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.cuda.own_kernels import CONTENT_SOURCE, fill, mismatch
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Stream
from pytest_gpumem.kernels.latency import random_cycle
from pytest_gpumem.records.device import DeviceFacts

_THREADS = 256
_FILL_BLOCKS_PER_SM = 32
_MISMATCH_BLOCKS_PER_SM = 8
_NONE = 2**64 - 1
_WORKING_COPIES = 6  # times the bytes of arguments that a reference and a comparison may take


def copy(destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
    """Queue a copy; unified addressing tells the direction (cudaMemcpyDefault). From or to pageable memory it may wait."""
    check_copy(destination, source, nbytes)
    with translated(
        f"copying {nbytes} bytes from {source.kind.value} to {destination.kind.value} memory"
    ):
        runtime.memcpyAsync(
            destination.host_address or destination.address,
            source.host_address or source.address,
            nbytes,
            runtime.memcpyDefault,
            stream.handle,
        )


class CudaContent:
    """Fills, copies, reads and compares memory of one device."""

    def __init__(self, compiler: Compiler, facts: DeviceFacts, memory: CudaMemory) -> None:
        self._compiler = compiler
        self._memory = memory
        self._sm_count = facts.sm_count
        self._functions: dict[str, Any] = {}

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
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

    def _fill_random(
        self, allocation: Allocation, dtype: str, seed: int, stream: CudaStream
    ) -> None:
        element, parts = values.plain_type(dtype)
        size = allocation.nbytes // np.dtype(dtype).itemsize * parts
        if not size:
            return
        if not allocation.address:
            _wait(stream)
            values.fill(host.array(allocation, element, size), seed)
            return
        function = self._function(fill(element))
        arguments = (
            np.uint64(allocation.address),
            np.int64(size),
            np.uint64(values.start_of(seed)),
        )
        with translated("filling memory"):
            function(
                self._blocks(_FILL_BLOCKS_PER_SM, size), (_THREADS,), arguments, stream=stream.cupy
            )

    def _function(self, entry: str) -> Any:
        found = self._functions.get(entry)
        if found is None:
            found = self._functions[entry] = self._compiler.private(CONTENT_SOURCE, entry)
        return found

    def _blocks(self, per_sm: int, size: int) -> tuple[int]:
        return (min(per_sm * self._sm_count, -(-size // _THREADS)),)

    def fill_cycle(
        self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream
    ) -> None:
        nodes = nodes_of(allocation, node_bytes)
        following = random_cycle(nodes, seed)
        words, queue = node_bytes // 4, cast(CudaStream, stream).cupy
        with translated("writing a cycle"):
            if not allocation.address:
                runtime.streamSynchronize(stream.handle)
                host.array(allocation, "i4", nodes * words).reshape(nodes, words)[:, 0] = following
                return
            # Straight from cudaMalloc and back: blocks that a pool kept would change where later buffers lie.
            with self._reached(allocation, stream) as here, cupy.cuda.using_allocator(None), queue:
                memory = cupy.cuda.UnownedMemory(
                    here.address, here.nbytes, here, int(queue.device_id)
                )
                slots = cupy.ndarray(
                    (nodes, words), dtype=np.int32, memptr=cupy.cuda.MemoryPointer(memory, 0)
                )
                staged = cupy.asarray(following)
                slots[:, 0] = staged
                runtime.streamSynchronize(stream.handle)
                del staged

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        if allocation.kind.on_peer:
            _wait(stream)
            # On that GPU: it needs no peer access, as a kernel of this one would.
            with (
                translated("poisoning the other GPU's memory"),
                cupy.cuda.Device(self._memory.peer),
            ):
                runtime.memset(allocation.address, 0xFF, allocation.nbytes)
                runtime.deviceSynchronize()
            return
        with translated("poisoning memory"):
            if allocation.address:
                runtime.memsetAsync(allocation.address, 0xFF, allocation.nbytes, stream.handle)
            else:
                runtime.streamSynchronize(stream.handle)
                host.array(allocation, "u1", allocation.nbytes)[:] = 0xFF

    copy = staticmethod(copy)

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        # A copy does not move managed pages as the host's own reads would.
        result = np.empty(size, dtype=dtype)
        if allocation.freed or result.nbytes > allocation.nbytes:
            raise DeviceError(
                f"cannot read {result.nbytes} bytes from {'freed' if allocation.freed else allocation.nbytes}"
            )
        with translated("reading memory"):
            runtime.deviceSynchronize()
            if allocation.address:
                runtime.memcpy(
                    result.__array_interface__["data"][0],
                    allocation.address,
                    result.nbytes,
                    runtime.memcpyDefault,
                )
            else:
                result[:] = host.array(allocation, dtype, size)
        return result

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        needed = sum(size * np.dtype(dtype).itemsize for _, dtype, size in wanted)
        with translated("copying to compare"):
            if _WORKING_COPIES * needed > runtime.memGetInfo()[0]:
                return [self.to_host(*one) for one in wanted]
            runtime.deviceSynchronize()
            made = []
            for allocation, dtype, size in wanted:
                made.append(cupy.empty(size, dtype=dtype))
                runtime.memcpy(
                    made[-1].data.ptr,
                    allocation.address or allocation.host_address,
                    made[-1].nbytes,
                    runtime.memcpyDefault,
                )
            runtime.deviceSynchronize()
            return made

    def from_host(self, allocation: Allocation, content: Any) -> None:
        source = np.ascontiguousarray(content)
        if allocation.freed or source.nbytes > allocation.nbytes:
            raise DeviceError(
                f"cannot write {source.nbytes} bytes to {'freed' if allocation.freed else allocation.nbytes}"
            )
        with translated("writing memory"):
            runtime.deviceSynchronize()
            if allocation.address:
                runtime.memcpy(
                    allocation.address,
                    source.__array_interface__["data"][0],
                    source.nbytes,
                    runtime.memcpyDefault,
                )
                # From pageable memory, cudaMemcpy returns once the data is staged (CUDA Runtime API, synchronization behaviour), and our
                # streams do not wait for the default stream.
                runtime.deviceSynchronize()
            else:
                host.array(allocation, "u1", source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def mismatch(
        self, actual: Any, expected: Any, relative_tolerance: float
    ) -> tuple[int, int] | None:
        if actual.size != expected.size:
            raise DeviceError(
                f"the result has {actual.size} elements, the reference {expected.size}"
            )
        if actual.size == 0:
            return None
        on_host = isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray)
        library: Any = np if on_host else cupy
        with translated("comparing results"):
            if not on_host:
                runtime.deviceSynchronize()  # what wrote the arrays ran on other streams
            # A reference may have computed in a wider type than the kernel stores.
            first, second = (
                library.ascontiguousarray(library.asarray(a), dtype=actual.dtype).reshape(-1)
                for a in (actual, expected)
            )
            return (values.mismatch if on_host else self._mismatch)(
                first, second, relative_tolerance
            )

    def _mismatch(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        element, parts, rule = values.rule_of(actual.dtype)
        function = self._function(mismatch(element, rule))
        result = cupy.asarray(np.array([0, _NONE], dtype=np.uint64))
        size = actual.size * parts
        addresses = [np.uint64(array.data.ptr) for array in (actual, expected, result)]
        arguments = (*addresses[:2], np.int64(size), np.float64(tolerance), addresses[2])
        function(self._blocks(_MISMATCH_BLOCKS_PER_SM, size), (_THREADS,), arguments)
        count, first = (int(v) for v in result.get())
        return (count, first // parts) if count else None


def _wait(stream: Stream) -> None:
    with translated("waiting for the stream"):
        runtime.streamSynchronize(stream.handle)
