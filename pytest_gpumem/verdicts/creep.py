"""Creep: many small slow-downs, each within its margin, that the moving window of a baseline follows. Said of a row, never judged."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_share
from pytest_gpumem.verdicts.drift import drift_of
from pytest_gpumem.verdicts.finding import change, counted
from pytest_gpumem.verdicts.judge import comparable
from pytest_gpumem.verdicts.screen import compare


def creep(measurement: Measurement, anchor: Sequence[Measurement], processes: int, facts: DeviceFacts) -> str | None:
    """What the row has slowed down by since the first processes of its epoch; None where nothing is beyond doubt (99.9 %).

    Args:
        measurement: this run's.
        anchor: the first processes, measured in the same mode.
        processes: how many the epoch has by now.
        facts: the device, whose drift is taken out.
    """
    alike = comparable(measurement, anchor)
    if not alike:
        return None
    drift = drift_of(measurement, alike, facts)
    if drift is not None and drift.too_large:
        return None
    found = compare(measurement, alike, 0.0, drift)
    if found.low <= 0:
        return None
    first = sum(1 + len(past.further) for past in alike)
    return (
        f"since the anchor {change(found.delta)}: slower than the first {first} of {counted(processes, 'process')} of its epoch "
        f"by {format_share(found.low)} or more with 99.9 %"
    )
