"""The simulated device's streams, events and captured graphs, on virtual time.

Results, L2 and pages follow the order of the calls. Streams are in order, and so are the engines
for kernels and for copies each way. What is behind a hold is scheduled when that ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.devices import protocol
from pytest_gpumem.devices.protocol import (
    Allocation,
    CannotCapture,
    DeviceError,
    Span,
    Stream,
    WindowSpec,
)
from pytest_gpumem.devices.simulated.roofline import Roofline
from pytest_gpumem.records.what_ran import Step

COMPUTE, HOST_TO_DEVICE, DEVICE_TO_HOST = "compute", "host to device", "device to host"

# Virtual seconds that a call takes on the host, from Python.
CALL = 0.2e-6
LAUNCH = 4.5e-6
_SYNCHRONIZE = 4e-6
ALLOCATE = 60e-6
_SUBMIT = 2e-6  # from the end of a call to the start of its work on an idle device


@dataclass(eq=False)
class SimulatedStream:
    handle: int
    ready: float = 0.0  # virtual time at which the last scheduled item ends
    blocked: bool = False  # something waits behind a hold


@dataclass(eq=False)
class SimulatedEvent:
    time: float | None = None  # virtual time; None before a record, or while it waits behind a hold


@dataclass(eq=False)
class Operation:
    """A kernel, a copy or a fill."""

    engine: str
    seconds: Callable[[], float]  # is called each time that the work is queued
    effect: Callable[[], object] | None = None  # on the content of memory
    ran: Step | None = None  # its entry in the record of a launch, without the stream


@dataclass(eq=False)
class Wait:
    event: SimulatedEvent  # recorded in another stream, or by the host as it releases a hold
    timeout: float = math.inf  # of a hold


Item = Operation | SimulatedEvent | Wait


@dataclass(eq=False)
class SimulatedGraph:
    """Captured items; also a capture that is under way."""

    stream: SimulatedStream
    window: WindowSpec | None  # of every kernel; None: each its own
    items: list[Item] = field(default_factory=list)
    windows: list[WindowSpec | None] = field(default_factory=list)  # of each of its kernels


class Timeline:
    """The host's virtual clock, what is queued, and the capture that is under way."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.sheet = roofline.sheet
        self.host = 0.0  # seconds on the host's clock
        self.latest = 0.0  # end of the last scheduled item of all streams
        self.handles = itertools.count(1)  # of streams; 0 names the default stream
        self.expired: set[SimulatedStream] = set()  # streams with a hold that timed out
        self.windows: dict[Any, WindowSpec | None] = {}  # by stream
        self.capturing: SimulatedGraph | None = None
        self.cannot: CannotCapture | None = None  # why the present or last capture is impossible
        self.steps: list[Step] | None = None  # while a launch is watched
        self.spans: list[Span] | None = None  # while kernels and copies are timed
        self._free = {COMPUTE: 0.0, HOST_TO_DEVICE: 0.0, DEVICE_TO_HOST: 0.0}
        self._waiting: list[tuple[SimulatedStream, Item, float, float]] = []
        """What holds stop, in the order of the calls, with the time of issue and its seconds."""

    def call(self, seconds: float = CALL, uncaptured: str | None = None) -> None:
        """Take time on the host. `uncaptured`: why the call cannot be captured."""
        if uncaptured is not None:
            self.forbid_capture(uncaptured)
        self.host += seconds

    def watch(self, step: Step, stream: SimulatedStream | None) -> None:
        if self.steps is not None:
            self.steps.append(replace(step, stream=stream and stream.handle))

    def queue(self, stream: Any, item: Item, cost: float) -> None:
        """Queue an item now, or at every replay of the graph that is being captured."""
        if self.capturing is None:
            self.host += cost
            self.submit(stream, item)
            return
        if stream is not self.capturing.stream:
            self.forbid_capture("it uses another stream")
        self.capturing.items.append(item)

    def submit(self, stream: SimulatedStream, item: Item) -> None:
        """Do an item now; while a launch is watched, only record it."""
        if self.steps is not None:
            if isinstance(item, Operation) and item.ran is not None:
                self.watch(item.ran, stream)
            return
        seconds = 0.0
        if isinstance(item, Operation):
            if item.effect is not None:
                item.effect()
            seconds = item.seconds()
        elif isinstance(item, SimulatedEvent):
            item.time = None
        self._schedule(stream, item, self.host, seconds)

    def run(self) -> None:
        """Schedule what waits, as far as no hold stops it."""
        waiting, self._waiting = self._waiting, []
        for stream, *_ in waiting:
            stream.blocked = False
        for entry in waiting:
            self._schedule(*entry)

    def _schedule(self, stream: SimulatedStream, item: Item, issued: float, seconds: float) -> None:
        """Schedule an item behind those of its stream, or have it wait behind a hold."""
        time = max(stream.ready, issued + _SUBMIT)
        waits = isinstance(item, Wait) and item.event.time is None
        if stream.blocked or waits:
            stream.blocked = True
            self._waiting.append((stream, item, issued, seconds))
            return
        if isinstance(item, Operation):
            start = max(time, self._free[item.engine])
            time = start + seconds
            ran = item.ran
            if self.spans is not None and ran is not None and ran.kind != "memset":
                blocks = math.prod(ran.grid or (0,))
                self.spans.append(Span(ran.name, blocks, start, time, stream.handle))
            self._free[item.engine] = time
        elif isinstance(item, SimulatedEvent):
            time += self.sheet.record
            item.time = round(time / self.sheet.tick) * self.sheet.tick
        else:
            event = item.event.time or 0.0
            if event > time + item.timeout:
                self.expired.add(stream)
            time = max(time, min(event, time + item.timeout))
        stream.ready = time
        self.latest = max(self.latest, time)

    def wait(self, stream: SimulatedStream | None) -> None:
        """Wait for a stream, or for all; holds that stop it run into their time-outs."""
        while self._waiting if stream is None else stream.blocked:
            for _, item, *_ in self._waiting:
                if isinstance(item, Wait) and item.timeout < math.inf:
                    item.event.time = math.inf  # nobody will release it
                    break
            self.run()
        end = self.latest if stream is None else stream.ready
        self.host = max(self.host, end) + _SYNCHRONIZE

    def forbid_capture(self, reason: str) -> None:
        """Refuse what cannot be captured, and remember it: user code may catch the error."""
        if self.capturing is not None:
            self.cannot = self.cannot or CannotCapture(reason)
            raise self.cannot


class Facet:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._roofline = timeline, timeline.roofline

    def _touched_by_host(self, allocation: Allocation) -> None:
        """Wait, also for managed pages to come to the host."""
        self._timeline.wait(None)
        self._timeline.call(self._roofline.host_access(allocation))


class SimulatedStreams(Facet, protocol.Streams):
    def create(self) -> Stream:
        self._timeline.call()
        return SimulatedStream(next(self._timeline.handles))

    def visible(self) -> tuple[Stream, ...]:
        return tuple(self._timeline.windows)

    def event(self) -> protocol.Event:
        self._timeline.call()
        return SimulatedEvent()

    def record(self, event: Any, stream: Any) -> None:
        self._timeline.queue(stream, event, CALL)

    def elapsed(self, start: Any, end: Any) -> float:
        for event in (start, end):
            if event.time is None or event.time > self._timeline.host:
                raise DeviceError("an event was not recorded, or has not completed")
        return float(end.time - start.time)

    def synchronize(self, stream: Any = None) -> None:
        timeline = self._timeline
        timeline.forbid_capture("it synchronises")
        kind = "device" if stream is None else "stream"
        timeline.watch(Step("synchronisation", kind), stream)
        timeline.wait(stream)
        expired = timeline.expired if stream is None else timeline.expired & {stream}
        if expired:
            timeline.expired = timeline.expired - expired
            raise protocol.HoldExpired

    def join(self, stream: Any, other: Any) -> None:
        if stream is other:
            return
        self._timeline.forbid_capture("it uses another stream")
        event = SimulatedEvent()
        self._timeline.queue(other, event, CALL)
        self._timeline.queue(stream, Wait(event), CALL)

    def hold(self, stream: Any, timeout: float) -> protocol.Hold:
        self._timeline.forbid_capture("it holds the stream")
        hold = Wait(SimulatedEvent(), timeout)
        self._timeline.queue(stream, hold, LAUNCH)
        return hold

    def release(self, hold: Any) -> None:
        timeline = self._timeline
        timeline.call()
        if hold.event.time is None:
            hold.event.time = timeline.host
            timeline.run()

    def clock(self, hold: Any) -> float | None:
        return self._timeline.sheet.sm_clock

    def capture(
        self, stream: Any, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> protocol.Graph:
        timeline = self._timeline
        if timeline.capturing is not None:
            raise CannotCapture("another capture is under way")
        graph = timeline.capturing = SimulatedGraph(stream, window)
        timeline.cannot = None
        try:
            body()
        except Exception as error:
            # A function may dress the refusal up in another error.
            timeline.cannot = timeline.cannot or CannotCapture.by(error)
        finally:
            timeline.capturing = None
        if timeline.cannot is not None:
            raise timeline.cannot
        if not any(isinstance(item, Operation) for item in graph.items):
            raise CannotCapture("it queued nothing on the stream that is captured")
        return graph

    def windows(self, graph: Any) -> tuple[WindowSpec | None, ...]:
        return tuple(graph.windows)

    def replay(self, graph: Any, stream: Any) -> None:
        self._timeline.call(LAUNCH, "it replays a graph")
        for item in graph.items:
            self._timeline.submit(stream, item)
