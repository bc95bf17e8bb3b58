"""What may be accepted of a row. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from pytest_gpumem.baselines.acceptances import AcceptedChange, Figure, share_text
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.limits import EXACT, exact_count, relative
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_bytes, parse_margin

FIGURES: Mapping[str, Figure] = {
    "max_regression": "time",
    "max_peak_regression": "memory",
    **dict.fromkeys(EXACT, "limit"),
}
"""By the name of a limit that compares with earlier runs: the figure that forgives it."""


def changes_of(row: Row) -> Iterator[AcceptedChange]:
    """Yield the changes of a row that its verdict asks to accept."""
    verdict = row.verdict
    for result in verdict.limits:
        figure = FIGURES.get(result.limit)
        if result.code is Code.MEASURED_DIFFERENTLY:
            yield AcceptedChange(row.key, "measured")
        elif figure is None or result.outcome is not Outcome.FAIL:
            continue
        elif figure == "time":
            change = _slow_down(row)
            if change is not None:
                yield AcceptedChange(row.key, figure, share_text(change))
        elif figure == "memory":
            if row.footprint is not None:
                peak = format_bytes(max(peaks_of(row.footprint)))
                yield AcceptedChange(row.key, figure, peak)
        elif result.limit in relative(row.limits) and row.measurement is not None:
            count = exact_count(row.measurement, result.limit)
            if not isinstance(count, str):
                value = LIMITS[result.limit].parse(count)
                yield AcceptedChange(row.key, figure, f"{result.limit}={value}")


def _slow_down(row: Row) -> float | None:
    """Return the measured slow-down of a row and its limit on top, as a share, or None.

    A duet could not decide about a limit that is the measured slow-down itself.
    """
    verdict, written = row.verdict, row.limits.max_regression
    if written is None or row.measurement is None:
        return None
    limit = parse_margin(written).over(row.measurement.latency)
    if verdict.paired is not None:
        return (1 + verdict.paired.change) * (1 + limit) - 1
    if verdict.comparison is not None:
        return (1 + verdict.comparison.delta) * (1 + limit) - 1
    return None


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
            words += ["--change", f"{change.figure}={change.up_to}".removesuffix("=None")]
    return f"{shlex.join(words)} --reason '...'"
