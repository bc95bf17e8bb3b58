"""The result of one rule for one measurement, and the figures in its sentence."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_share, format_shares


@dataclass(frozen=True)
class Finding:
    """An outcome, its sentence without a full stop, and its code."""

    outcome: Outcome
    sentence: str
    code: Code | None = None


def basis(measurement: Measurement) -> str:
    """What a figure rests on: "1600 samples on 8 placements"."""
    samples, placements = len(measurement.samples), len(measurement.placements)
    return f"{counted(samples, 'sample')} on {counted(placements, 'placement')}"


def counted(count: int, thing: str) -> str:
    """ "1 process", "3 processes", "8 placements"."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{count} {thing if count == 1 else plural}"


def change(share: float) -> str:
    """ "+1.20 %": a change of a latency, slower counted up."""
    # Below a millionth it is what floating point leaves of equal figures.
    return format_share(share if abs(share) > 1e-6 else 0.0, sign=True)


def bounds(low: float, high: float) -> tuple[str, str]:
    """The ends of an interval of a change, in digits that tell them apart where there are any."""
    return format_shares(*(end if abs(end) > 1e-6 else 0.0 for end in (low, high)))


def between(low: float, high: float) -> str:
    """ "between -0.100 % and +0.712 %"; "without a spread" where both ends are the same, as on a simulated device."""
    ends = bounds(low, high)
    return "without a spread" if ends[0] == ends[1] else f"between {ends[0]} and {ends[1]}"


def chance(p: float) -> str:
    """A probability: "p = 1.2e-05", "p = 0.03"."""
    return f"p = {p:.2g}" if p > 0 else "p < 1e-300"
