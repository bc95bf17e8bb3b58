"""A simulated device: its facets, on one timeline and one roofline."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.checks import check_managed, check_window, unsupported
from pytest_gpumem.devices.footprints import SourceFootprints
from pytest_gpumem.devices.protocol import (
    Activity,
    Advice,
    Allocation,
    Span,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.devices.simulated import streams
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.kernels import SimulatedKernels
from pytest_gpumem.devices.simulated.memory import SimulatedContent, SimulatedMemory
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.roofline import Roofline
from pytest_gpumem.devices.simulated.streams import Facet, Timeline, Work
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran


class SimulatedL2(Facet, protocol.L2):
    """The set-aside and windows: their limits and what is granted. No time depends on them."""

    def set_aside(self) -> int:
        return self._roofline.l2.set_aside

    def request_set_aside(self, nbytes: int) -> int:
        reason = unsupported(self._roofline.facts, self.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        self._timeline.call(streams.ALLOCATE, "it changes the set-aside")
        return self._roofline.l2.request_set_aside(nbytes)

    def set_window(self, stream: Any, window: WindowSpec | None) -> None:
        self._timeline.call()
        if window is not None:
            check_window(window, self._roofline.facts)
        self._timeline.windows[stream] = window

    def window(self, stream: Any) -> WindowSpec | None:
        self._timeline.call()
        return self._timeline.windows.get(stream)

    def reset_persisting(self) -> None:
        self._timeline.call(streams.CALL, "it resets persisting lines")
        self._roofline.l2.persisting = False


class SimulatedManaged(Facet, protocol.Managed):
    """Moves pages and takes advice."""

    def __init__(self, timeline: Timeline, roofline: Roofline, memory: SimulatedMemory) -> None:
        super().__init__(timeline, roofline)
        self._memory = memory

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Any) -> None:
        self._checked(allocation, "prefetched", "cudaMemPrefetchAsync")
        self._timeline.forbid_capture("a prefetch cannot be captured")
        engine = streams.DEVICE_TO_HOST if to_host else streams.HOST_TO_DEVICE
        work = Work(engine, partial(self._roofline.prefetch, allocation, to_host))
        self._timeline.queue(stream, work, streams.LAUNCH)

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        pages = self._checked(allocation, "advised about", "cudaMemAdvise")
        self._timeline.call()
        pages.advise(advice, to_host, on=on)

    def discard(self, allocation: Allocation, stream: Any) -> None:
        """Take the call, and keep the content."""
        self._checked(allocation, "discarded", "cudaMemDiscardBatchAsync")
        self._timeline.call(streams.LAUNCH, "a discard cannot be captured")

    def oversubscribe(self, nbytes: int) -> Allocation:
        return self._memory.oversubscribe(nbytes)

    def _checked(self, allocation: Allocation, done: str, call: str) -> Pages:
        check_managed(allocation, done, self._roofline.facts)
        return self._roofline.pages[id(allocation)]


class SimulatedCounters(Facet, protocol.Counters):
    """Counts what CUPTI counts on a GPU."""

    def pages(self, work: Callable[[], None]) -> PageCounts:
        self._roofline.page_log.take()
        work()
        return self._roofline.page_log.take()

    def _timed(self, work: Callable[[], None]) -> list[tuple[Step, float, float]]:
        """Return each kernel and copy of `work`, with its start and its seconds."""
        timed = self._timeline.timed = []
        try:
            work()
        finally:
            self._timeline.timed = None
        return [each for each in timed if each[0].kind in (StepKind.KERNEL, StepKind.COPY)]

    def activity(self, work: Callable[[], None]) -> Activity:
        return Activity([span for span in self.spans(work) if span.grid])

    def spans(self, work: Callable[[], None]) -> list[Span]:
        spans = []
        for step, start, seconds in self._timed(work):
            spans.append(Span(step.name, math.prod(step.grid or (0,)), start, start + seconds))
        return spans

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        timeline, host = self._timeline, self._timeline.host
        steps = timeline.steps = []
        try:
            work()
        finally:
            timeline.steps, timeline.host = None, host
        return what_ran(steps)


class SimulatedDevice:
    """A device with a datasheet's figures.

    Args:
        datasheet: the figures.
        seed: of its noise. The same seed and the same calls give exactly the same times.
    """

    def __init__(self, datasheet: Datasheet, *, seed: int = 0) -> None:
        timeline = self.timeline = Timeline(datasheet)
        roofline = self.roofline = Roofline(datasheet, seed)
        self.streams = streams.SimulatedStreams(timeline, roofline)
        self.graphs = streams.SimulatedGraphs(timeline, roofline)
        self.memory = SimulatedMemory(timeline, roofline)
        self.content = SimulatedContent(timeline, roofline)
        self.kernels = SimulatedKernels(timeline, roofline, self.content)
        self.l2 = SimulatedL2(timeline, roofline)
        self.managed = SimulatedManaged(timeline, roofline, self.memory)
        self.counters = SimulatedCounters(timeline, roofline)
        self.footprints = SourceFootprints(None, ())

    @property
    def facts(self) -> DeviceFacts:
        return self.roofline.facts

    def now(self) -> float:
        self.timeline.call()
        return self.timeline.host

    def pause(self, seconds: float) -> None:
        self.timeline.host += seconds

    def entropy(self, seed: int) -> int:
        return seed

    def conditions(self) -> Conditions:
        sheet = self.roofline.sheet
        clocks = {"sm_clock_hz": sheet.sm_clock, "memory_clock_hz": sheet.memory_clock}
        return Conditions(**clocks, throttle_reasons=(), other_processes=0)

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def elsewhere(self) -> str | None:
        return None

    def launches_wait(self) -> bool:
        return False

    def gone(self) -> str | None:
        return None

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        raise Unsupported("one GPU is simulated: there is no peer to copy to")

    def close(self) -> None:
        self.timeline.clear()
