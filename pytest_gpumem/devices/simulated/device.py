"""A simulated device: its facets, on one timeline and one machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from pytest_gpumem.devices.checks import check_managed, check_window, unsupported
from pytest_gpumem.devices.footprints import SourceFootprints
from pytest_gpumem.devices.protocol import Advice, Allocation, Span, Stream, Unsupported, WindowSpec
from pytest_gpumem.devices.simulated.allocations import SimulatedMemory
from pytest_gpumem.devices.simulated.content import SimulatedContent
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.engine import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, WorkItem
from pytest_gpumem.devices.simulated.kernels import SimulatedKernels
from pytest_gpumem.devices.simulated.machine import SimulatedMachine
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.streams import (
    ALLOCATE,
    CALL,
    LAUNCH,
    Facet,
    QueueStep,
    SimulatedGraphs,
    SimulatedStreams,
    StepLog,
    Timeline,
    own_stream,
)
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import (
    Activity,
    CopyUse,
    KernelUse,
    at_once,
    copies_together,
    kernels_together,
)
from pytest_gpumem.records.what_ran import Step, WhatRan, what_ran


class SimulatedL2(Facet):
    """The set-aside of the model's L2, and windows."""

    def set_aside(self) -> int:
        return self._machine.l2.set_aside

    def request_set_aside(self, nbytes: int) -> int:
        reason = unsupported(self._machine.facts, self.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        self._timeline.forbid_capture("it changes the set-aside")
        self._timeline.run()
        self._timeline.host += ALLOCATE
        return self._machine.l2.request_set_aside(nbytes)

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        own = own_stream(stream)
        self._timeline.host += CALL
        if window is not None:
            check_window(window, self._machine.facts)
        self._timeline.windows[own] = window

    def window(self, stream: Stream) -> WindowSpec | None:
        self._timeline.host += CALL
        return self._timeline.windows.get(own_stream(stream))

    def reset_persisting(self) -> None:
        self._timeline.forbid_capture("it resets persisting lines")
        self._timeline.run()
        self._timeline.host += CALL
        self._machine.l2.reset_persisting()


class SimulatedManaged(Facet):
    """Moves pages and takes advice."""

    def __init__(
        self, timeline: Timeline, machine: SimulatedMachine, memory: SimulatedMemory
    ) -> None:
        super().__init__(timeline, machine)
        self.oversubscribe = memory.oversubscribe

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        pages = self._pages_of(allocation, "prefetched")
        self._timeline.forbid_capture("a prefetch cannot be captured")
        self._timeline.called("cudaMemPrefetchAsync")
        duration = partial(self._run_prefetch, allocation, pages, to_host)
        engine = DEVICE_TO_HOST if to_host else HOST_TO_DEVICE
        self._timeline.queue(own_stream(stream), QueueStep(WorkItem(engine, duration)), LAUNCH)

    def _run_prefetch(
        self, allocation: Allocation, pages: Pages, to_host: bool, start: float
    ) -> float:
        if to_host:
            moved = pages.to_host()
            seconds = self._machine.timing.pages.prefetched_to_host(moved)
        else:
            touched = pages.to_device()
            moved = touched.moved
            seconds = self._machine.timing.pages.prefetched(touched)
        if moved:
            self._machine.l2.forget(allocation)
        seconds += self._machine.sheet.launch
        return seconds * self._machine.noise.sample(seconds)

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        pages = self._pages_of(allocation, "advised about")
        self._timeline.called("cudaMemAdvise")
        self._timeline.run()  # at once on the host's clock, but not before what was queued
        self._timeline.host += CALL
        pages.advise(advice, to_host, on=on)

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        pages = self._pages_of(allocation, "discarded")
        self._timeline.forbid_capture("a discard cannot be captured")
        self._timeline.called("cudaMemDiscardBatchAsync")
        self._timeline.queue(
            own_stream(stream),
            QueueStep(WorkItem(COMPUTE, partial(self._run_discard, pages))),
            LAUNCH,
        )

    def _run_discard(self, pages: Pages, start: float) -> float:
        pages.discard()
        return self._machine.sheet.launch

    def _pages_of(self, allocation: Allocation, done: str) -> Pages:
        check_managed(allocation, done, self._machine.facts)
        return self._machine.pages[id(allocation)]


class SimulatedCounters(Facet):
    """Counts in the model what CUPTI counts on a GPU."""

    def pages(self, work: Callable[[], None]) -> PageCounts:
        self._timeline.run()
        self._machine.timing.pages.take()
        work()
        self._timeline.run()
        return self._machine.timing.pages.take()

    def _watched(self, work: Callable[[], None]) -> list[tuple[Step, float, float]]:
        """Each kernel and copy of `work`, with its start and its seconds."""
        self._timeline.run()
        seen = self._machine.watching = list[tuple[Step, float, float]]()
        try:
            work()
            self._timeline.run()
        finally:
            self._machine.watching = None
        return seen

    def activity(self, work: Callable[[], None]) -> Activity:
        kernels, copies, times = list[KernelUse](), list[CopyUse](), list[tuple[float, float]]()
        for ran, start, seconds in self._watched(work):
            nanoseconds = round(seconds * 1e9)
            if ran.grid is not None and ran.block is not None:
                kernels.append(
                    KernelUse(
                        ran.name, ran.grid, ran.block, 1, nanoseconds, shared=ran.dynamic_shared
                    )
                )
                times.append((start * 1e9, start * 1e9 + nanoseconds))
            else:
                copies.append(
                    CopyUse(
                        ran.name,
                        ran.source or "",
                        ran.memory or "",
                        1,
                        ran.nbytes or 0,
                        nanoseconds,
                    )
                )
        together = kernels_together(kernels), copies_together(copies)
        return Activity(kernels=together[0], copies=together[1], at_once=round(at_once(times)))

    def spans(self, work: Callable[[], None]) -> list[Span]:
        return [
            Span(ran.name, math.prod(ran.grid or (0,)), start, start + seconds)
            for ran, start, seconds in self._watched(work)
        ]

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        self._timeline.run()
        watching, host = StepLog(), self._timeline.host
        self._timeline.watching = watching
        try:
            work()
        finally:
            self._timeline.watching, self._timeline.host = None, host
        return what_ran(watching.steps, watching.calls)

    def loading(self) -> AbstractContextManager[object]:
        return nullcontext()


class SimulatedDevice:
    """A device that models a datasheet.
    `datasheet`: its figures and fitted parameters.
    `seed`: of its noise. The same seed and the same calls give exactly the same times.
    """

    def __init__(self, datasheet: Datasheet, *, seed: int = 0) -> None:
        self.timeline = Timeline(datasheet)
        self.machine = SimulatedMachine(datasheet, seed)
        self.streams = SimulatedStreams(self.timeline, self.machine)
        self.graphs = SimulatedGraphs(self.timeline, self.machine)
        self.memory = SimulatedMemory(self.timeline, self.machine)
        self.content = SimulatedContent(self.timeline, self.machine)
        self.kernels = SimulatedKernels(self.timeline, self.machine, self.content.copy)
        self.l2 = SimulatedL2(self.timeline, self.machine)
        self.managed = SimulatedManaged(self.timeline, self.machine, self.memory)
        self.counters = SimulatedCounters(self.timeline, self.machine)
        self.footprints = SourceFootprints(None, ())

    @property
    def facts(self) -> DeviceFacts:
        return self.machine.facts

    def now(self) -> float:
        self.timeline.host += CALL
        return self.timeline.host

    def pause(self, seconds: float) -> None:
        self.timeline.host += seconds

    def entropy(self, seed: int) -> int:
        return seed

    def conditions(self) -> Conditions:
        sheet = self.machine.sheet
        return Conditions(
            sm_clock_hz=sheet.sm_clock,
            memory_clock_hz=sheet.memory_clock,
            throttle_reasons=(),
            other_processes=0,
        )

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def elsewhere(self) -> int | None:
        return None

    def launches_wait(self) -> bool:
        return False

    def was_reset(self) -> bool:
        return False

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        raise Unsupported("one GPU is simulated: there is no peer to copy to")

    def close(self) -> None:
        self.timeline.clear()
