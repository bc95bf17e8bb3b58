"""Launches besides the samples: the search for the stream on which foreign code works, and the
untimed passes for page faults, migrations, what a launch ran, and work that the samples miss.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Launch, NotCounted, Stream, Undelivered
from pytest_gpumem.judging.what_ran import merged_record
from pytest_gpumem.measuring.harness import HOLD_TIMEOUT, holding
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.managed import ManagedBuffer
from pytest_gpumem.records.measurement import NOTHING_RAN
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.what_ran import WhatRan, what_ran
from pytest_gpumem.units import format_bytes

LOOKS = 2  # at each stream: short work that is seen only once is of another origin
LONG = 0.025  # seconds of work that does not notice delays of microseconds by other streams
# Shares of the whole time for which a stream must be busy with long work:
LONG_SHARE = 0.1
ALONE = 0.99  # if it is launched once: nothing of it runs on other streams
FILLED = 0.9  # if it is timed without a look at other streams
BESIDE = 20e-6  # seconds beyond the cost of waiting for which the device may be busy afterwards
BESIDE_SHARE = 1e-3  # the same as a share of long work, after which a wait takes longer
NEAR = 5  # looks at each default stream that tell which of them the work is on
JOINED = 0.1e-6  # seconds that work takes longer on the other default stream: 0.4 us on an H100
QUEUED_IN, QUEUED_FACTOR = 0.1, 10
"""To queue work takes at most 0.1 s and ten times its whole time, or it waits for the device."""
PASSES = 3  # until two that follow each other are equal; the first may still set something up
WATCHED_ONCE = 0.1  # seconds of a launch that is not repeated to see that it runs the same
OUTSIDE = 0.01  # share of the latency up to which work outside of the interval does not matter
TRIES = 4  # passes until counts that CUPTI does not deliver are given up
PROFILED = "a profiler is attached, and CUPTI serves one tool at a time"


class Elsewhere(Exception):
    """The work cannot be timed on one stream; the message is the reason."""


class NoWork(Elsewhere):
    """The device did nothing: the time by the host's clock may be the host's alone."""


class TimingSite(NamedTuple):
    """The place where work can be timed."""

    stream: Stream
    name: str | None  # of a default stream; None for the current stream of the launch
    seconds: float  # from a launch until the device is idle
    sample: float | None = None  # seconds of a launch of long work that is alone on the stream


def find_stream(target: Target, floor: float, first: float = 0.0) -> TimingSite:
    """Find the stream on which the work can be timed, as a library need not follow the current one.

    `floor`: seconds of an empty interval. `first`: of the first launch, with what it compiled.
    Raises `HoldExpired`, `Elsewhere`, `NoWork`.
    """
    device, current, watch = target.device, target.stream, _LaunchWatch(target, floor, first)
    defaults = device.streams.defaults()
    if first > LONG:
        begun = device.now()
        sample = watch.interval(current, current)
        if sample > max(LONG, ALONE * (device.now() - begun)):
            return TimingSite(current, None, sample, sample)
    whole = watch.measure_whole()
    if whole > LONG and watch.interval(current, current) > FILLED * whole:
        busy = [current]  # work beside it that ends sooner costs nothing
    else:
        busy = watch.busy_streams(current, (current, *defaults))
    if defaults and current in busy and defaults[0] in busy:
        # With the default stream as the current stream, all of the work runs there. A library sets
        # up its state for a stream at its first work there, which may wait: not behind a hold.
        watch.idle_after(defaults[0], work=True)
        busy = watch.busy_streams(defaults[0], (defaults[0], current))
    elif defaults and defaults[0] in busy:
        # The two default streams wait for each other: work on either is seen on both.
        busy = [watch.nearer(*defaults) if defaults[1] in busy else defaults[0]]
    if not busy:
        if watch.goes_on(current):
            raise Elsewhere("its work runs on streams of its own")
        raise NoWork("no work was seen on the timed stream, on a default one or on the device")
    if len(busy) > 1:
        raise Elsewhere("its work is spread over several streams")
    if watch.goes_on(busy[0]):
        raise Elsewhere("some of its work goes on beside the timed stream")
    name = None
    if defaults and busy[0] is defaults[0]:
        name = "the legacy default stream"
    elif defaults and busy[0] is defaults[1]:
        name = "this thread's default stream"
    return TimingSite(busy[0], name, whole)


class _LaunchWatch:
    def __init__(self, target: Target, floor: float, whole: float) -> None:
        self._target, self._device, self._floor = target, target.device, floor
        self._whole = whole  # seconds until the device is idle after a launch
        self._beside = 0.0  # of them those after the target's stream is

    def measure_whole(self) -> float:
        current = self._target.stream
        self._whole, self._beside = self.idle_after(current, work=True)
        if self._whole <= LONG:
            for _ in range(LOOKS - 1):
                self._whole = min(self._whole, self.idle_after(current, work=True)[0])
        return self._whole

    def busy_streams(self, current: Stream, streams: tuple[Stream, ...]) -> list[Stream]:
        """Return the streams that are busy each time."""
        least, looks = NOTHING_RAN * self._floor, LOOKS
        if self._whole > LONG:
            least, looks = max(least, LONG_SHARE * self._whole), 1
        busy = []
        for stream in streams:
            if all(self.interval(current, stream) > least for _ in range(looks)):
                busy.append(stream)
        return busy

    def nearer(self, legacy: Stream, thread: Stream) -> Stream:
        """Return the default stream that the work is on; with long work it does not matter."""
        if self._whole > LONG:
            return legacy
        current, medians = self._target.stream, []
        for stream in (legacy, thread):
            seconds = [self.interval(current, stream) for _ in range(NEAR)]
            medians.append(statistics.median(seconds))
        return thread if medians[1] + JOINED < medians[0] else legacy

    def goes_on(self, stream: Stream) -> bool:
        """True if the device is busy for longer than `stream`, each time."""
        allowed, looks = BESIDE, range(LOOKS + 1)
        if self._whole > LONG:
            allowed = max(BESIDE, BESIDE_SHARE * self._whole)
        limit = allowed + min(self.idle_after(stream, work=False)[1] for _ in looks)
        if stream is self._target.stream and self._whole > LONG and self._beside <= limit:
            return False
        return all(self.idle_after(stream, work=True)[1] > limit for _ in looks)

    def idle_after(self, current: Stream, *, work: bool) -> tuple[float, float]:
        """Return the seconds until the device is idle, and those after `current` is."""
        device = self._device
        self._target.put_back(current)
        device.streams.synchronize()
        begun = device.now()
        if work:
            self._target.launch(0, current)
        device.streams.synchronize(current)
        done = device.now()
        device.streams.synchronize()
        return device.now() - begun, device.now() - done

    def interval(self, current: Stream, watched: Stream) -> float:
        """Return the seconds for which `watched` is busy, behind a hold while the work is queued.

        The hold ends when work on other streams has ended, which would delay the second event.
        """
        device, streams = self._device, self._device.streams
        start, end = streams.event(), streams.event()
        self._target.put_back(current)
        streams.synchronize()
        with holding(device, watched, min(HOLD_TIMEOUT, QUEUED_IN + QUEUED_FACTOR * self._whole)):
            streams.record(start, watched)
            self._target.launch(0, current)
            streams.record(end, watched)
            over = device.now()
            if self._whole <= LONG:
                over += 2 * self._whole
            while device.now() < over:
                pass
        streams.synchronize()
        return streams.elapsed(start, end)


def find_outside(target: Target, idle: Launch) -> float:
    """Return the seconds of a launch's work that do not run between two idle launches around it,
    such as on another stream. Parts that run at once count twice.
    Raises `NotCounted`, `HoldExpired`.
    """
    device, stream = target.device, target.stream

    def queue() -> None:
        with holding(device, stream):
            device.kernels.launch(idle, stream)
            target.launch(0, stream)
            device.kernels.launch(idle, stream)
        device.streams.synchronize()

    for _ in range(PASSES):  # the first records of a process may be lost
        target.put_back(target.stream, wait=True)
        with uncollected():
            spans = device.counters.spans(queue)
        name, blocks = idle.kernel.entry.partition("<")[0], idle.shape.blocks
        idle_spans = [span for span in spans if span.grid == blocks and name in span.name]
        if len(idle_spans) >= 2:
            break
    else:
        raise Undelivered("CUPTI did not deliver all kernels")
    first = min(idle_spans, key=lambda span: span.start)
    last = max(idle_spans, key=lambda span: span.end)
    seconds = 0.0
    for span in spans:
        if span not in (first, last):
            before = max(0.0, min(span.end, first.start) - span.start)
            after = max(0.0, span.end - max(span.start, last.end))
            seconds += before + after
    return seconds


def find_what_ran(
    target: Target, managed: Iterable[Buffer], latency: float, *, profiled: bool
) -> WhatRan:
    """Return what a launch runs, or why that is unknown. Two launches of code of the user have to
    run the same: else the digest of either would say nothing of the others.
    """
    if profiled:
        return WhatRan(not_watched=PROFILED)
    device, once = target.device, latency >= WATCHED_ONCE or not target.foreign
    before: WhatRan | None = None
    why = f"no two of {PASSES} launches ran the same"
    for _ in range(PASSES):
        target.put_back(target.stream, wait=True)
        work = partial(target.launch, 0, target.stream)
        try:
            with uncollected():  # objects that are freed at any time call the runtime
                seen = device.counters.what_ran(work, device.streams.synchronize)
        except Undelivered as reason:
            why = str(reason)
            continue
        except NotCounted as reason:
            return WhatRan(not_watched=str(reason))
        merged: WhatRan | None = None
        if once or seen.not_watched is not None:
            merged = seen
        elif before is not None:
            merged = merged_record([before, seen])
        if merged is not None:
            state = _state(target, managed)
            return what_ran(merged.launch, state, not_watched=merged.not_watched)
        before = seen
    return replace(before or WhatRan(), not_watched=why)


def _state(target: Target, managed: Iterable[Buffer]) -> dict[str, str]:
    """As `WhatRan.state`."""
    state = {f"argument {name}": kind for name, kind in target.host_memory}
    if target.device.facts.persists:
        state["set-aside of L2"] = format_bytes(target.device.l2.set_aside())
    for number, buffer in enumerate(managed, 1):
        text = f"{format_bytes(buffer.nbytes)}, {buffer.home}"
        if isinstance(buffer, ManagedBuffer) and buffer.advice.words:
            text += f", {', '.join(buffer.advice.words.values())}"
        state[f"managed buffer {number}"] = text
    return state


def count_migrations(target: Target, *, profiled: bool) -> Migrations:
    """Count page faults and migrations of a launch, or return the reason why it cannot."""
    if profiled:
        return Migrations(not_counted=f"{PROFILED}; it shows the faults itself")
    device, why = target.device, ""

    def launch() -> None:
        target.launch(0, target.stream)
        device.streams.synchronize()

    source = "the model" if device.facts.simulated else "CUPTI"
    for _ in range(TRIES):
        try:
            before = device.counters.pages(partial(target.put_back, target.stream, wait=True))
            return Migrations(before=before, launch=device.counters.pages(launch), source=source)
        except Undelivered as reason:
            why = f"{reason} (tried {TRIES} times)"
        except NotCounted as reason:
            return Migrations(not_counted=str(reason))
    return Migrations(not_counted=why)
