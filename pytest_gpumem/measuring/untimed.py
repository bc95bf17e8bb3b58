"""Launches besides the samples: the search for the stream on which foreign code works, and the
untimed passes for page faults, migrations, and what a launch ran.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Launch, NotCounted, Stream, Undelivered
from pytest_gpumem.judging.differences import merged_record
from pytest_gpumem.measuring.harness import HOLD_TIMEOUT, holding
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.memory.managed import ManagedBuffer
from pytest_gpumem.records.what_ran import Migrations, WhatRan, what_ran
from pytest_gpumem.units import format_bytes

OUTSIDE = 0.01  # share of the timed seconds up to which work outside of them does not matter
QUEUED_IN, QUEUED_FACTOR = 0.1, 10
"""To queue work takes at most 0.1 s and ten times its whole time, or it waits for the device."""
PASSES = 3  # until two that follow each other are equal; the first may still set something up
WATCHED_ONCE = 0.1  # seconds of a launch that is not repeated to see that it runs the same
TRIES = 4  # passes until what CUPTI does not deliver is given up
PROFILED = "a profiler is attached, and CUPTI serves one tool at a time"


class WatchedLaunch(NamedTuple):
    """A launch between two idle ones on a stream. Parts that run at once count twice."""

    stream: Stream
    seconds: float  # between the idle launches
    seen: bool  # CUPTI has a record of some of its work
    outside: float  # seconds of its work on other streams, before or after
    on_stream: bool  # some of it runs on the stream itself

    @property
    def timed(self) -> bool:
        """True if events on the stream time the work."""
        return self.outside <= OUTSIDE * self.seconds


def find_stream(target: Target, idle: Launch, whole: float) -> WatchedLaunch:
    """Watch the launch of foreign code on its stream and, as a library need not follow that, on the
    default streams; return the first that times the work, or else the launch on its own stream.

    `whole`: seconds that a launch takes at most. Raises `NotCounted`, `HoldExpired`.
    """
    device, timeout = target.device, min(HOLD_TIMEOUT, QUEUED_IN + QUEUED_FACTOR * whole)
    current = _watch(target, target.stream, idle, timeout)
    if current.timed:
        return current
    best = current
    for stream in device.streams.defaults():
        # A library sets up its state for a stream at its first work there, which may wait.
        target.put_back(stream, wait=True)
        target.launch(0, stream)
        device.streams.synchronize()
        watched = _watch(target, stream, idle, timeout)
        if not watched.timed:
            break
        if watched.on_stream:
            return watched
        # The legacy default stream waits for this thread's, and for blocking streams.
        if best is current:
            best = watched
    return best


def _watch(target: Target, stream: Stream, idle: Launch, timeout: float) -> WatchedLaunch:
    device = target.device

    def queue() -> None:
        with holding(device, stream, timeout):
            device.kernels.launch(idle, stream)
            target.launch(0, stream)
            device.kernels.launch(idle, stream)
        device.streams.synchronize()

    for _ in range(TRIES):
        target.put_back(stream, wait=True)
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
    outside, on_stream = 0.0, False
    for span in spans:
        if span not in (first, last):
            before = max(0.0, min(span.end, first.start) - span.start)
            after = max(0.0, span.end - max(span.start, last.end))
            outside += before + after
            on_stream = on_stream or span.stream == first.stream
    return WatchedLaunch(stream, last.start - first.end, len(spans) > 2, outside, on_stream)


def find_what_ran(target: Target, latency: float, *, profiled: bool) -> WhatRan:
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
            state = _state(target)
            return what_ran(merged.launch, state, not_watched=merged.not_watched)
        before = seen
    return replace(before or WhatRan(), not_watched=why)


def _state(target: Target) -> dict[str, str]:
    """As `WhatRan.state`."""
    state: dict[str, str] = {}
    if target.device.facts.persists:
        state["set-aside of L2"] = format_bytes(target.device.l2.set_aside())
    for number, buffer in enumerate(dict.fromkeys((*target.arena.managed, *target.managed)), 1):
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
