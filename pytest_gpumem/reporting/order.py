"""The order in which a reader wants rows: by kind of test, what got worse first, then the slowest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from pytest_gpumem.records.behaviour import Behaviour, behaviours, function_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Code, Outcome

SLOWER, UNDECIDED, FINE = 1, 2, 3


def attention(row: Row) -> int:
    """How soon a row is to be looked at, 0 first."""
    verdict = row.verdict
    if row.failed or verdict.outcome is Outcome.FAIL:
        return 0
    if verdict.code is Code.LOOKS_SLOWER or (verdict.comparison is not None and verdict.comparison.low > 0):
        return SLOWER
    return UNDECIDED if verdict.outcome is Outcome.UNDECIDED else FINE


def by_function(rows: Iterable[Row]) -> list[list[Row]]:
    """Neighbouring rows of one test function together."""
    return [list(of) for _, of in groupby(rows, key=function_of)]


def ordered(rows: Sequence[Row], facts: DeviceFacts) -> list[tuple[Behaviour, list[Row]]]:
    """Rows by kind of test. Kinds, the tests of a kind and the rows of a test: what got worse first, then the slowest."""
    kinds = behaviours(rows, facts)
    tests: dict[str, list[Row]] = {}
    for row in rows:
        tests.setdefault(function_of(row), []).append(row)
    groups: dict[Behaviour, list[list[Row]]] = {}
    for function, of in tests.items():
        groups.setdefault(kinds[function], []).append(sorted(of, key=_rank))
    found = [(kind, [row for of in sorted(group, key=lambda of: _rank(of[0])) for row in of]) for kind, group in groups.items()]
    return sorted(found, key=lambda group: (_rank(group[1][0])[0], Behaviour.NOTHING is group[0], _rank(group[1][0])[1]))


def _rank(row: Row) -> tuple[int, float]:
    return attention(row), -row.measurement.latency if row.measurement is not None else 0.0
