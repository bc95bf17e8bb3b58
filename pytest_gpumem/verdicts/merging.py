"""One measurement out of those of several processes of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_gpumem.records.measurement import Measurement, Repeat
from pytest_gpumem.records.row import Row
from pytest_gpumem.verdicts.judge import how


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """A measurement with those of the same row in further processes; a note says which of them do not count, and why.

    Args:
        measurement: this process's.
        key: `Row.key`.
        further: rows of each further process by their key.
    """
    counted, left_out = list[Repeat](), list[str]()
    for number, rows in enumerate(further, 2):
        other = rows[key].measurement if key in rows else None
        if (why := _unlike(measurement, other)) is not None:
            left_out.append(f"process {number} of {len(further) + 1} is left out: {why}")
        elif other is not None:
            counted.append(other.repeat)
    return replace(measurement, further=tuple(counted), notes=(*measurement.notes, *left_out))


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Why another process's measurement cannot be averaged with this one's; None if it can."""
    if other is None:
        return "it has no such row"
    if (*how(other), other.mode) != (*how(measurement), measurement.mode):
        return f"it measured {', '.join((*how(other), other.mode))}"
    if throttled := sorted({reason for conditions in other.conditions for reason in conditions.throttle_reasons}):
        return f"it was throttled ({', '.join(throttled)})"
    return None
