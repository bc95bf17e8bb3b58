"""Untimed passes after the samples: page faults and migrations, and what a launch ran."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Device, Launch, NotCounted, Span, Undelivered
from pytest_gpumem.measuring.harness import held
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.managed import ManagedBuffer
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.what_ran import WhatRan, together, what_ran
from pytest_gpumem.units import format_bytes

PASSES = 3
"""Passes until two that follow each other are equal. The first may still set something up."""
LONG = 0.1  # seconds of a launch that is not repeated to see that it runs the same
OUTSIDE = 0.01  # share of the latency up to which work outside of the interval does not matter
TRIES = 4  # passes until counts that CUPTI does not deliver are given up


def put_back(device: Device, target: Target) -> None:
    """Put inputs and pages back as before a sample, and wait."""
    target.prepare(target.stream)
    device.streams.synchronize()
    for buffer in target.managed:
        buffer.put_home(target.stream)
    device.streams.synchronize()


def launch(device: Device, target: Target) -> None:
    """Launch once on the first placement, and wait."""
    target.launch(0, target.stream)
    device.streams.synchronize()


def find_outside(device: Device, target: Target, idle: Launch) -> float:
    """Return the seconds of a launch's work that run outside of the timed interval.

    The launch is queued behind a hold, as for a sample, between two idle launches: what does not
    run between these is outside, such as work on another stream. Parts that run at once count
    twice.
    Raises `NotCounted` with the reason; `HoldExpired`: the launch waits for the device.
    """
    stream = target.stream

    def queue() -> None:
        with held(device, stream):
            device.kernels.launch(idle, stream)
            target.launch(0, stream)
            device.kernels.launch(idle, stream)
        device.streams.synchronize()

    for _ in range(PASSES):  # the first records of a process may be lost
        put_back(device, target)
        with uncollected():
            spans = device.counters.spans(queue)
        idle_spans = [span for span in spans if _is_launch(span, idle)]
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


def _is_launch(span: Span, launch: Launch) -> bool:
    return span.grid == launch.shape.blocks and launch.kernel.entry.partition("<")[0] in span.name


def find_what_ran(
    device: Device, target: Target, managed: Iterable[Buffer], latency: float, *, profiled: bool
) -> WhatRan:
    """Return what a launch runs, or in its place the reason why that is unknown.

    Two launches of code of the user have to run the same: else the digest of either would say
    nothing of the others. A launch of `LONG` or longer is watched once.
    """
    if profiled:
        return WhatRan(not_watched="a profiler is attached, and CUPTI serves one tool at a time")
    once = latency >= LONG or not target.foreign
    before: WhatRan | None = None
    why = f"no two of {PASSES} launches ran the same"
    for _ in range(PASSES):
        put_back(device, target)
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
        if once or seen.digest is None:
            merged = seen
        elif before is not None:
            merged = together([before, seen])
        if merged is not None:
            state = _state(device, target, managed)
            return what_ran(merged.launch, state, not_watched=merged.not_watched)
        before = seen
    if before is None:
        return WhatRan(not_watched=why)
    return replace(before, digest=None, not_watched=why)


def _state(device: Device, target: Target, managed: Iterable[Buffer]) -> dict[str, str]:
    """Return the state of memory as in `WhatRan.state`."""
    state = {f"argument {name}": kind for name, kind in target.host_memory}
    if device.facts.persists:
        state["set-aside of L2"] = format_bytes(device.l2.set_aside())
    for number, buffer in enumerate(managed, 1):
        text = f"{format_bytes(buffer.nbytes)}, {buffer.home}"
        if isinstance(buffer, ManagedBuffer) and buffer.advice.words:
            text += f", {buffer.advice.words}"
        state[f"managed buffer {number}"] = text
    return state


def count_migrations(device: Device, target: Target, *, profiled: bool) -> Migrations:
    """Count page faults and migrations of a launch, or return the reason why it cannot.

    Counting slows faults down, so the pass is not timed.
    """
    if profiled:
        return Migrations(
            not_counted="a profiler is attached, and the driver serves one tool at a time; it "
            "shows the faults itself"
        )
    before, once = partial(put_back, device, target), partial(launch, device, target)
    source = "the model" if device.facts.simulated else "CUPTI"
    undelivered = ""
    for _ in range(TRIES):
        try:
            pages_before = device.counters.pages(before)
            pages = device.counters.pages(once)
        except Undelivered as reason:
            undelivered = f"{reason} (tried {TRIES} times)"
        except NotCounted as reason:
            return Migrations(not_counted=str(reason))
        else:
            return Migrations(before=pages_before, launch=pages, source=source)
    return Migrations(not_counted=undelivered)
