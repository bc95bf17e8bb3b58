"""The acceptances that concern a row: those that its verdict asks for, and those of its counts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import BY_SIZE, NONE, Acceptances, AcceptedChange, Figure
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.limits import EXACT, exact_count, relative
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_bytes, parse_margin

FORGIVES: Mapping[str, Figure] = {
    "max_regression": "time",
    "max_peak_regression": "memory",
    **dict.fromkeys(EXACT, "limit"),
}
"""By the name of a limit that compares with earlier runs: the figure that forgives it."""


def with_accepted_counts(row: Row, acceptances: Acceptances) -> Row:
    """Return the row with each accepted count in place of the limit "base" on it."""
    values: dict[str, str | None] = {}
    for name in relative(row.limits):
        newest = acceptances.of(row.key, "limit", name)
        if newest is not None:
            change = newest[1]
            values[name] = None if change.value == NONE else change.value
    if not values:
        return row
    origin = {**row.limits.origin, **dict.fromkeys(values, "accepted")}
    return replace(row, limits=replace(row.limits, **values, origin=origin))


def changes_of(row: Row) -> Iterator[AcceptedChange]:
    """Yield the changes that the verdict of a row asks to accept; none where its test failed."""
    if row.test_error:
        return
    for result in row.verdict.limits:
        if result.outcome is Outcome.ACCEPTED:
            continue
        if result.code is Code.MEASURED_DIFFERENTLY:
            yield AcceptedChange(row.key, "measured")
        elif result.outcome is Outcome.FAIL and result.limit in FORGIVES:
            up_to = _measured(row, result.limit)
            if up_to is not None:
                yield AcceptedChange(row.key, FORGIVES[result.limit], up_to)


def _measured(row: Row, limit: str) -> str | None:
    if FORGIVES[limit] == "time":
        return _slow_down(row)
    if FORGIVES[limit] == "memory":
        return None if row.footprint is None else format_bytes(max(peaks_of(row.footprint)))
    if limit in relative(row.limits) and row.measurement is not None:
        count = exact_count(row.measurement, limit)
        if not isinstance(count, str):
            return f"{limit}={LIMITS[limit].parse(count)}"
    return None


def _slow_down(row: Row) -> str | None:
    """Return the measured slow-down, rounded up, with the limit on top, so that a duet decides."""
    verdict, written = row.verdict, row.limits.max_regression
    if written is None or row.measurement is None or verdict.change is None:
        return None
    limit = parse_margin(written).over(row.measurement.latency)
    change = (1 + verdict.change) * (1 + limit) - 1
    return f"{math.ceil(max(change, 0.0) * 1e4 - 1e-6) / 100:g}%"


def absolute_limits(row: Row) -> list[str]:
    """Return the failing limits that no acceptance forgives."""
    names = []
    for result in row.verdict.limits:
        if result.outcome is Outcome.FAIL and result.limit:
            compares = FORGIVES.get(result.limit) in BY_SIZE or result.limit in relative(row.limits)
            if not compares:
                names.append(result.limit)
    return names


def command(row: Row) -> str:
    words = ["gpumem", "accept", row.key]
    for change in changes_of(row):
        what = change.up_to or change.figure
        if change.figure in BY_SIZE:
            what = f"{change.figure}={what}"
        words += ["--change", what]
    return f"{shlex.join(words)} --reason '...'"
