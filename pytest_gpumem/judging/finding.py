"""The findings of rules, and their sentences.

A rule returns an outcome, a code and figures. `SENTENCES` is the only place that turns them into words, and no program reads the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement, Window
from pytest_gpumem.records.row import Comparison, LimitResult
from pytest_gpumem.units import format_share, format_shares, short_bytes

SENTENCES: Mapping[str, str] = {
    # Limits of a measurement by itself.
    "not judged": "{limit} cannot be judged: {why}",
    "beyond the peak": "the declared traffic is wrong: {bandwidth} is above the device's peak of {peak}",
    "beside": "{figure} is {side} {limit} by {distance}, margin {margin}, {basis}",
    "too close": "{figure} is {side} {limit} by {distance}, margin {margin}, {basis}: too close to call",
    "not counted": "{limit} cannot be judged, not counted: {why}",
    "not read": "{limit} cannot be judged: {why}",
    "counted": "{figure}, {side} {limit}",
    "varies": "{figure}, above {limit}; it varies with unchanged code, {low} to {high}: too few runs to judge it exactly",
    "beats": "{times}: {limit} holds",
    "does not beat": "{times}: {limit} does not hold",
    "may not beat": "{times}: {limit} is not beyond doubt",
    # A change against the baseline.
    "slower": "{seen}: slower than {limit} allows",
    "looks slower": "{seen}: looks slower than {limit} allows; {doubt}",
    "within": "{seen}: within {limit}, catches {catches}",
    "too few days": "{seen}: {limit} lies within the interval, which is so wide because the baseline is of {days}; runs of further days, "
    "or gpumem duet, decide",
    "too few runs": "{seen}: too few runs to pass {limit}; {doubt}",
    "noisy": "{seen}: {limit} lies within the interval; a PASS would miss up to {catches}; {doubt}",
    "peak varies": "{limit} cannot be judged: {figure}",
    "same code": "{seen}: passes {limit}, as the same machine code ran in the same way{but}; would miss up to {catches}",
    "crept": "{seen}: crept beyond {limit}; gpumem compare shows the runs between",
    "looks crept": "{seen}: looks crept beyond {limit}; {doubt}",
    "no limit": "no limit set",
    "no limit, compared": "{seen}, no limit set, catches {catches}",
    # Nothing to compare with.
    "no history": "{limit} has nothing to compare with: {why}",
    "measured differently": "{limit} cannot be judged, the measurement itself has changed: {changed}; gpumem duet compares them",
    "other work": "{finding}; a launch does other work, {changed}",
    "not the same work": "{seen}, but a launch does other work, {changed}: no limit was judged; gpumem duet compares them",
    # The device and its conditions.
    "unreliable": "{doubts}: no limit was judged",
    "too wide": "the 95 % interval is ± {noise} of the latency, {basis}: too wide to pass; measure more placements",
}


@dataclass(frozen=True)
class Finding:
    """The result of one rule for one measurement."""

    outcome: Outcome
    form: str  # key of `SENTENCES`
    figures: Mapping[str, str]  # the words and figures of its sentence
    code: Code | None = None
    limit: str = ""  # name of the limit; empty for a doubt about the whole measurement

    @property
    def result(self) -> LimitResult:
        """The finding for a record."""
        return LimitResult(self.limit, self.outcome, self.code, self.sentence)

    @property
    def sentence(self) -> str:
        """The finding in words, without a full stop."""
        return SENTENCES[self.form].format(**self.figures)


class Judgement(NamedTuple):
    """What the judge of a measurement found."""

    findings: list[Finding]  # one for each limit, and for each doubt about the whole measurement
    comparison: Comparison | None = None  # the change against the baseline, where there is one

    @property
    def outcome(self) -> Outcome:
        """That of the worst finding; MEASURED without any."""
        return worst(self.findings)


def worst(findings: Iterable[Finding | LimitResult]) -> Outcome:
    """The outcome of the worst finding; MEASURED without any."""
    return min(
        (one.outcome for one in findings),
        key=lambda outcome: outcome.rank,
        default=Outcome.MEASURED,
    )


def find(outcome: Outcome, form: str, code: Code | None = None, **figures: str) -> Finding:
    """A finding with these figures."""
    return Finding(outcome, form, figures, code)


def of_limit(name: str, finding: Finding) -> Finding:
    """The finding with the name of its limit."""
    return replace(finding, limit=name)


def against_most(
    limit: str, count: float, most: float, figure: str, code: Code | None = None
) -> Finding:
    """The finding about an exact count, which `figure` has in words. `code`: of a FAIL."""
    if count > most:
        if most >= 10_000 and short_bytes(int(count)) == short_bytes(int(most)):
            figure += f", {int(count - most)} B more"
        return find(Outcome.FAIL, "counted", code, figure=figure, side="above", limit=limit)
    return find(Outcome.PASS, "counted", figure=figure, side="not above", limit=limit)


def basis(measurement: Measurement) -> str:
    """The data of a figure: "1600 samples on 8 placements"."""
    samples, placements = len(measurement.samples), len(measurement.placements)
    return f"{counted(samples, 'sample')} on {counted(placements, 'placement')}"


def window_text(window: Window) -> str:
    """ "8 MiB at hit ratio 1 and a set-aside of 9.375 MiB", with where it begins and its properties where they are not the usual ones."""
    parts = [short_bytes(window.nbytes)]
    if window.offset:
        parts.append(f"from {short_bytes(window.offset)} on")
    if window.hit != "persisting":
        parts.append(f"with the hit property {window.hit}")
    if window.miss != "streaming":
        parts.append(f"with the miss property {window.miss}")
    return " ".join(
        [
            *parts,
            f"at hit ratio {window.hit_ratio:.3g} and a set-aside of {short_bytes(window.set_aside)}",
        ]
    )


def counted(count: int, thing: str) -> str:
    """ "1 process", "3 processes", "8 placements", "2 copies"."""
    plural = (
        f"{thing[:-1]}ies"
        if thing.endswith("py")
        else f"{thing}es"
        if thing.endswith(("s", "ch"))
        else f"{thing}s"
    )
    return f"{count} {thing if count == 1 else plural}"


def change(share: float) -> str:
    """ "+1.20 %": a change of a latency; slower is positive."""
    # A share below a millionth is the rounding error of equal figures.
    return format_share(share if abs(share) > 1e-6 else 0.0, sign=True)


def bounds(low: float, high: float) -> tuple[str, str]:
    """The ends of an interval of a change, with enough digits to differ."""
    return format_shares(*(end if abs(end) > 1e-6 else 0.0 for end in (low, high)))


def between(low: float, high: float) -> str:
    """ "between -0.100 % and +0.712 %"; "without a spread" where both ends are equal, as on a simulated device."""
    ends = bounds(low, high)
    return "without a spread" if ends[0] == ends[1] else f"between {ends[0]} and {ends[1]}"


def against(comparison: Comparison) -> str:
    """The change with its interval, and the number of runs and processes behind it."""
    runs = counted(comparison.runs, "saved run")
    if comparison.processes != comparison.runs:
        runs += f" of {counted(comparison.processes, 'process')}"
    text = f"{change(comparison.delta)} against {runs}, {between(comparison.low, comparison.high)}"
    return (
        text
        if comparison.measured == 1
        else f"{text}, over {counted(comparison.measured, 'process')} of this run"
    )


def chance(p: float) -> str:
    """A probability: "p = 1.2e-05", "p = 0.03"."""
    return f"p = {p:.2g}" if p > 0 else "p < 1e-300"
