"""Untimed passes after the samples: page faults and migrations, and the activity of a launch."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from pytest_gpumem.devices.protocol import Device, NotCounted, Undelivered
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.uses import Activity


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


def watch_launch(device: Device, target: Target, *, profiled: bool) -> Activity:
    """Find the kernels, copies and memsets of one launch; a reason why it cannot is in the result, not raised.

    Inputs and pages are put back first, as before a sample, outside the pass.

    Args:
        device: where it runs.
        target: launched on its first placement.
        profiled: a profiler is attached, which uses CUPTI itself.
    """
    set_aside = device.l2.set_aside() if device.facts.persisting_l2_max_bytes else None
    known = Activity(arguments=target.host_memory, set_aside=set_aside)
    if profiled:
        return replace(known, not_counted="a profiler is attached, and CUPTI serves one tool at a time; it shows what ran itself")
    put_back(device, target)
    try:
        seen = device.counters.activity(partial(launch, device, target))
    except NotCounted as reason:
        return replace(known, not_counted=str(reason))
    return replace(seen, arguments=known.arguments, set_aside=known.set_aside)


TRIES = 4
"""Passes until counts that CUPTI does not deliver are given up."""


def count_migrations(device: Device, target: Target, *, profiled: bool) -> Migrations:
    """Count page faults and migrations of one launch; a reason why it cannot is in the result, not raised.

    Pages are put back before the launch, as before a sample. Counting slows faults down, so the pass is not timed.

    Args:
        device: where it runs.
        target: launched on its first placement.
        profiled: a profiler is attached, which uses the counters itself.
    """
    if profiled:
        return Migrations(not_counted="a profiler is attached, and the driver serves one tool at a time; it shows the faults itself")

    before, one_launch = partial(put_back, device, target), partial(launch, device, target)
    source = "the model" if device.facts.simulated else "CUPTI"
    undelivered = ""
    for _ in range(TRIES):
        try:
            return Migrations(before=device.counters.pages(before), launch=device.counters.pages(one_launch), source=source)
        except Undelivered as reason:
            undelivered = f"{reason} (tried {TRIES} times)"
        except NotCounted as reason:
            return Migrations(not_counted=str(reason))
    return Migrations(not_counted=undelivered)
