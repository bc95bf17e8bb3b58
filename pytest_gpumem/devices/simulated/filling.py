"""The simulated device's fills, copies, reads and comparisons, with their times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.checks import nodes_of
from pytest_gpumem.devices.protocol import Allocation, Content, DeviceError, Stream
from pytest_gpumem.devices.simulated.content import live
from pytest_gpumem.devices.simulated.counters import copied, copy_step, memory_name
from pytest_gpumem.devices.simulated.engine import COMPUTE, Work
from pytest_gpumem.devices.simulated.machine import Machine
from pytest_gpumem.devices.simulated.streams import LAUNCH, Step, Timeline, own_stream
from pytest_gpumem.kernels.kernel import Access
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.what_ran import StepKind

_WRITE_COMBINED_READ = 0.02
"""Speed of host reads of write-combined memory over cached memory: each one bypasses the caches."""


class SimulatedContent:
    """Fills, copies, reads and compares."""

    def __init__(self, timeline: Timeline, machine: Machine) -> None:
        self._timeline = timeline
        self._machine = machine

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        self._fill(allocation, partial(live(allocation).fill_random, dtype, seed), stream)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream, *, length: int | None = None) -> None:
        nodes_of(allocation, node_bytes)
        self._fill(allocation, partial(live(allocation).fill_cycle, node_bytes, seed, length), stream)

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        self._fill(allocation, live(allocation).poison, stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Stream) -> None:
        own = own_stream(stream)
        if not allocation.address:
            self._timeline.forbid_capture("it writes memory on the host")
            self._timeline.wait([own])
            self._timeline.host += allocation.nbytes / self._machine.sheet.host_bandwidth
            effect()
            return
        write = Access("memory", "write", allocation.nbytes, allocation.nbytes)
        ran = what_ran.Step(StepKind.MEMSET, memory=memory_name(allocation), nbytes=allocation.nbytes)
        self._timeline.queue(own, Step(Work(COMPUTE, self._machine.touching([(write, allocation)])), effect, ran), LAUNCH)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
        own = own_stream(stream)
        if not 0 < nbytes <= min(destination.nbytes, source.nbytes):
            raise DeviceError(f"a copy of {nbytes} bytes from {source.nbytes} to {destination.nbytes} bytes of memory")
        target, origin = live(destination), live(source)
        duration, engine, waits = self._machine.copying(destination, source, nbytes)
        if waits:
            self._timeline.forbid_capture("a copy with pageable memory makes the host wait")
        use = copied(destination, source, nbytes)
        duration = partial(self._machine.watched, use, duration)
        self._timeline.queue(own, Step(Work(engine, duration), partial(target.copy_from, origin, nbytes), copy_step(use)), LAUNCH)
        if waits:
            self._timeline.wait([own])

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._timeline.forbid_capture("it reads memory on the host")
        memory = live(allocation)
        self._timeline.wait(self._timeline.streams)
        nbytes = size * np.dtype(dtype).itemsize
        self._timeline.host += self._machine.host_access(allocation, writes=False) + nbytes / self._host_speed(
            allocation, self._machine.sheet.pageable_to_host, read=True
        )
        return memory.read(dtype, size)

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._timeline.forbid_capture("it writes memory from the host")
        memory = live(allocation)
        self._timeline.wait(self._timeline.streams)
        array = np.asarray(content)
        self._timeline.host += self._machine.host_access(allocation, writes=True)
        self._timeline.host += array.nbytes / self._host_speed(allocation, self._machine.sheet.pageable_to_device, read=False)
        memory.write(array)

    def _host_speed(self, allocation: Allocation, device: float, *, read: bool) -> float:
        if allocation.kind.on_device:
            return device
        slow = read and id(allocation) in self._machine.write_combined
        return self._machine.sheet.host_bandwidth * (_WRITE_COMBINED_READ if slow else 1.0)

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        left, right = np.asarray(actual).reshape(-1), np.asarray(expected).reshape(-1)
        n = min(left.size, right.size)
        left, right = left[:n], right[:n]
        differs = left != right
        if differs.any() and right.dtype.kind == "f":
            wide, reference = left.astype(np.float64), right.astype(np.float64)
            with np.errstate(invalid="ignore"):
                near = np.abs(wide - reference) <= relative_tolerance * np.maximum(np.abs(reference), 1e-30)
            differs &= ~near
        wrong = np.flatnonzero(differs)
        return (int(wrong.size), int(wrong[0])) if wrong.size else None


_: type[Content] = SimulatedContent
