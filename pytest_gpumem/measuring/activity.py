"""The watching pass: what one launch consists of, with nothing timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pytest_gpumem.devices.protocol import Device, NotCounted
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import launch, put_back
from pytest_gpumem.records.activity import Activity


def watch(device: Device, target: Target, *, profiled: bool) -> Activity:
    """Watch one launch; whatever keeps us from it is in the result, not raised.

    Inputs and pages are put back before it exactly as before a sample, unwatched.

    Args:
        device: where.
        target: what is launched, on its first placement.
        profiled: a profiler is attached, which holds CUPTI itself.
    """
    set_aside = device.set_aside() if device.facts.persisting_l2_max_bytes else None
    known = Activity(arguments=target.host_memory, set_aside=set_aside)
    if profiled:
        return replace(known, not_counted="a profiler is attached, and CUPTI serves one tool at a time; it shows what ran itself")
    put_back(device, target)
    try:
        seen = device.count_activity(partial(launch, device, target))
    except NotCounted as reason:
        return replace(known, not_counted=str(reason))
    return replace(seen, arguments=known.arguments, set_aside=known.set_aside)
