"""The simulated device's counters: migrations of managed pages, kernels and copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from pytest_gpumem.devices.protocol import Counters
from pytest_gpumem.devices.simulated.streams import Facet, Watching
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse, at_once, copies_together, kernels_together
from pytest_gpumem.records.what_ran import WhatRan, what_ran


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
        kernels, copies, times = list[KernelUse](), list[CopyUse](), list[tuple[float, float]]()
        for ran, start, seconds in seen:
            nanoseconds = round(seconds * 1e9)
            if ran.grid is not None and ran.block is not None:
                kernels.append(KernelUse(ran.name, ran.grid, ran.block, 1, nanoseconds, shared=ran.dynamic_shared))
                times.append((start * 1e9, start * 1e9 + nanoseconds))
            else:
                copies.append(CopyUse(ran.name, ran.source or "", ran.memory or "", 1, ran.nbytes or 0, nanoseconds))
        together = kernels_together(kernels), copies_together(copies)
        return Activity(kernels=together[0], copies=together[1], at_once=round(at_once(times)), source="the model")

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


_: type[Counters] = SimulatedCounters
