"""The content of memory, and the device's fills, copies, reads and comparisons, with their times.

The first bytes of an allocation are real: its `backing` is a NumPy array of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.devices import values
from pytest_gpumem.devices.checks import check_copy, nodes_of
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch, Stream, Unsupported
from pytest_gpumem.devices.simulated.engine import COMPUTE, WorkItem
from pytest_gpumem.devices.simulated.streams import LAUNCH, Facet, QueueStep, own_stream
from pytest_gpumem.kernels.kernel import Access, Role
from pytest_gpumem.kernels.latency import random_cycle
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.what_ran import StepKind
from pytest_gpumem.units import KiB

BACKED_BYTES = 256 * KiB  # the largest allocation that is real as a whole
PREFIX_BYTES = 64 * KiB
"""What is real of a larger one: a tile of the kernel `read`. Every launch computes its result, so more takes more of the host's time."""


def backing(nbytes: int, over: NDArray[Any] | None = None) -> NDArray[np.uint8]:
    """The bytes behind an allocation of `nbytes`: new ones, or those of a user's array."""
    real = nbytes if nbytes <= BACKED_BYTES else min(nbytes, PREFIX_BYTES)
    return (
        np.zeros(real, dtype=np.uint8) if over is None else over.reshape(-1).view(np.uint8)[:real]
    )


def backed(allocation: Allocation) -> NDArray[np.uint8]:
    """The bytes behind an allocation of this device. Raises `DeviceError`: it is freed."""
    if allocation.freed:
        raise DeviceError("the memory was freed")
    memory: NDArray[np.uint8] = allocation.backing
    return memory


def prefix(allocation: Allocation, dtype: str, size: int) -> NDArray[Any]:
    """A writable array over the first `size` elements, or over those that are backed."""
    memory, itemsize = backed(allocation), np.dtype(dtype).itemsize
    return memory[: min(size, len(memory) // itemsize) * itemsize].view(dtype)


def memory_name(allocation: Allocation) -> str:
    """The kind of an allocation, one of `uses.MEMORY_KINDS`."""
    return "pinned" if allocation.kind.locked else allocation.kind.value


def computation(launch: Launch) -> Callable[[], None]:
    """What runs a kernel's reference on prefixes that belong together, and writes its results. Raises `Unsupported` without a reference.

    If one array of a call is backed in part, every array is cut to as many elements as the shortest of those has: a table that is smaller
    stays whole, a stream becomes its first elements.
    """
    kernel, call = launch.kernel, launch.call
    reference = kernel.reference
    if reference is None:
        raise Unsupported(f"{kernel.name} has no reference to run on the simulated device")
    arrays = {
        name: prefix(launch.arrays[name], facts.dtype, facts.size)
        for name, facts in call.arrays.items()
    }
    cut = min(
        (array.size for name, array in arrays.items() if array.size < call.arrays[name].size),
        default=None,
    )
    arrays = {name: array[:cut] for name, array in arrays.items()}
    written = [p.name for p in kernel.parameters if p.role in (Role.WRITE, Role.UPDATE)]
    if not any(
        arrays[name].size for name in written
    ):  # such as a chunk behind the bytes that are real
        return lambda: None

    def run() -> None:
        if len(arrays) == 1:
            ((name, array),) = arrays.items()
            results = _of_one_array(
                reference, name, array.tobytes(), array.dtype.str, tuple(call.scalars.items())
            )
        else:
            results = reference(dict(arrays), call.scalars)
        for name in written:
            if name in results:
                result = np.asarray(results[name]).reshape(-1)[: arrays[name].size]
                arrays[name][: result.size] = result

    return run


@lru_cache(maxsize=256)
def _of_one_array(
    reference: Callable[..., Mapping[str, Any]],
    name: str,
    content: bytes,
    dtype: str,
    scalars: tuple[tuple[str, int | float], ...],
) -> Mapping[str, Any]:
    """The results of a kernel with one array. A staged copy launches the same chunks in every sample."""
    return reference({name: np.frombuffer(content, dtype)}, dict(scalars))


_WRITE_COMBINED_READ = 0.02  # speed of host reads of write-combined memory over cached memory: each one bypasses the caches


class SimulatedContent(Facet):
    """Fills, copies, reads and compares."""

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        target = prefix(allocation, values.plain_type(dtype)[0], allocation.nbytes)
        self._fill(allocation, partial(values.fill, target, seed), stream)

    def fill_cycle(
        self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream
    ) -> None:
        nodes_of(allocation, node_bytes)
        words = node_bytes // 4
        nodes = prefix(allocation, "i4", allocation.nbytes)
        nodes = nodes[: len(nodes) // words * words].reshape(-1, words)

        def fill() -> None:
            nodes[:, 0] = random_cycle(len(nodes), seed)

        self._fill(allocation, fill, stream)

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        self._fill(allocation, partial(backed(allocation).fill, 0xFF), stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Stream) -> None:
        own = own_stream(stream)
        if not allocation.address:
            self._timeline.forbid_capture("it writes memory on the host")
            self._timeline.wait([own])
            self._timeline.host += allocation.nbytes / self._machine.sheet.host_bandwidth
            effect()
            return
        write = Access("memory", "write", allocation.nbytes, allocation.nbytes)
        ran = what_ran.Step(
            StepKind.MEMSET, memory=memory_name(allocation), nbytes=allocation.nbytes
        )
        self._timeline.queue(
            own,
            QueueStep(
                WorkItem(COMPUTE, self._machine.touching([(write, allocation)])), effect, ran
            ),
            LAUNCH,
        )

    def copy(
        self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream
    ) -> None:
        own = own_stream(stream)
        check_copy(destination, source, nbytes)
        target, origin = backed(destination)[:nbytes], backed(source)[:nbytes]
        n = min(len(target), len(origin))
        duration, engine, waits = self._machine.copying(destination, source, nbytes)
        if waits:
            self._timeline.forbid_capture("a copy with pageable memory makes the host wait")
        way = "2".join("H" if memory.kind.on_host else "D" for memory in (source, destination))
        ran = what_ran.Step(
            StepKind.COPY,
            way,
            source=memory_name(source),
            memory=memory_name(destination),
            nbytes=nbytes,
        )
        duration = partial(self._machine.watched, ran, duration)
        self._timeline.queue(
            own,
            QueueStep(WorkItem(engine, duration), partial(np.copyto, target[:n], origin[:n]), ran),
            LAUNCH,
        )
        if waits:
            self._timeline.wait([own])

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._timeline.forbid_capture("it reads memory on the host")
        content = prefix(allocation, dtype, size)
        nbytes = size * np.dtype(dtype).itemsize
        self._timeline.wait()
        self._timeline.host += self._machine.host_access(
            allocation, writes=False
        ) + nbytes / self._host_speed(allocation, self._machine.sheet.pageable_to_host, read=True)
        return content.copy()

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        return [self.to_host(*one) for one in wanted]

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._timeline.forbid_capture("it writes memory from the host")
        memory = backed(allocation)
        array = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._timeline.wait()
        self._timeline.host += self._machine.host_access(allocation, writes=True)
        self._timeline.host += array.nbytes / self._host_speed(
            allocation, self._machine.sheet.pageable_to_device, read=False
        )
        memory[: array.nbytes] = array[: len(memory)]

    def _host_speed(self, allocation: Allocation, device: float, *, read: bool) -> float:
        if allocation.kind.on_device:
            return device
        slow = read and id(allocation) in self._machine.write_combined
        return self._machine.sheet.host_bandwidth * (_WRITE_COMBINED_READ if slow else 1.0)

    def mismatch(
        self, actual: Any, expected: Any, relative_tolerance: float
    ) -> tuple[int, int] | None:
        n = min(np.size(actual), np.size(expected))  # of what is backed
        left, right = (
            np.ascontiguousarray(array, dtype=np.asarray(actual).dtype).reshape(-1)[:n]
            for array in (actual, expected)
        )
        return values.mismatch(left, right, relative_tolerance)
