"""A row against that of one process of base: its exact figures, which are bytes and counts, and the limits of its calls. Pure.

A gate compares rows with the baseline. Where an exact figure grew against it, or it has none, base says whether the growth is of this
change. The limits of a call are known only after the test has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from pytest_gpumem.judging.expectations import held
from pytest_gpumem.judging.finding import Finding
from pytest_gpumem.judging.footprint import judge_footprint
from pytest_gpumem.judging.limits import EXACT, absolute, relative
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.limits import LIMITS, MAX_WAITS, OF_FOOTPRINT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import LimitResult, Row

Allowed = Callable[[str, "str | None"], bool]
"""Whether a looser limit, by its name and new value, is accepted."""


def open_results(row: Row) -> list[LimitResult]:
    """The results about exact figures of a row that base decides: a growth, or nothing to compare with."""
    names = relative(row.limits)
    return [
        one
        for one in row.verdict.limits
        if one.limit in names and (one.outcome is not Outcome.UNDECIDED or _differs(one))
    ]


def _differs(one: LimitResult) -> bool:
    """True for a doubt that base's figures may settle: other ones were compared, or the peak of unchanged code varies."""
    return one.code is Code.MEASURED_DIFFERENTLY or (
        one.code is Code.NOISY and one.limit == "max_peak_regression"
    )


def of_memory(row: Row) -> bool:
    """True if base decides a growth of a row's memory."""
    return any(one.limit not in EXACT or row.measurement is None for one in open_results(row))


def against_base(row: Row, base: Row, alone: Row | None, facts: DeviceFacts, name: str) -> Row:
    """The row with its exact figures judged against those of base's row.
    `alone`: the row in a process of the same tests as base's. A test takes more memory if no other called a library before it.
    `name`: of base, for the reasons.
    """
    names = {one.limit for one in open_results(row)}
    findings = list[Finding]()
    if row.measurement is not None and base.measurement is not None:
        counts = [limit for limit in EXACT if limit in names]
        findings += absolute(
            row.measurement, row.limits, facts, past=[base.measurement], names=counts, of=name
        )
    if alone is not None and alone.footprint is not None and base.footprint is not None:
        peaks = [limit for limit in names if limit not in EXACT or row.measurement is None]
        findings += judge_footprint(alone.footprint, row.limits, [base.footprint], peaks, of=name)
    judged = {finding.limit for finding in findings}
    return with_verdict(row, [*findings, *(one for one in known(row) if one.limit not in judged)])


def held_to_base(
    row: Row,
    base: Row,
    facts: DeviceFacts,
    siblings: Mapping[str, Measurement],
    name: str,
    allowed: Allowed,
) -> Row:
    """The row, held to the limits of base's where they demand more. What a duet or base decides of them is left open.
    `siblings`: the measurements of its test by label.
    `name`: of base, for the origin of its limits.
    `allowed`: as of `held`.
    """
    limits = held(row.limits, base.limits, LIMITS, name, allowed)
    names = [limit for limit in LIMITS if getattr(limits, limit) != getattr(row.limits, limit)]
    if not names:
        return row
    open_ = {*relative(limits), "max_regression"}
    findings, alone = list[Finding](), [limit for limit in names if limit not in open_]
    if row.measurement is not None:
        findings += absolute(
            row.measurement,
            limits,
            facts,
            siblings,
            names=[limit for limit in alone if limit not in OF_FOOTPRINT],
        )
    if row.footprint is not None:
        findings += judge_footprint(
            row.footprint,
            limits,
            (),
            [limit for limit in alone if limit in (*OF_FOOTPRINT, MAX_WAITS)],
        )
    before = [one for one in known(row) if one.limit not in names]
    return with_verdict(
        replace(row, limits=limits),
        [*before, *findings, *(_not_yet(limit, limits) for limit in names if limit in open_)],
    )


def _not_yet(limit: str, limits: Limits) -> LimitResult:
    written = f"{limit} {getattr(limits, limit)} ({limits.origin[limit]})"
    return LimitResult(
        limit, Outcome.NEW, Code.NO_BASELINE, f"{written} holds, by which nothing was compared yet"
    )
