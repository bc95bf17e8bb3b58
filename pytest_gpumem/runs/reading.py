"""The pairs of each measurement, from the finished processes of a duet, or the reason why it has none. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.judging.latencies import corrected_latencies, readings
from pytest_gpumem.judging.paired import Paired
from pytest_gpumem.judging.regression import changed_work
from pytest_gpumem.limits import of_the_test
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.difference import Difference
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row, covers, selects
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord
from pytest_gpumem.settings import flag_of
from pytest_gpumem.units import parse_margin

SIDES = (BASE, HEAD)
MEASURING = ("device", "mode", "sampler", "placements", "precision", "budget", "total_budget")
"""Settings that base and head must share: latencies under different ones are not comparable."""
WAY = (
    "mode",
    "sampler",
)  # properties of a measurement that change its latency and can be imposed on it
Way = Mapping[str, str]  # a value for each of `WAY`
DEFAULT_REGRESSION = "1%"  # default allowed slow-down of a test


@dataclass(frozen=True)
class DuetVerdict:
    """The verdict on one measurement."""

    key: str
    outcome: Outcome | None
    """Without `paired`: FAIL if its test fails in head alone, or head cannot be measured as base is; UNDECIDED, by its conditions; None,
    because there is nothing to compare."""
    sentence: str
    paired: Paired | None = None  # the figures behind it
    base_latency: float | None = None  # seconds: the median over base's processes
    head_latency: float | None = None
    new: bool = False  # base does not have it
    differences: tuple[
        Difference, ...
    ] = ()  # of a FAIL: head's from base, by the last process of each


@dataclass(frozen=True)
class RowFilter:
    """The measurements to compare; all if both are None."""

    tests: frozenset[str] | None = None
    """Node ids; each selects as on pytest's command line, such as a test with all its
    parameters."""
    keys: frozenset[str] | None = None  # row keys

    @staticmethod
    def of(rows: Iterable[Row]) -> RowFilter:
        """These rows and no others of their tests."""
        every = list(rows)
        return RowFilter(
            frozenset(row.nodeid for row in every), frozenset(row.key for row in every)
        )

    def holds(self, nodeid: str, key: str) -> bool:
        """Whether a row is among them."""
        if self.keys is not None:
            return key in self.keys
        return self.tests is None or any(selects(name, nodeid) for name in self.tests)

    @property
    def names(self) -> list[str]:
        """The requested names, without those that another one selects too; empty for everything."""
        if self.keys is not None:
            return sorted(self.keys)
        every = sorted(self.tests or ())
        return [
            name
            for name in every
            if not any(other != name and selects(other, name) for other in every)
        ]

    def missing(self, rows: Iterable[Row]) -> list[str]:
        """The requested names that select none of these rows."""
        every = list(rows)
        if self.keys is not None:
            return sorted(self.keys - {row.key for row in every})
        return [
            name
            for name in sorted(self.tests or ())
            if not any(selects(name, row.nodeid) for row in every)
        ]


Rounds = Mapping[
    int, Mapping[str, ProcessRecord]
]  # by round and side, the last attempt of each process


def rows_of(process: ProcessRecord, wanted: RowFilter) -> dict[str, Row]:
    """The wanted rows of a process by key, without rows of footprints alone: a duet compares times."""
    of_time = (row for row in process.rows if row.measurement is not None or row.footprint is None)
    return {row.key: row for row in of_time if wanted.holds(row.nodeid, row.key)}


def problem(row: Row | None, process: ProcessRecord) -> str | None:
    """Why a row of a process cannot be compared whatever its conditions; None if it can. A test that only broke limits of its own, by this
    row or another, was measured all the same."""
    if row is None:
        return "it measured nothing"
    if row.measurement is None:
        return row.verdict.reason
    return "its test failed" if row.failed and not _by_limits(row.nodeid, process) else None


def _by_limits(nodeid: str, process: ProcessRecord) -> bool:
    """True if verdicts fail a test, and no assertion or error of its own."""
    rows = [row for row in process.rows if row.nodeid == nodeid and row.measured_something]
    return any(is_failure(row.verdict, strict=False) for row in rows) and not any(
        row.test_error is True for row in rows
    )


def _fails(key: str, row: Row | None, process: ProcessRecord) -> bool:
    """Whether a process crashed, or the test of a row failed in it, and not by its limits alone."""
    if process.error is not None:
        return True
    if row is not None:
        return row.failed and not _by_limits(row.nodeid, process)
    nodeid = _nodeid_in(key, process)
    return (
        nodeid is not None
        and process.outcomes[nodeid][0] == "failed"
        and not _by_limits(nodeid, process)
    )


def trouble(process: ProcessRecord, wanted: RowFilter, open_: Sequence[str] | None) -> str | None:
    """Why a process should be repeated: it crashed, or a row that still matters is missing or was measured under bad conditions.
    `open_`: keys that are still undecided; None before the first pair is complete.
    """
    if process.error is not None:
        return process.error
    rows = rows_of(process, wanted)
    for key in rows if open_ is None else open_:
        row = rows.get(key)
        if open_ is not None and (why := problem(row, process)) is not None:
            return f"{key}: {_reason(process, key, why)}"
        if row is not None and row.verdict.code is Code.CONDITIONS:
            return f"{key}: {row.verdict.reason}"
    return None


def others_on_the_gpu(process: ProcessRecord) -> bool:
    """Whether some row saw another process on the device."""
    for row in process.rows:
        if row.measurement is not None:
            seen = (
                *row.measurement.conditions,
                *((row.measurement.during,) if row.measurement.during else ()),
            )
            if any(conditions.other_processes for conditions in seen):
                return True
    return False


def check_alike(base: ProcessRecord, head: ProcessRecord) -> None:
    """See that both sides measure in the same way. Raises `RunError`: a setting differs; names it and both values."""
    for name in MEASURING:
        if (
            name in base.settings
            and name in head.settings
            and base.settings[name] != head.settings[name]
        ):
            raise RunError(
                f"base and head measure in different ways: {name} is {base.settings[name]!r} in base and {head.settings[name]!r} in head; "
                f"give {flag_of(name)} among pytest's arguments"
            )


def unpaired(base: ProcessRecord, head: ProcessRecord, wanted: RowFilter) -> dict[str, DuetVerdict]:
    """The measurements of a first pair that cannot be compared: on one side only, failed on one side, or measured in another way."""
    rows = {BASE: rows_of(base, wanted), HEAD: rows_of(head, wanted)}
    every = dict.fromkeys([*rows[BASE], *rows[HEAD]])
    found = {
        key: one
        for key in every
        if (one := _unpaired(key, base, head, rows[BASE].get(key), rows[HEAD].get(key))) is not None
    }
    for key in wanted.missing(row for side in rows.values() for row in side.values()):
        missing = "there is no such measurement"
        reasons = [
            f"{side}: {_reason(process, key, missing)}"
            for side, process in ((BASE, base), (HEAD, head))
        ]
        found[key] = DuetVerdict(
            key, _failure_of_head(key, base, head, None, None), "; ".join(reasons)
        )
    return found | _failures_without_rows(base, head, wanted, {*every, *found})


def _unpaired(
    key: str, base: ProcessRecord, head: ProcessRecord, was: Row | None, now: Row | None
) -> DuetVerdict | None:
    """The verdict on one measurement that cannot be compared; None if it can. `was`, `now`: its rows."""
    sides = ((BASE, base, was), (HEAD, head, now))
    reasons = [
        f"{side}: {_reason(process, key, why)}"
        for side, process, row in sides
        if (why := problem(row, process)) is not None
    ]
    if not reasons:
        assert was is not None
        assert now is not None
        changed = _other_way(_of(was), _of(now))
        return None if changed is None else DuetVerdict(key, Outcome.FAIL, changed)
    absent = was is None and _nodeid_in(key, base) is None
    if absent and now is not None:
        # A row of head may be one of base under another label.
        kept = {one.key for one in head.rows}
        of_test = (
            one.key for one in base.rows if one.nodeid == now.nodeid and one.measurement is not None
        )
        if instead := [one for one in of_test if one not in kept]:
            reasons.append(f"base measures {', '.join(instead)} in that test, which head does not")
            absent = False
    outcome = _failure_of_head(key, base, head, was, now)
    return DuetVerdict(key, outcome, "; ".join(reasons), new=absent and outcome is None)


def _failure_of_head(
    key: str, base: ProcessRecord, head: ProcessRecord, was: Row | None, now: Row | None
) -> Outcome | None:
    """FAIL if the test fails in head alone."""
    return Outcome.FAIL if _fails(key, now, head) and not _fails(key, was, base) else None


def _failures_without_rows(
    base: ProcessRecord, head: ProcessRecord, wanted: RowFilter, keys: Collection[str]
) -> dict[str, DuetVerdict]:
    """Tests and files without a measurement that fail in head alone, such as a file that cannot be imported."""
    if wanted.keys is not None:
        return {}
    return {
        nodeid: DuetVerdict(nodeid, Outcome.FAIL, f"head: {_reason(head, nodeid, outcome)}")
        for nodeid, (outcome, _) in head.outcomes.items()
        if outcome == "failed"
        and wanted.holds(nodeid, nodeid)
        and not any(covers(nodeid, key) for key in keys)
        and not _fails(nodeid, None, base)
    }


def ways(base: ProcessRecord, head: ProcessRecord, wanted: RowFilter) -> dict[str, Way]:
    """By row key, the mode and sampler of base for measurements that differ in head: both sides can measure with them."""
    theirs, ours = rows_of(base, wanted), rows_of(head, wanted)
    both = [
        key
        for key, row in theirs.items()
        if problem(row, base) is None and key in ours and problem(ours[key], head) is None
    ]
    return {
        key: {name: getattr(_of(theirs[key]), name) for name in WAY}
        for key in both
        if _other_way(_of(theirs[key]), _of(ours[key])) is not None
    }


def _of(row: Row) -> Measurement:
    assert row.measurement is not None
    return row.measurement


def _other_way(base: Measurement, head: Measurement) -> str | None:
    """The difference in mode or sampler that makes two latencies incomparable; None if there is none."""
    for name in WAY:
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            return f"the measurement itself has changed: {name} was {was} in base and is {now} in head, which may be the slow-down itself"
    return None


def changes(base: Row, head: Row) -> list[str]:
    """Differences of head's work from base's, which a reader of the comparison must know."""
    was, now = _of(base), _of(head)
    target = [f"it now measures {now.target}, not {was.target}"] if was.target != now.target else []
    return target + [
        f"its {name} has changed from {then} to {value}"
        for name, then, value in changed_work(was, now)
    ]


def _nodeid_in(key: str, process: ProcessRecord) -> str | None:
    """The test or file among those that did not pass in a process which a key, or a name that was asked for, is of."""
    for nodeid in process.outcomes:
        # A file that cannot be imported fails all tests in it.
        if covers(nodeid, key) or selects(key, nodeid):
            return nodeid
    return None


def _reason(process: ProcessRecord, key: str, otherwise: str) -> str:
    """Why a process lacks a row; `otherwise` if it gives no reason."""
    if process.error is not None:
        return f"crashed: {process.error}"
    if (nodeid := _nodeid_in(key, process)) is None:
        return otherwise
    outcome, why = process.outcomes[nodeid]
    if key.startswith(f"{nodeid}::"):
        return why
    return f"{outcome}, {why}" if why else outcome


def delta_of(base: Row, head: Row, written: str | Mapping[str, str] | None) -> float:
    """The allowed slow-down as a share of base's latency: `written` for the row's key, else head's own limit; `written` on the command line
    stands for a limit that the test does not name itself. Who accepts a slower test changes its limit with it.
    """
    if isinstance(written, Mapping):
        given = written.get(head.key)
    else:
        given = None if of_the_test(head.limits.origin.get("max_regression")) else written
    margin = parse_margin(given or head.limits.max_regression or DEFAULT_REGRESSION)
    return margin.over(_of(base).latency)


def log_ratio(base: Row, head: Row) -> float:
    """Logarithm of head's latency over base's, both corrected to the same launch overhead."""
    was, now = corrected_latencies([*readings(_of(base)), *readings(_of(head))])
    return math.log(now / was)


def pair_of(key: str, number: int, sides: Mapping[str, ProcessRecord]) -> float | DuetVerdict:
    """The log-ratio of one measurement in one round that measured it, or why it has none.
    `key`: `Row.key` of a measurement that is still open.
    """
    rows = {side: next((row for row in sides[side].rows if row.key == key), None) for side in SIDES}
    for side, row in rows.items():
        # Base comes first: a failure on both sides is not head's.
        failed = Outcome.FAIL if side == HEAD and _fails(key, row, sides[side]) else None
        if sides[side].error is not None:
            return DuetVerdict(
                key, failed, f"{side} crashed in round {number}: {sides[side].error}"
            )
        if (why := problem(row, sides[side])) is not None:
            return DuetVerdict(
                key, failed, f"{side} in round {number}: {_reason(sides[side], key, why)}"
            )
        if row is not None and row.verdict.code is Code.CONDITIONS:
            return DuetVerdict(
                key,
                Outcome.UNDECIDED,
                f"{side} in round {number}, also when repeated: {row.verdict.reason}",
            )
    base, head = rows[BASE], rows[HEAD]
    assert base is not None
    assert head is not None
    if (changed := _other_way(_of(base), _of(head))) is not None:
        return DuetVerdict(key, Outcome.FAIL, f"round {number}: {changed}")
    return log_ratio(base, head)


def families(rounds: Rounds, wanted: RowFilter) -> tuple[list[str], dict[str, DuetVerdict]]:
    """The measurements that are judged together, and the ones that are not, by the first pair alone. The number must not depend on anything
    that is compared, because Holm's procedure rests on it."""
    base, head = rounds[1][BASE], rounds[1][HEAD]
    if base.error or head.error:
        side, process = (BASE, base) if base.error else (HEAD, head)
        rows = {**rows_of(base, wanted), **rows_of(head, wanted)}
        every = [*rows, *wanted.missing(rows.values())]
        outcome = None if base.error else Outcome.FAIL
        return [], {
            key: DuetVerdict(key, outcome, f"{side} crashed: {process.error}") for key in every
        }
    out = unpaired(base, head, wanted)
    return [key for key in rows_of(head, wanted) if key not in out], out


def same_tests(keys: Sequence[str], process: ProcessRecord) -> list[str]:
    """Node ids of the rows with these keys."""
    wanted = set(keys)
    return list(dict.fromkeys(row.nodeid for row in process.rows if row.key in wanted))
