"""The content of memory: the device's fills, copies, reads and comparisons, with their times.

The first bytes of an allocation are real: its `backing` is a NumPy array of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.devices import protocol, values
from pytest_gpumem.devices.checks import check_copy, nodes_of
from pytest_gpumem.devices.protocol import Allocation, Launch
from pytest_gpumem.devices.simulated import streams
from pytest_gpumem.devices.simulated.streams import Facet, Work
from pytest_gpumem.kernels.kernel import Access, Role
from pytest_gpumem.kernels.latency import random_cycle
from pytest_gpumem.records.what_ran import Step, StepKind
from pytest_gpumem.units import KiB

BACKED_BYTES = 256 * KiB  # the largest allocation that is real as a whole
PREFIX_BYTES = 32 * KiB  # what is real of larger ones: each launch computes its result

_ENGINES = {"D2H": streams.DEVICE_TO_HOST, "D2D": streams.COMPUTE}


def backing(nbytes: int) -> NDArray[np.uint8]:
    """Return new bytes for an allocation of `nbytes`."""
    if nbytes > BACKED_BYTES:
        nbytes = min(nbytes, PREFIX_BYTES)
    return np.zeros(nbytes, np.uint8)


def backed(allocation: Allocation) -> NDArray[np.uint8]:
    """Return the bytes behind an allocation."""
    if allocation.freed:
        raise protocol.DeviceError("the memory was freed")
    memory: NDArray[np.uint8] = allocation.backing
    return memory


def prefix(allocation: Allocation, dtype: str, size: int) -> NDArray[Any]:
    """Return a writable array over the first `size` elements, or over those that are backed."""
    memory, itemsize = backed(allocation), np.dtype(dtype).itemsize
    return memory[: min(size, len(memory) // itemsize) * itemsize].view(dtype)


def memory_name(allocation: Allocation) -> str:
    """Return the kind of an allocation, one of `uses.MEMORY_KINDS`."""
    return "pinned" if allocation.kind.locked else allocation.kind.value


def computation(launch: Launch) -> Callable[[], None]:
    """Return what writes a kernel's results, of what is real: of its reference, where inputs changed.

    If an array of a call is backed in part, all are cut to the elements of the shortest of those: a
    smaller table stays whole, a stream becomes its first elements.
    """
    kernel, facts = launch.kernel, launch.call.arrays
    reference = kernel.reference
    if reference is None:
        problem = f"{kernel.name} has no reference to run on the simulated device"
        raise protocol.Unsupported(problem)
    arrays = {n: prefix(launch.arrays[n], facts[n].dtype, facts[n].size) for n in facts}
    partial_sizes = [array.size for name, array in arrays.items() if array.size < facts[name].size]
    cut = min(partial_sizes, default=None)
    arrays = {name: array[:cut] for name, array in arrays.items()}
    roles = {parameter.name: parameter.role for parameter in kernel.parameters}
    read = [array for name, array in arrays.items() if roles[name] is not Role.WRITE]
    written = {name: array for name, array in arrays.items() if roles[name] is not Role.READ}
    known: list[Any] = [None, {}]  # the inputs of the last run, and its results

    def run() -> None:
        if not any(array.size for array in written.values()):
            return  # such as a chunk behind the real bytes
        inputs = [array.tobytes() for array in read]
        if inputs != known[0]:
            results = reference(dict(arrays), launch.call.scalars)
            known[:] = inputs, {name: np.array(results[name]).reshape(-1) for name in results}
        for name, result in known[1].items():
            size = min(result.size, written[name].size)
            written[name][:size] = result[:size]

    return run


class SimulatedContent(Facet):
    """Fills, copies, reads and compares."""

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Any) -> None:
        target = prefix(allocation, values.plain_type(dtype)[0], allocation.nbytes)
        self._fill(allocation, partial(values.fill, target, seed), stream)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Any) -> None:
        nodes_of(allocation, node_bytes)
        words = node_bytes // 4
        nodes = prefix(allocation, "i4", allocation.nbytes)
        nodes = nodes[: len(nodes) // words * words].reshape(-1, words)

        def fill() -> None:
            nodes[:, 0] = random_cycle(len(nodes), seed)

        self._fill(allocation, fill, stream)

    def poison(self, allocation: Allocation, stream: Any) -> None:
        self._fill(allocation, partial(backed(allocation).fill, 0xFF), stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Any) -> None:
        nbytes = allocation.nbytes
        if not allocation.address:
            self._timeline.forbid_capture("it writes memory on the host")
            self._timeline.wait(stream)
            self._timeline.host += nbytes / self._roofline.sheet.host_bandwidth
            effect()
            return
        traffic = self._roofline.traffic([(Access("", "write", nbytes, nbytes), allocation)])
        ran = Step(StepKind.MEMSET, memory=memory_name(allocation), nbytes=nbytes)
        work = Work(streams.COMPUTE, partial(self._roofline.kernel, traffic), effect, ran)
        self._timeline.queue(stream, work, streams.LAUNCH)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Any) -> None:
        check_copy(destination, source, nbytes)
        target, origin = backed(destination)[:nbytes], backed(source)[:nbytes]
        real = min(len(target), len(origin))
        waits = destination.kind.pageable or source.kind.pageable
        if waits:
            self._timeline.forbid_capture("a copy with pageable memory makes the host wait")
        seconds = partial(self._roofline.copy, destination, source, nbytes)
        direction = "2".join("DH"[memory.kind.on_host] for memory in (source, destination))
        engine = _ENGINES.get(direction, streams.HOST_TO_DEVICE)
        ran = _copied(direction, memory_name(source), memory_name(destination), nbytes)
        work = Work(engine, seconds, partial(np.copyto, target[:real], origin[:real]), ran)
        self._timeline.queue(stream, work, streams.LAUNCH)
        if waits:
            self._timeline.wait(stream)

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._timeline.forbid_capture("it reads memory on the host")
        content = prefix(allocation, dtype, size)
        nbytes = size * np.dtype(dtype).itemsize
        self._touched_by_host(allocation, nbytes, writes=False)
        return content.copy()

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        return [self.to_host(*each) for each in wanted]

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._timeline.forbid_capture("it writes memory from the host")
        memory = backed(allocation)
        array = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._touched_by_host(allocation, array.nbytes, writes=True)
        memory[: array.nbytes] = array[: len(memory)]

    def _touched_by_host(self, allocation: Allocation, nbytes: int, *, writes: bool) -> None:
        """Wait, and let the time pass that the host needs."""
        timeline, sheet = self._timeline, self._roofline.sheet
        timeline.wait(None)
        timeline.host += self._roofline.host_access(allocation, writes=writes)
        rate = sheet.host_bandwidth
        if allocation.kind.on_device:
            rate = sheet.pageable_to_device if writes else sheet.pageable_to_host
        timeline.host += nbytes / rate

    def mismatch(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        left = np.ascontiguousarray(actual).reshape(-1)
        right = np.ascontiguousarray(expected, dtype=left.dtype).reshape(-1)
        size = min(left.size, right.size)  # of what is backed
        return values.mismatch(left[:size], right[:size], tolerance)


def _copied(direction: str, source: str, destination: str, nbytes: int) -> Step:
    return Step(StepKind.COPY, direction, source=source, memory=destination, nbytes=nbytes)
