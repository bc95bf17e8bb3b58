"""The simulated device's streams, events and captured graphs, on virtual time.

Results are computed in the order of the calls, when work is queued: a valid order, because streams meet only where the host waits.
Times are found when the host waits for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from msgspec.structs import replace

from pytest_gpumem.devices.checks import check_window, why_not_captured
from pytest_gpumem.devices.protocol import (
    CannotCapture,
    DeviceError,
    Event,
    Graph,
    Hold,
    HoldExpired,
    Stream,
    WindowSpec,
)
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.engine import (
    Engine,
    HoldItem,
    Item,
    Mark,
    SimulatedEvent,
    SimulatedStream,
    StampItem,
    WaitItem,
)
from pytest_gpumem.devices.simulated.machine import SimulatedMachine
from pytest_gpumem.records import what_ran
from pytest_gpumem.records.what_ran import StepKind

# Virtual seconds that a call takes on the host, from Python. Fit set: event pairs without a hold read 3 to 6 us above held ones.
_RECORD = 1.0e-6
LAUNCH = 4.5e-6
_REPLAY = 8.0e-6
_SYNCHRONIZE = 4.0e-6
ALLOCATE = 60.0e-6
CALL = 0.2e-6
_SUBMIT = 2.0e-6  # from a host call's end to the start of its work on an idle device
_JOIN = 1.5e-6  # an event recorded and waited for


@dataclass(eq=False)
class QueueStep:
    """One piece of queued work: its effect on memory, and its time."""

    item: Item
    effect: Callable[[], object] | None = None
    ran: what_ran.Step | None = None  # its entry in the record of a launch, without the stream


@dataclass(eq=False)
class StepLog:
    """What ran so far, while a launch is watched."""

    steps: list[what_ran.Step] = field(default_factory=list)
    calls: Counter[str] = field(
        default_factory=Counter
    )  # calls of the CUDA runtime that have no step, by name


@dataclass(eq=False)
class SimulatedGraph:
    """Captured steps; each replay does all of them again."""

    steps: list[QueueStep]
    windows: tuple[WindowSpec | None, ...]  # the window of each of its kernels


@dataclass(eq=False)
class Capture:
    """A capture that is under way."""

    stream: SimulatedStream
    window: WindowSpec | None  # of every kernel, where one is given
    steps: list[QueueStep] = field(default_factory=list)
    windows: list[WindowSpec | None] = field(default_factory=list)


class Timeline:
    """The host's virtual clock, the queues of the streams and the capture that is under way. All facets queue their work here."""

    def __init__(self, sheet: Datasheet) -> None:
        self.engine = Engine(
            submit=_SUBMIT, record=sheet.record, visibility=sheet.visibility, tick=sheet.tick
        )
        self.host = 0.0  # seconds on the host's clock
        self.windows: dict[
            SimulatedStream, WindowSpec | None
        ] = {}  # of each stream that ever had one
        self.capturing: Capture | None = None
        # why the capture that is under way, or the last one, is impossible
        self.cannot: CannotCapture | None = None
        self.watching: StepLog | None = None

    def watch(self, step: what_ran.Step, stream: SimulatedStream | None = None) -> None:
        """Record a step if a launch is watched."""
        if self.watching is not None:
            self.watching.steps.append(
                step if stream is None else replace(step, stream=stream.handle)
            )

    @property
    def recording(self) -> bool:
        """True if the steps that are queued now may be those of a record: of a launch that is watched, or of a graph."""
        return self.watching is not None or self.capturing is not None

    def called(self, name: str) -> None:
        """Record a call of the CUDA runtime if a launch is watched."""
        if self.watching is not None:
            self.watching.calls[name] += 1

    @property
    def streams(self) -> list[SimulatedStream]:
        return self.engine.streams

    def run(self) -> None:
        """Run all queued work that no hold stops."""
        self.engine.run()

    def unfinished(self) -> bool:
        """True if work that is queued ends later than now."""
        self.run()
        return self.engine.latest > self.host

    def wait(self, streams: Sequence[SimulatedStream] | None = None) -> None:
        """The host waits for streams, or for all; a hold that nobody released runs into its time-out."""
        self.run()
        for stream in [
            one for one in (self.engine.busy if streams is None else streams) if one.queue
        ]:
            while (held := self.engine.holding(stream)) is not None:
                self.engine.release(*held, at=math.inf)
                self.run()
        latest = self.engine.latest if streams is None else max(stream.ready for stream in streams)
        self.host = max(self.host, latest) + _SYNCHRONIZE

    def queue(self, stream: SimulatedStream, step: QueueStep, cost: float) -> None:
        """Do a step in stream order: now, or at every replay of the graph that is being captured."""
        if self.capturing is not None:
            if stream is not self.capturing.stream:
                self.refuse("it uses another stream")
            self.capturing.steps.append(step)
            return
        self.host += cost
        self.run_step(stream, step)

    def run_step(self, stream: SimulatedStream, step: QueueStep) -> None:
        """Do a step in stream order, at once on the host's clock. While a launch is watched, steps are recorded and take no time."""
        if self.watching is not None:
            if step.ran is not None:
                self.watch(step.ran, stream)
            return
        if step.effect is not None:
            step.effect()
        self.engine.queue(stream, step.item, self.host)

    def window_of_kernel(
        self, stream: SimulatedStream, own: WindowSpec | None = None
    ) -> WindowSpec | None:
        """The window of a kernel that is queued now: its graph's, else its launch's own, else its stream's."""
        if own is None:
            own = self.windows.get(stream)
        if self.capturing is not None:
            if self.capturing.window is not None:
                own = self.capturing.window
            self.capturing.windows.append(own)
        return own

    def forbid_capture(self, reason: str) -> None:
        """Refuse what cannot be captured, with the reason, while a capture is under way."""
        if self.capturing is not None:
            self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Raise `CannotCapture`, and remember it: user code may catch it."""
        if self.cannot is None:
            self.cannot = CannotCapture(reason)
        raise self.cannot

    def clear(self) -> None:
        """Forget queued work and windows."""
        self.engine.clear()
        self.windows.clear()


class Facet:
    """A part of the device: it queues work on the timeline, and asks the machine for the time of it."""

    def __init__(self, timeline: Timeline, machine: SimulatedMachine) -> None:
        self._timeline, self._machine = timeline, machine


class SimulatedHold:
    """A stream that waits."""

    def __init__(
        self, timeline: Timeline, stream: SimulatedStream, item: HoldItem, clock: float | None
    ) -> None:
        self._timeline = timeline
        self._stream = stream
        self._item = item
        self._clock = clock

    def clock(self) -> float | None:
        return self._clock

    def release(self) -> None:
        timeline, item = self._timeline, self._item
        timeline.host += CALL
        timeline.run()
        if item.released is None:
            timeline.engine.release(self._stream, item, timeline.host)


class SimulatedStreams(Facet):
    """Streams and events on virtual time."""

    def create(self) -> Stream:
        self._timeline.host += CALL
        return self._timeline.engine.stream()

    def defaults(self) -> tuple[Stream, ...]:
        return ()

    def visible(self) -> tuple[Stream, ...]:
        return tuple(self._timeline.windows)

    def event(self) -> Event:
        self._timeline.host += CALL
        return SimulatedEvent()

    def record(self, event: Event, stream: Stream) -> None:
        self._timeline.queue(
            own_stream(stream), QueueStep(StampItem(cast(SimulatedEvent, event))), _RECORD
        )

    def elapsed(self, start: Event, end: Event) -> float:
        first, last = cast(SimulatedEvent, start), cast(SimulatedEvent, end)
        if first.pending or last.pending:
            self._timeline.run()
        times = []
        for which, event in (("first", first), ("second", last)):
            if event.time is None and not event.pending:
                raise DeviceError(f"the {which} event was never recorded")
            if event.pending or event.time is None or event.time > self._timeline.host:
                raise DeviceError(
                    f"the {which} event has not completed: synchronize before reading the time"
                )
            times.append(event.time)
        return times[1] - times[0]

    def synchronize(self, stream: Stream | None = None) -> None:
        self._timeline.forbid_capture("it synchronises")
        streams = None if stream is None else [own_stream(stream)]
        waits = what_ran.Step(StepKind.SYNCHRONISATION, "device" if stream is None else "stream")
        self._timeline.watch(waits, None if stream is None else own_stream(stream))
        self._timeline.wait(streams)
        expired = [one for one in streams or self._timeline.streams if one.expired]
        if expired:
            for one in expired:
                one.expired = False
            raise HoldExpired(
                "a held stream ran into its time-out: the host waited for work that was queued behind it"
            )

    def end_captures(self) -> int:
        return 0

    def join(self, stream: Stream, other: Stream) -> None:
        waiting, marked = own_stream(stream), own_stream(other)
        if waiting is marked:
            return
        if self._timeline.capturing is not None:
            self._timeline.refuse("it uses another stream")
        mark = Mark(marked)
        self._timeline.queue(marked, QueueStep(mark), _JOIN)
        self._timeline.queue(
            waiting, QueueStep(WaitItem(mark), ran=what_ran.Step(StepKind.JOIN)), 0.0
        )

    def hold(self, stream: Stream, timeout: float) -> Hold:
        self._timeline.forbid_capture("it holds the stream")
        own, item = own_stream(stream), HoldItem(timeout)
        self._timeline.queue(own, QueueStep(item), LAUNCH)
        return SimulatedHold(self._timeline, own, item, self._machine.sheet.sm_clock)


class SimulatedGraphs(Facet):
    """Captures work; a replay queues it again."""

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> Graph:
        if self._timeline.capturing is not None:
            raise CannotCapture("another capture is under way")
        if window is not None:
            check_window(window, self._machine.facts)
        capture = Capture(own_stream(stream), window)
        self._timeline.capturing, self._timeline.cannot = capture, None
        try:
            body()
        except Exception as error:
            # A function may dress the refusal up in an error of its own.
            cannot = self._timeline.cannot or CannotCapture(why_not_captured(error))
            if cannot is error:
                raise
            raise cannot from error
        finally:
            self._timeline.capturing = None
        if self._timeline.cannot is not None:
            raise self._timeline.cannot
        if all(isinstance(step.item, StampItem) for step in capture.steps):
            raise CannotCapture("it queued nothing on the stream that is captured")
        return SimulatedGraph(capture.steps, tuple(capture.windows))

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        return cast(SimulatedGraph, graph).windows

    def replay(self, graph: Graph, stream: Stream) -> None:
        self._timeline.forbid_capture("it replays a graph")
        own = own_stream(stream)
        self._timeline.host += _REPLAY
        for step in cast(SimulatedGraph, graph).steps:
            self._timeline.run_step(own, step)


def own_stream(stream: Stream) -> SimulatedStream:
    """A stream as the one of this device that it is."""
    assert isinstance(stream, SimulatedStream)
    return stream
