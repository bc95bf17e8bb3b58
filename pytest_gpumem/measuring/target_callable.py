"""Any function as a target: it launches on the current stream, and moves only the buffers among its arguments.

A library need not follow the current stream: Numba has none, an extension may launch on the default one, a framework may keep streams of
its own. Timing the wrong stream gives a wrong number without any error, so the stream is found by watching the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Device, Graph, Stream
from pytest_gpumem.judging.traffic import beyond_arguments
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.samplers import HOLD_TIMEOUT, held
from pytest_gpumem.measuring.target import Target, captured, padding, refuse_window, window_notes
from pytest_gpumem.measuring.target_case import (
    Case,
    by_buffers,
    check_launch,
    footprint_of,
    foreign_of,
    notes_of,
    traffic_of,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.records.measurement import NOTHING_RAN

NAMED = "{}="  # how the user wrote a declared field


def callable_target(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    arena: Arena,
    stream: Stream,
    window: PersistingStream | None = None,
    declared: Mapping[str, Any] = MappingProxyType({}),
    *,
    on_simulated: bool = False,
) -> Target:
    """Describe a call of a function.
    `function`: launches work on the current stream.
    `window`: the persisting stream, if `stream` is one.
    `declared`: fields of a `Case` that the user gave for one call: `moved`, `reads`, `writes`, `check`, `reference`.
    `on_simulated`: as `Foreign.on_simulated`.
    Raises `BadCall`: a declared field is wrong; the window cannot be on launches that the function makes itself, or the function has no
    kernel that could carry it.
    Raises `CannotCapture`: the window is to lie on a graph's kernels, and the function cannot be captured.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if window is not None and window.where == "launch":
        raise BadCall(
            f'where="launch" is for kernels of gpu_kernels: {name} makes its launches itself; "stream" and "graph" reach them'
        )
    values = (*arguments, *keywords.values())
    movable = tuple(
        b for b in dict.fromkeys(v for v in values if isinstance(v, Buffer)) if arena.can_move(b)
    )
    case = by_buffers(Case(lambda: function(*arguments, **keywords), **declared), arena, NAMED)
    calls = _Calls(name, case, on_simulated, movable, arena, stream, window)
    notes = (
        []
        if movable
        else ["one placement: the callable's arrays are its own; a Case is built anew for each"]
    )
    if case.moved is not None and (note := beyond_arguments(int(case.moved), _nbytes(values))):
        notes.append(note)
    calls.target = Target(
        name=name,
        kind="callable",
        stream=stream,
        launch=calls.launch,
        moved_bytes=traffic_of(case),
        footprint=footprint_of(case),
        # The callable may touch any managed buffer of the test, through closures or arrays of other libraries.
        managed=arena.homes,
        window=window,
        notes=(
            *notes,
            *notes_of(case, arena),
            *window_notes(arena.device, window),
            *managed_notes(arena.device.facts, arena.managed),
        ),
        check=None if case.check is None else calls.check,
        move=calls.move if movable else None,
        run_on=calls.run_on,
    )
    return calls.target


class _Calls:
    """The calls of a function, as they are or as a graph."""

    def __init__(
        self,
        name: str,
        case: Case,
        on_simulated: bool,
        movable: tuple[Buffer, ...],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None,
    ) -> None:
        self._name, self._case, self._on_simulated = name, case, on_simulated
        self._movable, self._arena, self._window = movable, arena, window
        self._reads, self._writes = (
            [b for b in map(arena.find, arrays) if b is not None]
            for arrays in (case.reads, case.writes)
        )
        self._graph: Graph | None = None
        self.target: Target
        if window is not None and window.where == "graph":
            # What a library sets up at its first call cannot be captured.
            self._call(stream)
            arena.device.streams.synchronize()
            self._capture()

    def _capture(self) -> None:
        """Capture one call, for where its buffers now are, if the window is on a graph's kernels."""
        if self._window is not None and self._window.where == "graph":
            body = partial(self._call, self._window.stream)
            self._graph = captured(self._name, self._arena.device, self._window, body)

    def launch(self, place: int, stream: Stream) -> None:
        if self._graph is not None:
            self._arena.device.graphs.replay(self._graph, stream)
        else:
            self._call(stream)

    def _call(self, stream: Stream) -> None:
        case = self._case
        foreign = foreign_of(
            case.launch, case.reference, self._reads, self._writes, on_simulated=self._on_simulated
        )
        self._arena.device.kernels.call(foreign, stream)

    def check(self) -> None:
        check_launch(self._arena.device, self.target, self._case, self._reads, self._writes, NAMED)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        self._arena.pad(padding(random))
        try:
            for buffer in self._movable:
                buffer.move()
        finally:
            self._capture()
        return self.target

    def run_on(self, stream: Stream) -> Target:
        refuse_window(self._name, self._window)
        self.target = replace(self.target, stream=stream)
        return self.target


def _nbytes(arguments: Iterable[Any]) -> int:
    """Bytes of the distinct buffers and arrays among arguments, also in their lists and tuples."""
    found: dict[int, int] = {}

    def look(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                look(value)
            elif isinstance(nbytes := getattr(value, "nbytes", None), int):
                found[id(value)] = nbytes

    look(arguments)
    return sum(found.values())


LOOKS = 2
"""Times that each stream is watched: work that is seen only once is of another origin. Long work is watched once, because it runs each
time."""
LONG = 0.025  # seconds of work from which delays by other streams, of microseconds, do not matter
LONG_SHARE = 0.1  # share of the whole time for which a stream must be busy with long work
ALONE = 0.99  # the same for work of which one launch is enough: nothing of it runs elsewhere for longer than a hundredth of the time
FILLED = 0.9  # share of the whole time for which a stream is busy with long work that is timed there without a look at other streams
BESIDE = 20e-6
"""Seconds for which the device may be busy after the timed stream is done, beyond the cost of asking; above, something runs beside it."""
BESIDE_SHARE = 1e-3
"""The same as a share of long work: on an H200, to ask after half a second of work takes longer than to ask an idle device."""

NEAR = 5  # looks at each default stream that tell which of them the work is on
JOINED = 0.1e-6  # seconds by which work takes longer on the other one, at least: 0.4 us on an H100

QUEUED_IN = 0.1
QUEUED_FACTOR = 10
"""To queue work takes at most this many seconds, and this many times the work's whole time: what takes longer waits for the device."""

_DEFAULTS = ("the legacy default stream", "this thread's default stream")


class Elsewhere(Exception):
    """The work cannot be timed on one stream; the message is the reason."""


class NoWork(Elsewhere):
    """The device did nothing: the time by the host's clock may be the host's alone."""


Queues = Callable[
    [Stream], object
]  # a function that queues work with the given stream as the current one of every library


@dataclass(frozen=True)
class TimingSite:
    """The places where work can be timed."""

    stream: Stream
    name: str | None  # of the stream; None for the current stream of the launch
    seconds: float  # from a launch until the device is idle
    sample: float | None = None
    """Of long work that is alone on the current stream: the seconds of the launch that showed
    it."""


def find_stream(
    device: Device, prepare: Queues, launch: Queues, own: Stream, floor: float, first: float = 0.0
) -> TimingSite:
    """The stream on which the work can be timed.

    The search launches short work some seven times, and holds and times each stream that the work may go to. Long work is launched twice;
    once, if it is alone on the current stream.
    `prepare`: restores the work's inputs.
    `launch`: queues the work once; it ran before, so that nothing is compiled now.
    `own`: the current stream of the launch.
    `floor`: seconds of an empty interval.
    `first`: seconds of the first launch, with what it compiled.
    Raises `HoldExpired`: the work waits for the device.
    Raises `Elsewhere`: it runs on streams of its own; `NoWork` if it runs nowhere.
    """
    defaults = device.streams.defaults()
    watch = _LaunchWatch(device, prepare, launch, floor)
    if first > LONG and (sample := watch.alone(own, first)) is not None:
        return TimingSite(own, None, sample, sample)
    busy = [own] if watch.fills(own) else [s for s in (own, *defaults) if watch.busy(own, s)]
    if defaults and own in busy and defaults[0] in busy:
        # Some of it follows the current stream and some does not: with the default stream as the current one, all of it runs there.
        watch.first_on(defaults[0])
        busy = [s for s in (defaults[0], own) if watch.busy(defaults[0], s)]
    elif defaults and defaults[0] in busy:
        # The two default streams wait for each other: work on one of them is seen on both, and takes longer on the other one.
        busy = [watch.nearer(own, *defaults) if defaults[1] in busy else defaults[0]]
    if not busy:
        if watch.goes_on(own):
            raise Elsewhere("its work runs on streams of its own")
        raise NoWork("no work was seen on the timed stream, on a default one or on the device")
    if len(busy) > 1:
        raise Elsewhere("its work is spread over several streams")
    found = busy[0]
    if watch.goes_on(found):
        raise Elsewhere("some of its work goes on beside the timed stream")
    names = dict(zip(map(id, defaults), _DEFAULTS, strict=False))
    return TimingSite(found, names.get(id(found)), watch.whole(own))


class _LaunchWatch:
    """Launches the work and watches the device."""

    def __init__(self, device: Device, prepare: Queues, launch: Queues, floor: float) -> None:
        self._device = device
        self._prepare = prepare
        self._launch = launch
        self._floor = floor
        self._whole: float | None = None
        # seconds for which the device was busy after the stream `_first` at the first look
        self._beside = 0.0
        self._first: Stream | None = None

    def alone(self, own: Stream, first: float) -> float | None:
        """Seconds of one launch, if it is long and `own`, as the current stream, is busy with it for the whole time; else None."""
        begun = self._device.now()
        interval = self._interval(own, own, first)
        whole = self._device.now() - begun
        return interval if interval > max(LONG, ALONE * whole) else None

    def fills(self, own: Stream) -> bool:
        """True if `own`, as the current stream, is busy with long work for nearly the whole time. Work beside it that ends sooner costs
        nothing."""
        whole = self.whole(own)
        return whole > LONG and self._interval(own, own, whole) > FILLED * whole

    def busy(self, current: Stream, watched: Stream) -> bool:
        """True if `watched` is busy each time, with `current` as the current stream."""
        whole = self.whole(current)
        least = max(NOTHING_RAN * self._floor, LONG_SHARE * whole if whole > LONG else 0.0)
        looks = 1 if whole > LONG else LOOKS
        return all(self._interval(current, watched, whole) > least for _ in range(looks))

    def nearer(self, current: Stream, legacy: Stream, thread: Stream) -> Stream:
        """Which of the default streams the work is on, if both are busy with it. With long work it does not matter."""
        whole = self.whole(current)
        if whole > LONG:
            return legacy
        on_legacy, on_thread = (
            statistics.median(self._interval(current, one, whole) for _ in range(NEAR))
            for one in (legacy, thread)
        )
        return thread if on_thread + JOINED < on_legacy else legacy

    def first_on(self, current: Stream) -> None:
        """Launch once without a hold: a library sets up its state for a stream, such as a workspace, at its first work there."""
        self._idle_after(current, True)

    def whole(self, current: Stream) -> float:
        """Seconds until the device is idle after one launch; the first call, which gives the current stream, decides."""
        if self._whole is None:
            self._first = current
            self._whole, self._beside = self._idle_after(current, True)
            if self._whole <= LONG:
                self._whole = min(
                    self._whole, *(self._idle_after(current, True)[0] for _ in range(LOOKS - 1))
                )
        return self._whole

    def _idle_after(self, current: Stream, work: bool) -> tuple[float, float]:
        """Seconds from a launch until the device is idle, and those of them after `current` is done with it."""
        device = self._device
        self._prepare(current)
        device.streams.synchronize()
        begun = device.now()
        if work:
            self._launch(current)
        device.streams.synchronize(current)
        done = device.now()
        device.streams.synchronize()
        return device.now() - begun, device.now() - done

    def _interval(self, current: Stream, watched: Stream, whole: float) -> float:
        """Seconds for which `watched` is busy, held while the work is queued. The hold ends when work on other streams has ended: a kernel
        that ends between two events on an idle stream delays the second event by some microseconds."""
        device = self._device
        start, end = device.streams.event(), device.streams.event()
        self._prepare(current)
        device.streams.synchronize()
        with held(device, watched, min(HOLD_TIMEOUT, QUEUED_IN + QUEUED_FACTOR * whole)):
            device.streams.record(start, watched)
            self._launch(current)
            device.streams.record(end, watched)
            over = device.now() + (2 * whole if whole <= LONG else 0.0)
            while device.now() < over:
                pass
        device.streams.synchronize()
        return device.streams.elapsed(start, end)

    def goes_on(self, stream: Stream) -> bool:
        """True if the device is busy for longer than `stream`, each time. Work beside it that ends sooner stays unnoticed."""
        whole = self._whole or 0.0
        allowed = max(BESIDE, BESIDE_SHARE * whole if whole > LONG else 0.0)
        limit = min(self._idle_after(stream, False)[1] for _ in range(LOOKS + 1)) + allowed
        if stream is self._first and whole > LONG and self._beside <= limit:
            return False
        return all(self._idle_after(stream, True)[1] > limit for _ in range(LOOKS + 1))
