"""The limits on the calls of a test's body, or of a part of it. Counts are exact: a limit holds or does not.

A limit relative to the baseline is held against the newest saved run. Where runs of one revision have different counts, the count varies
with unchanged code: a count above all of them is UNDECIDED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pytest_gpumem.judging.finding import Finding, against_most, counted, find
from pytest_gpumem.limits import count_of, over_baseline
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.calls import Calls
from pytest_gpumem.units import short_bytes

SHOWN = 5  # lines that wait which a sentence names


class PastCalls(NamedTuple):
    """The calls of a saved run."""

    calls: Calls
    revision: str | None  # revision of its code; None if unknown


def _lines(calls: Calls) -> str:
    lines = [f"{wait.place} {wait.count} x {wait.call}" for wait in calls.lines]
    more = f" and {counted(len(lines) - SHOWN, 'more line')}" if len(lines) > SHOWN else ""
    return f": {', '.join(lines[:SHOWN])}{more}" if lines else ""


FIGURES: Mapping[str, tuple[Callable[[Calls], int], Callable[[int], str]]] = {
    "max_kernels": (lambda calls: calls.kernels, lambda count: counted(count, "kernel")),
    "max_copies": (lambda calls: calls.copied, lambda count: counted(count, "copy")),
    "max_copied_bytes": (
        lambda calls: calls.copied_bytes,
        lambda count: f"{short_bytes(count)} copied",
    ),
    "max_waits": (
        lambda calls: calls.waits,
        lambda count: f"the host waits {counted(count, 'time')}",
    ),
}
"""By limit: its figure, and the figure in words."""


def judge_calls(
    name: str,
    calls: Calls,
    limit: str,
    written: str,
    past: Sequence[PastCalls],
    no_history: str | None,
    of: str,
) -> Finding:
    """The finding on one limit.
    `name`: of the limit.
    `limit`: its name, value and origin in words; `written`: its value.
    `past`: the saved runs that counted, oldest first.
    `no_history`: why there is none.
    `of`: what the runs of `past` are, in words.
    """
    figure, words = FIGURES[name]
    count = figure(calls)
    shown = words(count) + (_lines(calls) if name == "max_waits" else "")
    if (growth := over_baseline(written)) is None:
        return _certain(against_most(limit, count, count_of(written), shown), calls, limit)
    known = [one for one in past if one.calls.not_counted is None]
    if not known:
        return find(
            Outcome.NEW,
            "no history",
            Code.NO_BASELINE,
            limit=limit,
            why=no_history or f"no run of {of} counted calls",
        )
    counts = [figure(one.calls) for one in known]
    if varies(known, figure):
        most = growth.most(max(counts))
        if count > most:
            low, high = words(min(counts)), words(max(counts))
            return find(
                Outcome.UNDECIDED,
                "varies",
                Code.NOISY,
                figure=shown,
                limit=limit,
                low=low,
                high=high,
            )
    else:
        most = growth.most(counts[-1])
    return _certain(
        against_most(limit, count, most, f"{shown}, {words(counts[-1])} in {of}"), calls, limit
    )


def _certain(found: Finding, calls: Calls, limit: str) -> Finding:
    """The finding, unless calls were missed: there are at least as many as were counted."""
    if calls.not_counted is None or found.outcome is Outcome.FAIL:
        return found
    return find(
        Outcome.UNDECIDED, "not counted", Code.CONDITIONS, limit=limit, why=calls.not_counted
    )


def varies(past: Sequence[PastCalls], figure: Callable[[Calls], int]) -> bool:
    """True if runs of one revision, without other changes, have different counts."""
    seen: dict[str, int] = {}
    for one in past:
        known = one.revision is not None and not one.revision.endswith("-dirty")
        if known and seen.setdefault(str(one.revision), figure(one.calls)) != figure(one.calls):
            return True
    return False
