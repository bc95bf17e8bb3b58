"""What a duet judges of the rows that a gate's session leaves open, and what it changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from msgspec import structs

from pytest_gpumem.baselines.acceptances import (
    FORGIVES,
    NONE,
    Acceptance,
    Acceptances,
    AcceptedChange,
)
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.saved import PastRow, memory_of, times_of
from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.judging.finding import with_verdict
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.judge import failing_in_themselves, is_failure
from pytest_gpumem.judging.limits import EXACT, relative
from pytest_gpumem.judging.regression import against_reference
from pytest_gpumem.limits import OF_MEASUREMENT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import LimitResult, PairedChange, Row
from pytest_gpumem.runs.pairs import PEAK, TIME, DuetRow
from pytest_gpumem.units import parse_bytes, parse_growth

BY_NUMBER = tuple(name for name in OF_MEASUREMENT if name not in (TIME, *EXACT))
"""Limits on a time by a number, which no duet judges."""


# What the duet judges


def limits_for_duet(
    rows: Sequence[Row], base: Selection, accepted: Acceptances, *, strict: bool
) -> dict[str, Limits]:
    """Return the limits that a duet decides, by row key.

    They are of rows that are not plainly PASS, are NEW, or of which the change accepts something;
    not of rows that fail whatever a duet says, nor of tests that BASE does not have.

    `base`: the tests that BASE selects.
    `accepted`: what the change accepts, of what counts.
    `strict`: the session failed every row in doubt.
    """
    failing = failing_in_themselves(rows, strict)
    limits = {}
    for row in rows:
        if row.nodeid in failing or base.lacks(row.nodeid) or not row.measured_something:
            continue
        compared = compared_limits(row)
        doubted, failed = set(), set()
        for result in row.verdict.limits:
            if result.code is not Code.NOT_READ:
                doubted.add(result.limit)
            if result.outcome is Outcome.FAIL:
                failed.add(result.limit)
        values, origin = {}, {}
        for name in compared:
            acceptance = _acceptance(accepted, row.key, name)
            # A doubt about the whole measurement is of no limit.
            if name not in doubted and "" not in doubted and acceptance is None:
                continue
            values[name] = getattr(row.limits, name)
            origin[name] = row.limits.origin.get(name, "limit")
            # Memory is judged by its limit first, and a count without a limit needs none.
            if acceptance is not None and name != PEAK and acceptance[1].value != NONE:
                change = acceptance[1]
                values[name] = change.up_to if name == TIME else change.value
                origin[name] = "accepted"
        if values and failed <= set(compared):
            limits[row.key] = Limits(**values, origin=origin)
    return limits


def compared_limits(row: Row) -> list[str]:
    """Return the limits of a row that compare it with BASE."""
    names = []
    if row.measurement is not None and row.limits.max_regression is not None:
        names.append(TIME)
    if row.footprint is not None and row.limits.max_peak_regression is not None:
        names.append(PEAK)
    return names + relative(row.limits)


def _acceptance(
    accepted: Acceptances, key: str, limit: str
) -> tuple[Acceptance, AcceptedChange] | None:
    """The accepted change of a limit that compares with BASE, and its file."""
    figure = FORGIVES.get(limit)
    if figure is None:
        return None
    return accepted.of(key, figure, limit if figure == "limit" else "")


# What its verdicts change


def with_duets(
    rows: Sequence[Row], duet: Mapping[str, DuetRow], accepted: Acceptances, *, strict: bool
) -> tuple[Row, ...]:
    """Return the rows with the verdicts of the duet, by row key. Other arguments as before."""
    failing = failing_in_themselves(rows, strict)
    judged = []
    for row in rows:
        duet_row = duet.get(row.key)
        if duet_row is None or duet_row.outcome is Outcome.NEW or row.nodeid in failing:
            judged.append(row)
        else:
            judged.append(_with_duet(row, duet_row, accepted))
    # All rows of a test fail with one of them, and no longer once none does.
    failing.update(row.nodeid for row in judged if is_failure(row.verdict, strict))
    return tuple(structs.replace(row, failed=row.nodeid in failing) for row in judged)


def _with_duet(row: Row, duet_row: DuetRow, accepted: Acceptances) -> Row:
    results = [_up_to_accepted(row.key, result, duet_row, accepted) for result in duet_row.results]
    if not results:
        results.append(LimitResult("", Outcome.UNDECIDED, None, duet_row.sentence))
    judged = {result.limit for result in results}
    if "" in judged:
        judged.update(compared_limits(row))
    # The conditions of the session are not those of the duet.
    if all(getattr(row.limits, name) is None for name in BY_NUMBER):
        judged.add("")
    results += [result for result in row.verdict.limits if result.limit not in judged]
    differing = duet_row.differences or row.differences
    row = structs.replace(with_verdict(row, results), differences=differing)
    pairs = duet_row.pairs
    if pairs is None or len(pairs.log_ratios) < 2:
        return row
    paired = PairedChange(pairs.change, *pairs.bounds, len(pairs.log_ratios))
    return structs.replace(row, verdict=structs.replace(row.verdict, paired=paired))


def _up_to_accepted(
    key: str, result: LimitResult, duet_row: DuetRow, accepted: Acceptances
) -> LimitResult:
    """The result of the duet, or ACCEPTED where the change accepts it up to its size."""
    limit, acceptance = result.limit, _acceptance(accepted, key, result.limit)
    if result.code is Code.MEASURED_DIFFERENTLY:
        limit, acceptance = TIME, accepted.of(key, "measured")
    if acceptance is None:
        return result
    file, change = acceptance
    if change.figure == "memory":
        too_much = duet_row.head_peak > parse_bytes(change.up_to or "")
    else:
        # The duet judged time and counts up to what is accepted.
        too_much = change.figure != "measured" and change.value != NONE
    if too_much and result.outcome is not Outcome.PASS:
        return result
    reason = f"{limit} accepted ({file.who}: {file.reason}); {result.reason}"
    return LimitResult(limit, Outcome.ACCEPTED, result.code, reason)


# Against the oldest revision of the reference


def crept_limits(
    row: Row, duet_row: DuetRow, accepted: Acceptances, baseline: Baseline
) -> dict[str, Limits]:
    """Return the limits that a row is above over its reference and did not fail against BASE.

    By the oldest revision of the reference.
    """
    references: dict[str, Sequence[PastRow]] = {}
    pairs = duet_row.pairs
    if pairs is not None and pairs.outcome in (Outcome.PASS, Outcome.UNDECIDED):
        runs = baseline.reference_runs(row)
        changes = []
        for head in duet_row.head:
            if runs and head.measurement is not None:
                changes.append(against_reference(head.measurement, times_of(runs)).log_ratio)
        if changes and fmean(changes) > pairs.limit:
            references[TIME] = runs
    growth = row.limits.max_peak_regression
    passed = [result.limit for result in duet_row.results if result.outcome is Outcome.PASS]
    if growth is not None and PEAK in passed:
        runs = baseline.reference_runs(row, "memory")
        peaks = [max(peaks_of(footprint)) for footprint in memory_of(runs)]
        if peaks and duet_row.head_peak > parse_growth(growth).most(max(peaks)):
            references[PEAK] = runs
    limits: dict[str, Limits] = {}
    for name, reference in references.items():
        if _acceptance(accepted, row.key, name) is None:
            revision = str(reference[0].process.revision)
            of_row = limits.get(revision, Limits(origin=row.limits.origin))
            limits[revision] = structs.replace(of_row, **{name: getattr(row.limits, name)})
    return limits


def with_creep(row: DuetRow, limits: Limits, oldest: DuetRow | str) -> DuetRow:
    """Return a row of a duet with BASE, after one with the oldest revision.

    `limits`: those that it is above over its reference.
    `oldest`: the row in that duet, or why there is none.
    """
    results = list[LimitResult]()
    if isinstance(oldest, str):
        for name, word, code in ((TIME, "slower", Code.LOOKS_SLOWER), (PEAK, "larger", None)):
            if getattr(limits, name) is not None:
                reason = f"{word} than its reference, and its oldest revision cannot be measured"
                result = LimitResult(name, Outcome.UNDECIDED, code, f"{reason}: {oldest}")
                results.append(result)
        oldest = row
    else:
        for result in oldest.results:
            reason = f"against the oldest revision of the reference: {result.reason}"
            code = Code.CREPT if result.outcome is Outcome.FAIL else result.code
            results.append(LimitResult(result.limit, result.outcome, code, reason))
        if not results:
            results.append(LimitResult(TIME, Outcome.UNDECIDED, None, oldest.sentence))
    decided = {result.limit: result for result in (*row.results, *results)}
    return replace(row, decided=decided, pairs=oldest.pairs or row.pairs, oldest=oldest)
