"""One measurement out of those of several processes of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_gpumem.records.measurement import Measurement, Repeat
from pytest_gpumem.records.row import Row
from pytest_gpumem.verdicts.judge import how, unreliable


def merged(measurement: Measurement, key: str, further: Sequence[Mapping[str, Row]]) -> Measurement:
    """A measurement with those of the same row in further processes; a note says which processes do not count, and why.

    Where conditions spoilt this process's, that of the first process that they did not spoil takes its place.

    Args:
        measurement: this process's.
        key: `Row.key`.
        further: rows of each further process by their key.
    """
    every = [measurement, *(rows[key].measurement if key in rows else None for rows in further)]
    first = next((index for index, one in enumerate(every) if one is not None and not any(unreliable(one))), 0)
    own = every[first] or measurement
    counted, left_out = list[Repeat](), list[str]()
    for index, other in enumerate(every):
        if index == first:
            continue
        if (why := _unlike(own, other)) is not None:
            left_out.append(f"process {index + 1} of {len(every)} is left out: {why}")
        elif other is not None:
            counted.append(other.repeat)
    return replace(own, further=tuple(counted), notes=(*own.notes, *left_out))


def _unlike(measurement: Measurement, other: Measurement | None) -> str | None:
    """Why another process's measurement cannot be averaged with this one's; None if it can."""
    if other is None:
        return "it has no such row"
    if (*how(other), other.mode) != (*how(measurement), measurement.mode):
        return f"it measured {', '.join((*how(other), other.mode))}"
    return ", ".join(unreliable(other)) or None
