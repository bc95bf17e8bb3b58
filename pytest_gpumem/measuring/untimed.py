"""Untimed passes after the samples: page faults and migrations, and what a launch ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Device, Launch, NotCounted, Undelivered
from pytest_gpumem.measuring.samplers import held
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.managed import ManagedBuffer
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.what_ran import WhatRan, declared, together, what_ran
from pytest_gpumem.units import format_bytes

PASSES = 3
"""Passes until two that follow each other are equal. The first may still set something up."""

LONG = 0.1  # seconds of a launch that is not repeated to see that it runs the same


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


OUTSIDE = 0.01
"""Share of the latency up to which work outside of the timed interval does not matter."""


def find_outside(device: Device, target: Target, idle: Launch) -> float:
    """Seconds of one launch's work that run outside of the interval in which samples are timed, such as on a stream of its own.

    The launch is queued behind a hold, as for a sample, between two idle launches on the timed stream: what does not run between these two
    is outside. Two parts that run at once count twice.
    `idle`: the idle launch.
    Raises `NotCounted`: with the reason.
    Raises `HoldExpired`: the launch waits for the device.
    """
    stream = target.stream

    def queue() -> None:
        with held(device, stream):
            device.kernels.launch(idle, stream)
            target.launch(0, stream)
            device.kernels.launch(idle, stream)
        device.streams.synchronize()

    name = idle.kernel.entry.partition("<")[0]
    for _ in range(PASSES):  # the first records of a process may be lost
        put_back(device, target)
        with uncollected():
            spans = device.counters.spans(queue)
        marks = [span for span in spans if span.grid == idle.shape.blocks and name in span.name]
        if len(marks) >= 2:
            break
    else:
        raise Undelivered("CUPTI did not deliver all kernels")
    first, last = min(marks, key=lambda span: span.start), max(marks, key=lambda span: span.end)
    others = [span for span in spans if span not in (first, last)]
    return sum(
        max(0.0, min(one.end, first.start) - one.start)
        + max(0.0, one.end - max(one.start, last.end))
        for one in others
    )


def find_what_ran(
    device: Device,
    target: Target,
    managed: Iterable[Buffer],
    latency: float,
    *,
    profiled: bool,
    varying: Sequence[int] = (),
) -> WhatRan:
    """What one launch runs; a reason why that is unknown is in the result, not raised.

    Inputs and pages are put back before each pass, as before a sample. Two launches of code that is not ours have to run the same: else the
    digest of one would say nothing of the others. Bytes of arguments in which they differ are left out. A launch of `LONG` or longer
    (`latency`) is watched once.
    `varying`: numbers of the arguments that vary on purpose, as for `declared`.
    """
    if profiled:
        return WhatRan(not_watched="a profiler is attached, and CUPTI serves one tool at a time")
    once = latency >= LONG or not target.foreign
    before: WhatRan | None = None
    why = f"no two of {PASSES} launches ran the same"
    for _ in range(PASSES):
        put_back(device, target)
        try:
            with uncollected():  # objects that are freed at any time call the runtime
                seen = device.counters.what_ran(
                    partial(target.launch, 0, target.stream), device.streams.synchronize
                )
        except Undelivered as reason:
            why = str(reason)
            continue
        except NotCounted as reason:
            return WhatRan(not_watched=str(reason))
        seen = declared(seen, varying)
        alone = seen.digest is None or once
        found = seen if alone else None if before is None else together([before, seen])
        if found is not None:
            return what_ran(
                found.launch,
                found.calls,
                _state(device, target, managed),
                not_watched=found.not_watched,
            )
        before = seen
    return (
        WhatRan(not_watched=why)
        if before is None
        else replace(before, digest=None, not_watched=why)
    )


def _state(device: Device, target: Target, managed: Iterable[Buffer]) -> dict[str, str]:
    """As `WhatRan.state`."""
    found = {f"argument {name}": kind for name, kind in target.host_memory}
    if device.facts.persists:
        found["set-aside of L2"] = format_bytes(device.l2.set_aside())
    for number, buffer in enumerate(managed, 1):
        found[f"managed buffer {number}"] = f"{format_bytes(buffer.nbytes)}, {buffer.home}"
        if isinstance(buffer, ManagedBuffer) and buffer.advice.words:
            found[f"managed buffer {number}"] += f", {buffer.advice.words}"
    return found


TRIES = 4  # passes until counts that CUPTI does not deliver are given up


def count_migrations(device: Device, target: Target, *, profiled: bool) -> Migrations:
    """Count page faults and migrations of one launch; a reason why it cannot is in the result, not raised. Pages are put back before the
    launch, as before a sample. Counting slows faults down, so the pass is not timed."""
    if profiled:
        return Migrations(
            not_counted="a profiler is attached, and the driver serves one tool at a time; it shows the faults itself"
        )

    before, one_launch = partial(put_back, device, target), partial(launch, device, target)
    source = "the model" if device.facts.simulated else "CUPTI"
    undelivered = ""
    for _ in range(TRIES):
        try:
            return Migrations(
                before=device.counters.pages(before),
                launch=device.counters.pages(one_launch),
                source=source,
            )
        except Undelivered as reason:
            undelivered = f"{reason} (tried {TRIES} times)"
        except NotCounted as reason:
            return Migrations(not_counted=str(reason))
    return Migrations(not_counted=undelivered)
