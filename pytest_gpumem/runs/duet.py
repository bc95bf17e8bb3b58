"""A duet: base and head in turn on one GPU, in pairs of processes, until each row is decided.

Each process measures all rows that are open. A pair under throttling or beside other work, or with
a crash or a failed test, is taken again for the rows that it is of, twice at most.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from pytest_gpumem.judging.duet import LOOKS
from pytest_gpumem.limits import of_the_test
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, covers
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.pairs import TIME, DuetVerdict, RowPairs
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, ProcessRecord, Turn
from pytest_gpumem.runs.rows import (
    RowFilter,
    bad_conditions,
    check_alike,
    fails,
    not_measured,
    reason_of,
    test_of,
    under_new_names,
    under_other_name,
)
from pytest_gpumem.runs.worktree import Side

ATTEMPTS = 3
DEFAULT_REGRESSION = "1%"  # allowed slow-down of a test without a limit
Pair = Mapping[str, ProcessRecord]  # by side


@dataclass(frozen=True)
class DuetResult:
    """The result of a duet, also of one that was stopped."""

    verdicts: tuple[DuetVerdict, ...]  # failures first
    processes: tuple[ProcessRecord, ...]  # all of them in their order
    strict: bool  # the ini file of head asks for strictness
    base_limits: Mapping[str, Limits]  # by row key, those of base
    skipped_in_base: frozenset[str]  # node ids


@dataclass(frozen=True)
class DuetProgress:
    """The progress of a duet."""

    pairs: int  # complete ones
    open: int  # rows that are not decided yet
    at_most: float | None = None  # seconds that are left if nothing is decided early
    note: str | None = None  # an event to print


def order_of(number: int) -> tuple[str, str]:
    """Return the order of a pair: a coin for each odd one, and the reverse for the next."""
    head_first = random.Random((number + 1) // 2).random() < 0.5
    if number % 2 == 0:
        head_first = not head_first
    return (HEAD, BASE) if head_first else (BASE, HEAD)


class Duet:
    """One duet, from the first process to the verdicts."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        processes: Processes,
        wanted: RowFilter,
        *,
        max_regression: str | None,
        on_progress: Callable[[DuetProgress], object],
    ) -> None:
        """Nothing is run yet.

        `wanted`: the rows. Of one with empty limits, the first pair reads the limits of base alone.
        `max_regression`: allowed slow-down of tests that have no limit in their code, as written.
        """
        self._sides = sides
        self._processes = processes
        self._wanted = wanted
        self._max_regression = max_regression
        self._on_progress = on_progress
        self._finished: list[ProcessRecord] = []
        self._begun = False  # the first pair has said which rows there are
        self._rows: dict[str, RowPairs] = {}
        self._others: dict[str, DuetVerdict] = {}  # of rows that cannot be compared
        self._base_limits: dict[str, Limits] = {}
        self._tests_of: dict[str, str] = {}  # node ids by key
        self._complete = 0  # pairs

    def play(self) -> DuetResult:
        """Measure until everything is decided.

        Raises `RunError`: the sides cannot be compared, or head's files changed meanwhile.
        """
        for number in range(1, LOOKS[-1] + 1):
            self._take_pair(number)
            self._complete = number
            if number in LOOKS or number == 1:  # a large tree takes a while to read
                self._check_unchanged()
            if not self._open():
                break
        self._check_unchanged()
        return self.result()

    def result(self) -> DuetResult:
        """Return the result so far."""
        verdicts = list(self._others.values())
        for row in self._rows.values():
            verdicts.append(row.verdict())
        verdicts.sort(key=lambda verdict: (verdict.outcome or Outcome.UNDECIDED).rank)
        strict = any(one.strict for one in self._finished if one.turn.side == HEAD)
        skipped = set()
        for process in self._finished:
            if process.turn.side == BASE:
                for nodeid, (outcome, _) in process.outcomes.items():
                    if outcome == "skipped":
                        skipped.add(nodeid)
        return DuetResult(
            tuple(verdicts),
            tuple(self._finished),
            strict,
            self._base_limits,
            frozenset(skipped),
        )

    def _open(self) -> list[RowPairs]:
        return [row for row in self._rows.values() if row.open]

    def _take_pair(self, number: int) -> None:
        """Measure what is open in one pair, and again what is in trouble."""
        pending: dict[str, str] | None = None  # by key, why a row has no pair of this number yet
        for attempt in range(1, ATTEMPTS + 1):
            pair = self._measure(number, attempt, pending)
            if not self._begun:
                crashed = pair[BASE].error or pair[HEAD].error
                if crashed and attempt < ATTEMPTS:
                    self._say_again(number, crashed)
                    continue
                self._begin(pair)
            waiting = self._open() if pending is None else [self._rows[key] for key in pending]
            pending = {}
            for row in waiting:
                why = self._take(row, pair)
                if why is not None:
                    pending[row.key] = why
            if not pending:
                return
            if attempt < ATTEMPTS:
                key, why = next(iter(pending.items()))
                self._say_again(number, f"{key}: {why}")
        for key in pending or ():
            self._give_up(self._rows[key], number, pair)

    def _say_again(self, number: int, why: str) -> None:
        self._report(f"pair {number} is taken again: {why}")

    def _measure(self, number: int, attempt: int, keys: Mapping[str, str] | None) -> Pair:
        """Run both processes of a pair. `keys`: of the rows to measure; None: all that are open."""
        tests: list[str] | None
        if not self._begun:
            tests = None if self._wanted.tests is None else sorted(self._wanted.tests)
        else:
            open_keys = [row.key for row in self._open()] if keys is None else list(keys)
            tests = list(dict.fromkeys(self._tests_of[key] for key in open_keys))
        pair = {}
        for side in order_of(number):
            side_tests = tests
            if side == BASE and tests is not None:
                side_tests = [under_other_name(test, self._wanted.old_names) for test in tests]
            process = self._processes.run(Turn(number, side), side_tests, attempt)
            if side == BASE:
                process = under_new_names(process, self._wanted.old_names)
            self._check_device(process)
            self._finished.append(process)
            pair[side] = process
            self._report()
        return pair

    def _begin(self, pair: Pair) -> None:
        """Take the rows that can be compared, and the verdicts on those that cannot."""
        base, head = pair[BASE], pair[HEAD]
        self._begun = True
        if base.error is None and head.error is None:
            check_alike(base, head)
        before, after = self._wanted.rows_of(base), self._wanted.rows_of(head)
        every = {**before, **after}
        for key, row in every.items():
            self._tests_of[key] = row.nodeid
            if key in before:
                self._base_limits[key] = before[key].limits
            if self._wanted.limits is not None and self._wanted.limits[key] == Limits():
                continue
            verdict = self._not_compared(key, pair, before.get(key), after.get(key))
            if verdict is not None:
                self._others[key] = verdict
                continue
            limits = self._limits_of(after[key])
            assert head.device is not None
            self._rows[key] = RowPairs(key, limits, head.device)
        for name in self._wanted.missing(every.values()):
            reasons = []
            for side, process in pair.items():
                reasons.append(f"{side}: {reason_of(process, name, 'there is no such row')}")
            outcome = _failure_of_head(name, pair, None, None)
            self._others[name] = DuetVerdict(name, outcome, "; ".join(sorted(reasons)))
        self._add_failures_without_rows(pair)

    def _limits_of(self, row: Row) -> Limits:
        """The limits that the duet judges of a row of head."""
        if self._wanted.limits is not None:
            return self._wanted.limits[row.key]
        limit = row.limits.max_regression
        if not of_the_test(row.limits.origin.get(TIME)):
            limit = self._max_regression or limit
        limits = Limits(max_regression=limit or DEFAULT_REGRESSION)
        if row.footprint is not None and row.limits.max_peak_regression is not None:
            limits = structs.replace(limits, max_peak_regression=row.limits.max_peak_regression)
        return limits

    def _not_compared(
        self, key: str, pair: Pair, was: Row | None, now: Row | None
    ) -> DuetVerdict | None:
        """The verdict on a row of the first pair that cannot be compared, or None."""
        reasons = []
        for side, row in ((BASE, was), (HEAD, now)):
            why = pair[side].error and f"crashed: {pair[side].error}"
            why = why or not_measured(row, pair[side])
            if why is not None:
                reasons.append(f"{side}: {reason_of(pair[side], key, why)}")
        if not reasons:
            return None
        outcome = _failure_of_head(key, pair, was, now)
        new = was is None and now is not None and test_of(key, pair[BASE]) is None
        if new and outcome is None and pair[BASE].error is None:
            assert now is not None
            outcome = Outcome.NEW
            # The row may be one of base under another label.
            of_head = {row.key for row in pair[HEAD].rows}
            of_base = [row for row in pair[BASE].rows if row.nodeid == now.nodeid]
            gone = [row.key for row in of_base if row.key not in of_head]
            if gone:
                outcome = None
                reasons.append(f"base measures {', '.join(gone)} in that test, head does not")
        return DuetVerdict(key, outcome, "; ".join(reasons))

    def _add_failures_without_rows(self, pair: Pair) -> None:
        """Add tests and files without a row that fail in head alone, such as by an import."""
        if self._wanted.limits is not None or pair[HEAD].error is not None:
            return
        keys = [*self._rows, *self._others]
        for nodeid, (outcome, _) in pair[HEAD].outcomes.items():
            if outcome != "failed" or not self._wanted.selects(nodeid, nodeid):
                continue
            if any(covers(nodeid, key) for key in keys) or fails(nodeid, None, pair[BASE]):
                continue
            reason = f"head: {reason_of(pair[HEAD], nodeid, outcome)}"
            self._others[nodeid] = DuetVerdict(nodeid, Outcome.FAIL, reason)

    def _take(self, row: RowPairs, pair: Pair) -> str | None:
        """Judge a row with a pair. Returns why the pair is to be taken again, or None."""
        rows = {}
        for side in (BASE, HEAD):
            process = pair[side]
            measured = process.by_key.get(row.key)
            why = process.error or not_measured(measured, process)
            if why is not None:
                return f"{side}: {reason_of(process, row.key, why)}"
            assert measured is not None
            why = bad_conditions(measured)
            if why is not None:
                return f"{side}: {why}"
            rows[side] = measured
        row.add(rows[BASE], rows[HEAD])
        return None

    def _give_up(self, row: RowPairs, number: int, pair: Pair) -> None:
        """End a row that had no good pair of this number in all attempts."""
        for side in (BASE, HEAD):  # a failure on both sides is not head's
            process = pair[side]
            measured = process.by_key.get(row.key)
            why = process.error or not_measured(measured, process)
            if why is not None:
                outcome = None
                if side == HEAD and fails(row.key, measured, process):
                    outcome = Outcome.FAIL
                row.end(outcome, f"{side} in pair {number}: {reason_of(process, row.key, why)}")
                return
            assert measured is not None
            why = bad_conditions(measured)
            if why is not None:
                text = f"{side} in pair {number}, also when it was taken again: {why}"
                row.end(Outcome.UNDECIDED, text, Code.CONDITIONS)
                return

    def _check_device(self, process: ProcessRecord) -> None:
        """Raise `RunError` where a process ran on another device than those before."""
        if process.device is None:
            return
        for earlier in self._finished:
            if earlier.device is None:
                continue
            devices = []
            for device in (earlier.device, process.device):
                devices.append(f"{device.key} {device.uuid or ''}".strip())
            if devices[0] != devices[1]:
                raise RunError(
                    f"the processes ran on different devices: {devices[0]} and {devices[1]}; "
                    "they can be compared on one GPU alone"
                )
            return

    def _check_unchanged(self) -> None:
        for name, side in self._sides.items():
            if side.current() != side.identity:
                raise RunError(
                    f"{name} ({side.title}) was changed while it was measured; begin anew"
                )

    def _report(self, note: str | None = None) -> None:
        at_most = None
        if self._finished:
            each = statistics.median(process.seconds for process in self._finished[-8:])
            done = len({process.turn for process in self._finished})
            at_most = each * max(0, 2 * LOOKS[-1] - done)
        progress = DuetProgress(self._complete, len(self._open()), at_most, note)
        self._on_progress(progress)


def _failure_of_head(key: str, pair: Pair, was: Row | None, now: Row | None) -> Outcome | None:
    """FAIL if the test of a row fails in head alone."""
    if fails(key, now, pair[HEAD]) and not fails(key, was, pair[BASE]):
        return Outcome.FAIL
    return None
