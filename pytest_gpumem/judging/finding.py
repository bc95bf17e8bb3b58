"""The findings of rules, and their sentences.

A rule returns an outcome, a code and figures. `SENTENCES` alone turns them into words, and no
program reads the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement, Window
from pytest_gpumem.records.row import Comparison, LimitResult
from pytest_gpumem.units import format_share, short_bytes

SENTENCES: Mapping[str, str] = {
    # Limits of a measurement by itself.
    "not judged": "{limit} cannot be judged: {why}",
    "beyond the peak": "the declared traffic is wrong: {bandwidth} is above the device's peak of "
    "{peak}",
    "beside": "{figure} is {side} {limit} by {distance}, margin {margin}, {basis}",
    "too close": "{figure} is {side} {limit} by {distance}, margin {margin}, {basis}: too close to "
    "call",
    "not counted": "{limit} cannot be judged, not counted: {why}",
    "not read": "{limit} cannot be judged: {why}",
    "counted": "{figure}, {side} {limit}",
    "beats": "{times}: {limit} holds",
    "does not beat": "{times}: {limit} does not hold",
    "may not beat": "{times}: {limit} is not beyond doubt",
    # A change against the reference.
    "slower": "{seen}: slower than {limit} allows, by 10 % more than the slowest of them",
    "within": "{seen}: within {limit}; we are {sure} sure that it is not slower by the limit",
    "looks slower": "{seen}: looks slower than {limit} allows: {duet} decides",
    "too few runs": "{seen}: {limit} needs a duet, or more saved processes (--gpumem-save), as one "
    "does not show the noise: {duet} decides",
    "others changed": "{seen}, but the other rows changed by {shift}, as on another card: {limit} "
    "needs a duet: {duet} decides",
    "faster": "{seen}: a gain beyond {limit} needs a duet, as it would hide a later loss: {duet} "
    "decides",
    "noisy": "{seen}: {limit} needs a duet, as noise may hide {reach}: {duet} decides",
    "peak varies": "{limit} needs a duet: {figure}",
    "waits": "{seen}: {limit} is judged at the session's end",
    "no limit": "no limit set",
    "no limit, compared": "{seen}, no limit set",
    # Nothing to compare with.
    "no history": "{limit} has nothing to compare with: {why}",
    "measured differently": "{limit} cannot be judged, the measurement itself has changed: "
    "{changed}; gpumem duet compares them",
    # The device and its conditions.
    "conditions": "mend the machine: {doubts}; no limit was judged",
    "unreliable": "{doubts}: no limit was judged",
    "too wide": "the 95 % interval is ± {noise} of the latency, {basis}: too wide to pass; measure "
    "more placements",
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


def worst(findings: Iterable[Finding | LimitResult]) -> Outcome:
    """Return the outcome of the worst finding; MEASURED without any."""
    outcomes = [finding.outcome for finding in findings]
    return min(outcomes, key=_rank, default=Outcome.MEASURED)


def _rank(outcome: Outcome) -> int:
    return outcome.rank


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
    """Return "8 MiB at hit ratio 1 and a set-aside of 9.375 MiB".

    Where it begins and its properties are added where they are not the usual ones.
    """
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
