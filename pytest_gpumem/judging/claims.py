"""A claim of a test about two of its own measurements: `faster_than="faulting"`, or "20 x faulting".

Both are of one process, so nothing of a baseline comes into it; but a repetition in another process may place buffers elsewhere and launch
at another cost. A claim holds where the factor is beyond what a repetition may take from it (99 %, one-sided); else it fails the test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpumem.judging.finding import Finding, basis
from pytest_gpumem.judging.spread import of_repetition
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_time, parse_claim

CONFIDENCE = 0.99
"""One-sided, that a repetition shows the same side of the limit."""


@dataclass(frozen=True)
class Claim:
    """That one measurement is so many times as fast as another of its test."""

    other: str
    """Label of the other measurement."""
    by: float
    """Times."""

    @classmethod
    def parse(cls, written: str) -> Claim:
        """From "faulting" or "20 x faulting". Raises `QuantityError`."""
        by, other = parse_claim(written)
        return cls(other, by)


def beats(measurement: Measurement, claim: Claim, origin: str, siblings: Mapping[str, Measurement]) -> Finding | None:
    """The finding about one claim; None for the measurement that the claim is about, where a marker names it for all of a test's.

    Args:
        measurement: that is to be faster.
        claim: than what, and by how much.
        origin: where the claim was made: "marker", "call" or "result".
        siblings: the test's measurements by label.
    """
    if measurement.label == claim.other:
        return None
    name = f"faster_than {claim.by:g} x {claim.other} ({origin})"
    other = siblings.get(claim.other)
    if other is None:
        known = ", ".join(repr(label) for label in siblings if label not in ("", measurement.label)) or "none"
        return Finding(Outcome.FAIL, f"{name} cannot be judged: the test has no measurement labelled {claim.other!r}; others are {known}")
    ratio = math.log(other.latency / measurement.latency)
    reach = (of_repetition(measurement) + of_repetition(other)).reach(CONFIDENCE)
    low, high = math.exp(ratio - reach), math.exp(ratio + reach)
    times = (
        f"{format_time(measurement.latency)} against {format_time(other.latency)} of {claim.other} is {math.exp(ratio):.4g} times as fast, "
        f"between {low:.4g} and {high:.4g}, {basis(measurement)}"
    )
    if low > claim.by:
        return Finding(Outcome.PASS, f"{times}: {name} holds")
    return Finding(Outcome.FAIL, f"{times}: {name} {'does not hold' if high < claim.by else 'is not beyond doubt'}")
