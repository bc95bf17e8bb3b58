"""What rules share: a limit that is judged, its findings, and words of their sentences.

A finding is a `LimitResult`. No program reads its sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from pytest_gpumem.limits import BASE, LIMITS, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits, Measurement, Window
from pytest_gpumem.records.row import LimitResult, Verdict
from pytest_gpumem.units import format_share, short_bytes


@dataclass(frozen=True)
class Check:
    """A limit of a row."""

    name: str
    written: str  # its value, as written
    origin: str  # where it was written, such as "marker"

    @property
    def limit(self) -> str:
        """The limit in words: "max_waits 0 (marker)"."""
        return f"{self.name} {self.written} ({self.origin})"

    def finding(self, outcome: Outcome, reason: str, code: Code | None = None) -> LimitResult:
        """Return a finding about the limit."""
        return LimitResult(self.name, outcome, code, reason)

    def new(self, why: str) -> LimitResult:
        """Return the finding of a limit whose row has no reference."""
        reason = f"{self.limit} has nothing to compare with: {why}"
        return self.finding(Outcome.NEW, reason, Code.NO_BASELINE)

    def measured_differently(self, changed: str) -> LimitResult:
        """Return the finding of a limit whose row is measured in another way than its reference."""
        why = f"the measurement itself has changed: {changed}; gpumem duet compares them"
        return self.not_judged(why, Code.MEASURED_DIFFERENTLY)

    def not_judged(
        self, why: str, code: Code | None = None, outcome: Outcome = Outcome.UNDECIDED
    ) -> LimitResult:
        """Return the finding of a limit whose figure is unknown."""
        return self.finding(outcome, f"{self.limit} cannot be judged: {why}", code)

    def never(self, why: str) -> LimitResult:
        """Return the FAIL of a limit that the measurement can never meet."""
        return self.not_judged(why, outcome=Outcome.FAIL)

    def at_most(self, count: int, most: int, figure: str, code: Code | None = None) -> LimitResult:
        """Return the finding about an exact count; `figure` has it in words. `code`: of a FAIL."""
        if count <= most:
            return self.finding(Outcome.PASS, f"{figure}, not above {self.limit}")
        more = str(count - most)
        if LIMITS[self.name].metavar != "NUMBER":
            more = short_bytes(count - most)
        return self.finding(Outcome.FAIL, f"{figure}, above {self.limit} by {more}", code)

    def of_count(self, count: int, figure: str, past: Sequence[int], why_new: str) -> LimitResult:
        """Return the finding about an exact count; a number or the saved counts `past` limit it."""
        if self.written != BASE:
            return self.at_most(count, count_of(self.written), figure)
        if not past:
            return self.new(why_new)
        return self.at_most(count, max(past), figure)


def check_of(limits: Limits, name: str) -> Check | None:
    """Return a limit to judge; None if it is not set."""
    written = getattr(limits, name)
    return None if written is None else Check(name, written, limits.origin.get(name, "limit"))


def worst(findings: Sequence[LimitResult | Verdict]) -> Outcome:
    """Return the outcome of the worst finding; MEASURED without any."""
    if not findings:
        return Outcome.MEASURED
    return min(findings, key=attrgetter("outcome.rank")).outcome


def basis(measurement: Measurement) -> str:
    """The data of a figure: "1600 samples on 8 placements"."""
    samples, placements = len(measurement.samples), len(measurement.placements)
    return f"{counted(samples, 'sample')} on {counted(placements, 'placement')}"


def window_text(window: Window | None) -> str:
    """Return "8 MiB at hit ratio 1 and a set-aside of 9.375 MiB", or "none".

    Where it begins and its properties are added where they are not the usual ones.
    """
    if window is None:
        return "none"
    parts = [short_bytes(window.nbytes)]
    if window.offset:
        parts.append(f"from {short_bytes(window.offset)} on")
    if window.hit != "persisting":
        parts.append(f"with the hit property {window.hit}")
    if window.miss != "streaming":
        parts.append(f"with the miss property {window.miss}")
    set_aside = short_bytes(window.set_aside)
    parts.append(f"at hit ratio {window.hit_ratio:.3g} and a set-aside of {set_aside}")
    return " ".join(parts)


def counted(count: int, thing: str) -> str:
    """Return "1 process", "3 processes", "8 placements", "2 copies"."""
    if count == 1:
        return f"1 {thing}"
    if thing.endswith("py"):
        return f"{count} {thing[:-1]}ies"
    if thing.endswith(("s", "ch")):
        return f"{count} {thing}es"
    return f"{count} {thing}s"


def change(share: float) -> str:
    """Return "+1.20 %": a change of a latency; slower is positive."""
    # A share below a millionth is the rounding error of equal figures.
    return format_share(share if abs(share) > 1e-6 else 0.0, sign=True)
