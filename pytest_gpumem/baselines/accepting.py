"""What may be accepted of a row, and what an acceptance forgives. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from pytest_gpumem.baselines.acceptances import (
    NONE,
    Acceptances,
    AcceptedChange,
    Figure,
    share_text,
)
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.limits import COUNTS, relative
from pytest_gpumem.limits import LIMITS, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import LimitResult, Row
from pytest_gpumem.units import format_bytes, format_share, parse_bytes, parse_share, short_bytes

ROUNDING = 1e-9  # of shares that are written in percent
FIGURES: Mapping[str, Figure] = {
    "max_regression": "time",
    "max_peak_regression": "memory",
    **dict.fromkeys(COUNTS, "limit"),
}
"""By the name of a limit that compares with earlier runs: the figure that forgives it."""


def count_text(limit: str, row: Row) -> str | None:
    """Return a count of a row as its limit is written; None if it is not known."""
    if row.measurement is None:
        return None
    count = COUNTS[limit](row.measurement)
    return None if isinstance(count, str) else LIMITS[limit].parse(count)


def changes_of(row: Row, slow_down: float | None = None) -> Iterator[AcceptedChange]:
    """Yield the changes of a row that its verdict asks to accept, up to its figures.

    `slow_down`: as a duet measured it, as a share; None: that of the verdict.
    """
    for result in row.verdict.limits:
        figure = FIGURES.get(result.limit)
        if result.code is Code.MEASURED_DIFFERENTLY:
            yield AcceptedChange(row.key, "measured")
        if figure is None or result.outcome is not Outcome.FAIL:
            continue
        if figure == "time":
            comparison = row.verdict.comparison
            if slow_down is None and comparison is not None:
                slow_down = comparison.delta
            if slow_down is not None:
                yield AcceptedChange(row.key, figure, share_text(slow_down))
        elif figure == "memory":
            if row.footprint is not None:
                peak = format_bytes(max(peaks_of(row.footprint)))
                yield AcceptedChange(row.key, figure, peak)
        elif result.limit in relative(row.limits):
            count = count_text(result.limit, row)
            if count is not None:
                yield AcceptedChange(row.key, figure, f"{result.limit}={count}")


def absolute_limits(row: Row) -> list[str]:
    """Return the limits of a row that fail and that no acceptance forgives: the test has them."""
    names = []
    for result in row.verdict.limits:
        if result.outcome is Outcome.FAIL and result.limit:
            compares = FIGURES.get(result.limit) in ("time", "memory")
            if not compares and result.limit not in relative(row.limits):
                names.append(result.limit)
    return names


def command(row: Row) -> str:
    """Return the command that accepts what `changes_of` yields of a row."""
    words = ["gpumem", "accept", row.key]
    for change in changes_of(row):
        if change.figure == "limit":
            words += ["--change", change.up_to or ""]
        else:
            value = "" if change.up_to is None else f"={change.up_to}"
            words += ["--change", f"{change.figure}{value}"]
    return f"{shlex.join(words)} --reason '...'"


def accepted_results(
    row: Row,
    results: Iterable[LimitResult],
    acceptances: Acceptances,
    slow_down: float | None = None,
) -> list[LimitResult]:
    """Return the results about a row; a FAIL of a limit that is accepted so far is ACCEPTED.

    A FAIL that is of no limit stands: a failed assertion, a crash, a lost context.
    `slow_down`: least one that a duet proves, as a share; None: that of the verdict.
    """
    after = []
    for result in results:
        figure = FIGURES.get(result.limit)
        if figure is not None and result.outcome is Outcome.FAIL:
            limit = result.limit if figure == "limit" else ""
            change = acceptances.of(row.key, figure, limit)
            file = acceptances.file_of(row.key, figure, limit)
            if change is not None and file is not None and _forgives(change, row, slow_down):
                reason = f"{result.limit} accepted ({file.who}: {file.reason})"
                if result.reason:
                    reason = f"{reason}; {result.reason}"
                after.append(LimitResult(result.limit, Outcome.ACCEPTED, result.code, reason))
                continue
        after.append(result)
    return after


def _forgives(change: AcceptedChange, row: Row, slow_down: float | None) -> bool:
    """Return whether the figure of a row is within an accepted change."""
    if change.figure == "time":
        if slow_down is None and row.verdict.comparison is not None:
            slow_down = row.verdict.comparison.delta
        return slow_down is not None and slow_down <= parse_share(change.up_to or "") + ROUNDING
    if change.figure == "memory":
        most = parse_bytes(change.up_to or "")
        return row.footprint is not None and max(peaks_of(row.footprint)) <= most
    count = count_text(change.limit, row)
    if count is None or change.limit not in relative(row.limits):
        return False
    return change.value == NONE or count_of(count) <= count_of(change.value)


def in_words(row: Row, slow_down: float | None = None) -> list[str]:
    """Return what is accepted of a row, such as "+8.41 %". `slow_down`: as of `changes_of`."""
    words = []
    for name in row.verdict.accepted:
        figure = FIGURES[name]
        if figure == "time":
            if slow_down is None and row.verdict.comparison is not None:
                slow_down = row.verdict.comparison.delta
            words.append("slower" if slow_down is None else format_share(slow_down, sign=True))
        elif figure == "memory" and row.footprint is not None:
            words.append(f"a peak of {short_bytes(max(peaks_of(row.footprint)))}")
        else:
            words.append(f"{name} {count_text(name, row)}")
    return words
