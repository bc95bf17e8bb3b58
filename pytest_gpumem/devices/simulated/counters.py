"""The simulated device's counters: migrations of managed pages, kernels and copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from pytest_gpumem.devices.protocol import Allocation, Counters
from pytest_gpumem.devices.simulated.streams import Facet, Watching
from pytest_gpumem.kernels.kernel import LaunchShape
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse, at_once, copies_together, kernels_together
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran


class SimulatedCounters(Facet):
    """Counts in the model what CUPTI counts on a GPU."""

    def pages(self, work: Callable[[], None]) -> PageCounts:
        self._timeline.run()
        self._machine.timing.pages.take()
        work()
        self._timeline.run()
        return self._machine.timing.pages.take()

    def activity(self, work: Callable[[], None]) -> Activity:
        self._timeline.run()
        self._machine.watching = []
        try:
            work()
            self._timeline.run()
            seen = self._machine.watching
        finally:
            self._machine.watching = None
        times = [(start * 1e9, start * 1e9 + one.nanoseconds) for one, start in seen if isinstance(one, KernelUse)]
        kernels = kernels_together(one for one, _ in seen if isinstance(one, KernelUse))
        copies = copies_together(one for one, _ in seen if isinstance(one, CopyUse))
        return Activity(kernels=kernels, copies=copies, at_once=round(at_once(times)), source="the model")

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        self._timeline.run()
        watching, host = Watching(), self._timeline.host
        self._timeline.watching = watching
        try:
            work()
        finally:
            self._timeline.watching, self._timeline.host = None, host
        return what_ran(watching.steps, watching.calls)

    def loading(self) -> AbstractContextManager[object]:
        return nullcontext()


def launched(name: str, shape: LaunchShape) -> KernelUse:
    """One launch, as a watcher sees it; its time is not known yet."""
    return KernelUse(name, (shape.blocks, 1, 1), (shape.threads, 1, 1), launches=1, nanoseconds=0, shared=shape.shared_bytes)


def copied(destination: Allocation, source: Allocation, nbytes: int) -> CopyUse:
    """One copy, as a watcher sees it; its time is not known yet."""
    way = "".join("H" if memory.kind.on_host else "D" for memory in (source, destination))
    return CopyUse(f"{way[0]}2{way[1]}", memory_name(source), memory_name(destination), count=1, nbytes=nbytes, nanoseconds=0)


def copy_step(use: CopyUse) -> Step:
    """One copy as a step of a launch."""
    return Step(StepKind.COPY, use.kind, source=use.source, memory=use.destination, nbytes=use.nbytes)


def memory_name(allocation: Allocation) -> str:
    """The kind of an allocation, one of `uses.MEMORY_KINDS`."""
    return "pinned" if allocation.kind.locked else allocation.kind.value


_: type[Counters] = SimulatedCounters
