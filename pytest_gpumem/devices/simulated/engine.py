"""The clock: in-order streams on virtual time, one compute engine and two copy engines, as a discrete-event simulation.

Kernels run side by side if their threads fit the device together.

Work is queued with the host's time of issue and runs when the host waits for it. Each step takes, of all streams' first items, the one
that can start earliest, of several the one that has waited longest: so streams share the engines as they would on a GPU, whatever the
order of the calls.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

COMPUTE = "compute"
HOST_TO_DEVICE = "host to device"
DEVICE_TO_HOST = "device to host"
ENGINES = (COMPUTE, HOST_TO_DEVICE, DEVICE_TO_HOST)


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream: the time at which it was last recorded."""

    time: float | None = None  # seconds of virtual time; None before the first record was reached
    pending: int = 0  # records that are queued and not reached yet


@dataclass(eq=False)
class WorkItem:
    """An item that occupies an engine for as long as `duration(start)` says when it starts."""

    engine: str
    duration: Callable[[float], float]
    share: float = 1.0  # of the engine: work that takes less leaves the rest to other streams


@dataclass(eq=False)
class StampItem:
    """An item that stamps an event."""

    event: SimulatedEvent


@dataclass(eq=False)
class HoldItem:
    """An item that keeps its stream waiting until it is released or its time is over."""

    timeout: float
    released: float | None = None  # virtual time of the release; None while it waits
    expired: bool = False


@dataclass(eq=False)
class Mark:
    """An item that stamps a point which other streams wait for."""

    stream: SimulatedStream
    time: float | None = None  # virtual time at which all before it was done; None until then


@dataclass(eq=False)
class WaitItem:
    """An item that waits for a mark on another stream."""

    mark: Mark


Item = WorkItem | StampItem | HoldItem | Mark | WaitItem


@dataclass(eq=False)
class SimulatedStream:
    """An in-order queue of items."""

    handle: int
    ready: float = 0.0  # virtual time at which the last finished item ended
    queue: deque[tuple[float, Item]] = field(
        default_factory=deque
    )  # items that wait, each with the host's time of issue
    after_work: bool = False  # the last item was work: a record behind it also waits for the work's writes to be visible
    expired: bool = False  # a hold timed out since the last synchronisation


class Engine:
    """Advances the streams. Times are virtual seconds.
    `submit`: from a host call's end to the start of its work on an idle device.
    `record`: between two records with nothing between.
    `visibility`: added to a record behind work, which waits for the work's writes.
    `tick`: resolution of an event.
    """

    def __init__(self, *, submit: float, record: float, visibility: float, tick: float) -> None:
        self._submit = submit
        self._record = record
        self._visibility = visibility
        self._tick = tick
        self._running: dict[str, list[tuple[float, float]]] = {engine: [] for engine in ENGINES}
        """End and share of the work on each engine that had not ended when the last one started."""
        self._last = dict.fromkeys(ENGINES, 0.0)  # start of that last work: none starts before it
        self.streams: list[SimulatedStream] = []
        self.latest = 0.0  # end of the last finished item of all streams
        self.busy: list[SimulatedStream] = []
        """Streams whose queue is not empty, in the order of `streams`: most that a long run has made have nothing to do."""

    def stream(self) -> SimulatedStream:
        """A new stream; handles count from 1, as 0 names the default stream."""
        stream = SimulatedStream(handle=len(self.streams) + 1)
        self.streams.append(stream)
        return stream

    def queue(self, stream: SimulatedStream, item: Item, issued: float) -> None:
        if isinstance(item, StampItem):
            item.event.pending += 1
        if not stream.queue:
            insort(self.busy, stream, key=lambda busy: busy.handle)
        stream.queue.append((issued, item))

    def clear(self) -> None:
        """Forget everything that waits."""
        for stream in self.busy:
            stream.queue.clear()
        self.busy.clear()

    def run(self) -> None:
        """Run everything that no hold stops."""
        while self.busy:
            best: SimulatedStream | None = None
            earliest = waiting_since = 0.0
            for stream in self.busy:
                start = self._start(stream)
                # An engine takes what has waited longest: otherwise the first streams would keep the last one from it.
                since = max(stream.ready, stream.queue[0][0])
                if start is not None and (
                    best is None or (start, since) < (earliest, waiting_since)
                ):
                    best, earliest, waiting_since = stream, start, since
            if best is None:
                return
            alone = len(self.busy) == 1
            self._step(best, earliest)
            if alone:
                # Alone: no choice to make until the queue is empty or held.
                while best.queue:
                    start = self._start(best)
                    if start is None:
                        return
                    self._step(best, start)

    def holding(self, stream: SimulatedStream) -> tuple[SimulatedStream, HoldItem] | None:
        """The hold that stops a stream after `run`, with its stream: itself, or one that it waits for. None if it is drained."""
        while stream.queue:
            item = stream.queue[0][1]
            if isinstance(item, HoldItem):
                return stream, item
            assert isinstance(item, WaitItem), "nothing else stops a stream"
            stream = item.mark.stream
        return None

    def release(self, stream: SimulatedStream, hold: HoldItem, at: float) -> None:
        """Release a hold of a stream at a time; one that began to wait and is over by then has expired."""
        hold.released = at
        if stream.queue and stream.queue[0][1] is hold:
            over = max(stream.ready, stream.queue[0][0] + self._submit) + hold.timeout
            if at > over:
                hold.released, hold.expired = over, True

    def _start(self, stream: SimulatedStream) -> float | None:
        issued, item = stream.queue[0]
        start = max(stream.ready, issued + self._submit)
        if isinstance(item, HoldItem):
            return None if item.released is None else max(start, item.released)
        if isinstance(item, WaitItem):
            return None if item.mark.time is None else max(start, item.mark.time)
        if isinstance(item, WorkItem):
            return self._room(item, max(start, self._last[item.engine]))
        return start

    def _room(self, work: WorkItem, start: float) -> float:
        """The first moment from `start` on at which the engine has room for a piece of work."""
        running = [one for one in self._running[work.engine] if one[0] > start]
        if not running:  # as for most
            return start
        taken = sum([share for _, share in running])
        for end, share in sorted(running):
            if taken + work.share <= 1.0 + 1e-9:
                break
            start, taken = end, taken - share
        return start

    def _step(self, stream: SimulatedStream, start: float) -> None:
        _, item = stream.queue.popleft()
        if not stream.queue:
            self.busy.remove(stream)
        if isinstance(item, WorkItem):
            end = start + item.duration(start)
            still = [one for one in self._running[item.engine] if one[0] > start]
            self._running[item.engine], self._last[item.engine] = [*still, (end, item.share)], start
            stream.after_work = True
        elif isinstance(item, StampItem):
            end = start + self._record + (self._visibility if stream.after_work else 0.0)
            item.event.time = round(end / self._tick) * self._tick
            item.event.pending -= 1
            stream.after_work = False
        elif isinstance(item, Mark):
            end = item.time = start
        elif isinstance(item, WaitItem):
            end = start
            # A record behind it waits for the writes of what was waited for.
            stream.after_work = True
        else:
            end = start
            stream.expired = stream.expired or item.expired
            stream.after_work = False
        stream.ready = end
        self.latest = max(self.latest, end)
