"""Rows that are not decided, grouped by what decides them: one sentence a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import ENOUGH

_SAVE, _DUET = "pytest --gpumem --gpumem-save", "gpumem duet BASE"

OF_A_RUN: Mapping[Code, tuple[str, str]] = MappingProxyType(
    {
        Code.LOOKS_SLOWER: ("looks slower than allowed", f"to decide: {_DUET}"),
        Code.NOISY: ("is too close to its limit", f"to decide: {_DUET}"),
        Code.TOO_FEW_RUNS: ("needs {runs}", f"{_SAVE}, or at once: {_DUET}"),
        Code.MEASURED_DIFFERENTLY: ("is measured differently than its baseline", f"to compare: {_DUET}; to begin anew: gpumem accept"),
        Code.OTHER_CARD_VARIANT: ("has a baseline of another variant of this card only", f"{_SAVE}, or {_DUET}"),
        Code.NO_BASELINE: ("has nothing to compare with", f"{_SAVE} stores this state as the baseline"),
        Code.ACCEPTED: ("was accepted, and has no run since", _SAVE),
    }
)
"""By the code of a verdict of a session: what holds of one such row, and what to do."""

OF_FILES: Mapping[Code, tuple[str, str]] = MappingProxyType(
    {
        Code.LOOKS_SLOWER: ("looks slower than allowed", "more runs a side, or gpumem duet, decide"),
        Code.NOISY: ("is too close to its limit", "more runs a side, or gpumem duet, decide"),
        Code.TOO_FEW_RUNS: ("needs {runs} of the base", "a quoted pattern names several files, such as 'base-*.json'"),
        Code.MEASURED_DIFFERENTLY: ("is measured differently on the two sides", "gpumem duet compares them"),
        Code.OTHER_CARD_VARIANT: ("is of another variant of this card on each side", "measure both sides on one card"),
    }
)
"""The same of a comparison of files."""


def remedies(rows: Iterable[Row], of: Mapping[Code, tuple[str, str]] = OF_A_RUN) -> list[str]:
    """Such as "UNDECIDED: 9 rows need 2 more runs: pytest --gpumem --gpumem-save, or at once: gpumem duet BASE".

    Rows whose reason is their own, such as the conditions of the measurement, are grouped by it. No full stops.
    """
    groups: dict[tuple[Outcome, str, str], list[Row]] = {}
    for row in rows:
        verdict = row.verdict
        if verdict.outcome not in (Outcome.UNDECIDED, Outcome.NEW) or row.test_error is True:
            continue
        what, remedy = of.get(verdict.code, ("", "")) if verdict.code is not None else ("", "")
        if not what:
            what, remedy = "", verdict.reason
        runs = max(1, ENOUGH - verdict.comparison.runs) if verdict.comparison is not None else ENOUGH
        groups.setdefault((verdict.outcome, what.format(runs=counted(runs, "more run")), remedy), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: group[0][0].rank)
    return [_sentence(outcome, what, remedy, found) for (outcome, what, remedy), found in ordered]


def _sentence(outcome: Outcome, what: str, remedy: str, rows: Sequence[Row]) -> str:
    count = counted(len(rows), "row")
    if not what:
        return f"{outcome.value}: {count}: {remedy}" if len(rows) > 1 else f"{outcome.value} {rows[0].key}: {remedy}"
    return f"{outcome.value}: {count} {what if len(rows) == 1 else _plural(what)}: {remedy}"


def _plural(what: str) -> str:
    """The predicate of several rows."""
    verb, _, rest = what.partition(" ")
    rest = rest.replace("its ", "their ")
    return f"{ {'is': 'are', 'has': 'have', 'was': 'were'}.get(verb, verb.removesuffix('s')) } {rest}".replace("and has", "and have")
