"""The counting pass: what managed pages do while they are put back, and during one launch, with nothing timed."""

from __future__ import annotations

from functools import partial

from pytest_gpumem.devices.protocol import Device, NotCounted, Undelivered
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import launch, put_back
from pytest_gpumem.records.migrations import Migrations

TRIES = 4
"""Passes after which counts that are not delivered are given up."""


def count(device: Device, target: Target, *, profiled: bool) -> Migrations:
    """Count one launch; whatever keeps us from it is in the result, not raised.

    Pages are put back before the launch exactly as before a sample. Counting slows faults down, so no sample is taken meanwhile.

    Args:
        device: where.
        target: what is launched, on its first placement.
        profiled: a profiler is attached, which holds the counters itself.
    """
    if profiled:
        return Migrations(not_counted="a profiler is attached, and the driver serves one tool at a time; it shows the faults itself")

    before, one_launch = partial(put_back, device, target), partial(launch, device, target)
    source = "the model" if device.facts.simulated else "CUPTI"
    said = ""
    for _ in range(TRIES):
        try:
            return Migrations(before=device.count_pages(before), launch=device.count_pages(one_launch), source=source)
        except Undelivered as reason:
            said = f"{reason} (tried {TRIES} times)"
        except NotCounted as reason:
            return Migrations(not_counted=str(reason))
    return Migrations(not_counted=said)
