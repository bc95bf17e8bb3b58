"""What a duet judges of the rows that a gate's session leaves open, and what it changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from msgspec import structs

from pytest_gpumem.baselines.acceptances import FORGIVES, NONE, Acceptances, AcceptedChange
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.saved import PastRow, memory_of, times_of
from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.judge import failing_in_themselves, is_failure
from pytest_gpumem.judging.limits import EXACT
from pytest_gpumem.judging.regression import against_reference
from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.limits import BASE, OF_MEASUREMENT
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

    These are limits on a slow-down, on the growth of a peak, and on counts by that of base, of rows
    that are not plainly PASS, are NEW, or of which the change accepts something. A row that fails
    whatever a duet says is none of them, nor one of a test that BASE does not have.

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
            change = _accepted_change(accepted, row.key, name)
            # A doubt about the whole measurement is of no limit.
            if name not in doubted and "" not in doubted and change is None:
                continue
            values[name], origin[name] = getattr(row.limits, name), "limit"
            # Memory is judged by its limit first, and a count without a limit needs none.
            if change is not None and name != PEAK and change.value != NONE:
                values[name] = change.up_to if name == TIME else change.value
                origin[name] = "accepted"
            elif name in row.limits.origin:
                origin[name] = row.limits.origin[name]
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
    names += [name for name in EXACT if getattr(row.limits, name) == BASE]
    return names


def _accepted_change(accepted: Acceptances, key: str, limit: str) -> AcceptedChange | None:
    """The accepted change of a limit that compares with BASE."""
    newest = accepted.of(key, FORGIVES[limit], limit if limit in EXACT else "")
    return None if newest is None else newest[1]


# What its verdicts change


def with_duets(
    rows: Sequence[Row], verdicts: Mapping[str, DuetRow], accepted: Acceptances, *, strict: bool
) -> tuple[Row, ...]:
    """Return the rows with the verdicts of the duet, by row key. Other arguments as before."""
    failing = failing_in_themselves(rows, strict)
    judged = []
    for row in rows:
        verdict = verdicts.get(row.key)
        if verdict is None or verdict.outcome is Outcome.NEW or row.nodeid in failing:
            judged.append(row)
        else:
            judged.append(_with_duet(row, verdict, accepted))
    # All rows of a test fail with one of them, and no longer once none does.
    failing.update(row.nodeid for row in judged if is_failure(row.verdict, strict))
    return tuple(structs.replace(row, failed=row.nodeid in failing) for row in judged)


def _with_duet(row: Row, verdict: DuetRow, accepted: Acceptances) -> Row:
    results = [_up_to_accepted(row.key, result, verdict, accepted) for result in verdict.results]
    if not results:
        results.append(LimitResult("", Outcome.UNDECIDED, None, verdict.sentence))
    judged = {result.limit for result in results}
    if "" in judged:
        judged.update(compared_limits(row))
    # The conditions of the session are not those of the duet.
    if all(getattr(row.limits, name) is None for name in BY_NUMBER):
        judged.add("")
    results += [result for result in row.verdict.limits if result.limit not in judged]
    row = structs.replace(
        with_verdict(row, results), differences=verdict.differences or row.differences
    )
    pairs = verdict.pairs
    if pairs is None or len(pairs.log_ratios) < 2:
        return row
    paired = PairedChange(pairs.change, *pairs.bounds, len(pairs.log_ratios))
    return structs.replace(row, verdict=structs.replace(row.verdict, paired=paired))


def _up_to_accepted(
    key: str, result: LimitResult, verdict: DuetRow, accepted: Acceptances
) -> LimitResult:
    """The result of the duet, or ACCEPTED where the change accepts it up to its size."""
    limit, figure = result.limit, FORGIVES.get(result.limit)
    if result.code is Code.MEASURED_DIFFERENTLY:
        limit, figure = TIME, "measured"
    if figure is None:
        return result
    newest = accepted.of(key, figure, limit if figure == "limit" else "")
    if newest is None:
        return result
    file, change = newest
    if figure == "memory":
        too_much = verdict.head_peak > parse_bytes(change.up_to or "")
    else:
        # The duet judged time and counts up to what is accepted.
        too_much = figure != "measured" and change.value != NONE
    if too_much and result.outcome is not Outcome.PASS:
        return result
    reason = f"{limit} accepted ({file.who}: {file.reason}); {result.reason}"
    return LimitResult(limit, Outcome.ACCEPTED, result.code, reason)


# Against the oldest revision of the reference


def crept_limits(
    row: Row, verdict: DuetRow, accepted: Acceptances, baseline: Baseline
) -> dict[str, Limits]:
    """Return the limits that head is above over its reference, and did not fail against BASE.

    By the oldest revision of the reference. Steps that each pass may add up to more than a limit.
    """
    references = {}
    if row.measurement is not None and accepted.of(row.key, "time") is None:
        runs = baseline.reference_runs(row)
        if _crept_in_time(verdict, runs):
            references[TIME] = runs
    growth = row.limits.max_peak_regression
    if row.footprint is not None and growth and accepted.of(row.key, "memory") is None:
        runs = baseline.reference_runs(row, "memory")
        if _crept_in_memory(verdict, growth, runs):
            references[PEAK] = runs
    limits: dict[str, Limits] = {}
    for name, runs in references.items():
        revision = str(runs[0].process.revision)
        of_row = limits.get(revision, Limits(origin=row.limits.origin))
        limits[revision] = structs.replace(of_row, **{name: getattr(row.limits, name)})
    return limits


def _crept_in_time(verdict: DuetRow, reference: Sequence[PastRow]) -> bool:
    """True if head is slower than its reference by more than the limit."""
    pairs = verdict.pairs
    if pairs is None or pairs.outcome not in (Outcome.PASS, Outcome.UNDECIDED) or not reference:
        return False
    changes = []
    for head in verdict.head:
        if head.measurement is not None:
            changes.append(against_reference(head.measurement, times_of(reference)).log_ratio)
    return fmean(changes) > pairs.limit


def _crept_in_memory(verdict: DuetRow, limit: str, reference: Sequence[PastRow]) -> bool:
    """True if the peak of head grew over its reference by more than the limit."""
    passed = [result.limit for result in verdict.results if result.outcome is Outcome.PASS]
    if PEAK not in passed or not reference:
        return False
    greatest = max(max(peaks_of(footprint)) for footprint in memory_of(reference))
    return verdict.head_peak > parse_growth(limit).most(greatest)


def with_creep(row: DuetRow, oldest: DuetRow) -> DuetRow:
    """Return a row of a duet with BASE, after one with the oldest revision."""
    results = []
    for result in oldest.results:
        reason = f"against the oldest revision of the reference: {result.reason}"
        code = Code.CREPT if result.outcome is Outcome.FAIL else result.code
        results.append(LimitResult(result.limit, result.outcome, code, reason))
    if not results:
        results.append(LimitResult(TIME, Outcome.UNDECIDED, None, oldest.sentence))
    return replace(_instead(row, results), pairs=oldest.pairs or row.pairs, oldest=oldest)


def not_checked(row: DuetRow, limits: Limits, why: str) -> DuetRow:
    """Return a row that is above `limits` over its reference, if that is all."""
    results = []
    for name, word, code in ((TIME, "slower", Code.LOOKS_SLOWER), (PEAK, "larger", None)):
        if getattr(limits, name) is not None:
            reason = f"{word} than its reference, and its oldest revision cannot be measured: {why}"
            results.append(LimitResult(name, Outcome.UNDECIDED, code, reason))
    return _instead(row, results)


def _instead(row: DuetRow, results: Sequence[LimitResult]) -> DuetRow:
    """A row with these results in place of those of the same limits."""
    every = (*row.results, *results)
    return replace(row, decided={result.limit: result for result in every})
