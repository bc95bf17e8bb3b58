"""A duet: base and head in turn on one GPU, in pairs of processes, until each row is decided.

Each process measures all rows that are open. A pair under throttling or beside other work, or with
a crash or a failed test, is taken again for the rows that it is of, twice at most.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from pytest_gpumem.judging.duet import LOOKS
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.limits import of_the_test
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, covers
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.pairs import (
    TIME,
    DuetVerdict,
    RowFilter,
    RowPairs,
    Trouble,
    check_alike,
    test_of,
    trouble_of,
    under_new_names,
    under_other_name,
)
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, ProcessRecord, Turn
from pytest_gpumem.runs.worktree import Side

ATTEMPTS = 3
DEFAULT_REGRESSION = "1%"  # allowed slow-down of a test without a limit


@dataclass(frozen=True)
class Pair:
    """A process of each side, and its rows that are compared, by key."""

    base: ProcessRecord
    head: ProcessRecord
    base_rows: Mapping[str, Row]
    head_rows: Mapping[str, Row]

    @property
    def crash(self) -> str | None:
        """How the first session that broke off did so."""
        return self.base.error or self.head.error

    def troubles(self, key: str) -> dict[str, Trouble]:
        """Return why the sides have nothing to compare of a row, by side."""
        troubles = {}
        for process, rows in ((self.base, self.base_rows), (self.head, self.head_rows)):
            trouble = trouble_of(key, rows.get(key), process)
            if trouble is not None:
                troubles[process.turn.side] = trouble
        return troubles


@dataclass(frozen=True)
class DuetResult:
    """The result of a duet, also of one that was stopped."""

    verdicts: tuple[DuetVerdict, ...]  # failures first
    processes: tuple[ProcessRecord, ...]  # all of them in their order
    base_limits: Mapping[str, Limits]  # by row key, those of base

    @property
    def strict(self) -> bool:
        """True if the ini file of head asks for strictness."""
        return any(process.strict for process in self.processes if process.turn.side == HEAD)

    @property
    def skipped_in_base(self) -> set[str]:
        """Node ids of the tests that skip in base."""
        skipped = set()
        for process in self.processes:
            if process.turn.side == BASE:
                for nodeid, (outcome, _) in process.outcomes.items():
                    if outcome == "skipped":
                        skipped.add(nodeid)
        return skipped


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
        say: Callable[[str], object],
    ) -> None:
        """Nothing is run yet.

        `wanted`: the rows. Of one with empty limits, the first pair reads the limits of base alone.
        `max_regression`: allowed slow-down of tests that have no limit in their code, as written.
        `say`: prints a sentence about the progress.
        """
        self._sides = sides
        self._processes = processes
        self._wanted = wanted
        self._max_regression = max_regression
        self._say = say
        self._ended: list[ProcessRecord] = []
        self._rows: dict[str, RowPairs] = {}
        self._base_limits: dict[str, Limits] = {}
        self._device: DeviceFacts | None = None

    def play(self) -> DuetResult:
        """Measure until everything is decided.

        Raises `RunError`: the sides cannot be compared, or head's files changed meanwhile.
        """
        for number in range(1, LOOKS[-1] + 1):
            self._take_pair(number)
            undecided = len(self._open())
            if not undecided:
                break
            if number in (1, *LOOKS):
                each = statistics.median(process.seconds for process in self._ended[-8:])
                left = rounded_duration(each * 2 * (LOOKS[-1] - number))
                pairs, rows = counted(number, "pair"), counted(undecided, "row")
                self._say(f"after {pairs}: {rows} undecided, at most {left} left")
                self._check_unchanged()
        self._check_unchanged()
        return self.result()

    def result(self) -> DuetResult:
        """Return the result so far."""
        verdicts = [row.verdict() for row in self._rows.values()]
        verdicts.sort(key=lambda verdict: (verdict.outcome or Outcome.UNDECIDED).rank)
        return DuetResult(tuple(verdicts), tuple(self._ended), self._base_limits)

    def _open(self) -> list[str]:
        return [key for key, row in self._rows.items() if row.open]

    # Pairs

    def _take_pair(self, number: int) -> None:
        """Measure what is open in one pair, and again what is in trouble."""
        keys = None  # before the first pair no row is known
        if number > 1:
            keys = self._open()
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            pair = self._measure(number, attempt, self._tests(keys))
            if keys is None:
                if pair.crash is not None and not last:
                    self._say(f"pair {number} is taken again: {pair.crash}")
                    continue
                self._begin(pair)
                keys = self._open()
            troubles = {}
            for key in keys:
                trouble = self._take(self._rows[key], pair, last=last)
                if trouble is not None:
                    troubles[key] = trouble
            keys = list(troubles)
            if last or not keys:
                return
            self._say(f"pair {number} is taken again: {keys[0]}: {troubles[keys[0]]}")

    def _tests(self, keys: Sequence[str] | None) -> list[str] | None:
        """Node ids of the tests of these rows; None: of those that are requested."""
        if keys is not None:
            return list(dict.fromkeys(self._rows[key].nodeid for key in keys))
        return None if self._wanted.tests is None else sorted(self._wanted.tests)

    def _measure(self, number: int, attempt: int, tests: list[str] | None) -> Pair:
        """Run both processes of a pair."""
        old_names = self._wanted.old_names
        processes = {}
        for side in order_of(number):
            side_tests = tests
            if side == BASE and tests is not None:
                side_tests = [under_other_name(test, old_names) for test in tests]
            process = self._processes.run(Turn(number, side), side_tests, attempt)
            if side == BASE:
                process = under_new_names(process, old_names)
            self._check_device(process)
            self._ended.append(process)
            processes[side] = process
        base, head = processes[BASE], processes[HEAD]
        return Pair(base, head, self._wanted.rows_of(base), self._wanted.rows_of(head))

    def _take(self, row: RowPairs, pair: Pair, *, last: bool) -> str | None:
        """Judge a row with a pair. Returns why the pair is to be taken again, or None.

        `last`: a row without a good pair ends.
        """
        troubles = pair.troubles(row.key)
        if troubles:
            if last:
                self._end(row, pair, troubles)
            return _sentences(troubles)[0]
        base, head = pair.base_rows[row.key], pair.head_rows[row.key]
        assert self._device is not None
        for side, measured in ((BASE, base), (HEAD, head)):
            if measured.verdict.code is Code.CONDITIONS:
                reason = measured.verdict.reason
                if last:
                    text = f"{side}, also when it was taken again: {reason}"
                    row.end(Outcome.UNDECIDED, text, Code.CONDITIONS)
                return f"{side}: {reason}"
        row.add(base, head, self._device)
        return None

    def _end(self, row: RowPairs, pair: Pair, troubles: Mapping[str, Trouble]) -> None:
        """End a row that a pair cannot compare. What fails in head alone is red."""
        outcome, texts = None, _sentences(troubles)
        in_base = row.base or row.key in pair.base_rows or pair.base.error is not None
        if _head_fails(troubles):
            outcome = Outcome.FAIL
        elif not in_base and row.key in pair.head_rows and test_of(row.key, pair.base) is None:
            # The row may be another one of base under a new label.
            gone = []
            for other in pair.base.rows:
                if other.nodeid == row.nodeid and other.key not in pair.head.by_key:
                    gone.append(other.key)
            if gone:
                texts.append(f"base measures {', '.join(gone)} in that test, head does not")
            else:
                outcome = Outcome.NEW
        row.end(outcome, "; ".join(texts))

    # The first pair

    def _begin(self, pair: Pair) -> None:
        """Take the rows that there are, and end those that cannot be compared."""
        if pair.crash is None:
            check_alike(pair.base, pair.head)
        for key, row in pair.base_rows.items():
            self._base_limits[key] = row.limits
        every = {**pair.base_rows, **pair.head_rows}
        for key in (*every, *self._wanted.missing(every)):
            if self._wanted.limits is not None and self._wanted.limits[key] == Limits():
                continue
            nodeid, limits = key, Limits()
            if key in every:
                nodeid = every[key].nodeid
            if key in pair.head_rows:
                limits = self._limits_of(pair.head_rows[key])
            self._rows[key] = of_row = RowPairs(key, nodeid, limits)
            troubles = pair.troubles(key)
            if troubles:
                self._end(of_row, pair, troubles)
        if self._wanted.limits is None and pair.head.error is None:
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

    def _add_failures_without_rows(self, pair: Pair) -> None:
        """Add tests and files without a row that fail in head alone, such as by an import."""
        for nodeid in pair.head.outcomes:
            covered = any(covers(nodeid, key) for key in self._rows)
            troubles = pair.troubles(nodeid)
            if not covered and self._wanted.selects(nodeid, nodeid) and _head_fails(troubles):
                row = self._rows[nodeid] = RowPairs(nodeid, nodeid, Limits())
                row.end(Outcome.FAIL, f"head: {troubles[HEAD].why}")

    # Both sides

    def _check_device(self, process: ProcessRecord) -> None:
        """Raise `RunError` where a process ran on another device than those before."""
        if process.device is None:
            return
        self._device = self._device or process.device
        devices = []
        for device in (self._device, process.device):
            devices.append(f"{device.key} {device.uuid or ''}".strip())
        if devices[0] != devices[1]:
            raise RunError(
                f"the processes ran on different devices: {devices[0]} and {devices[1]}; "
                "they can be compared on one GPU alone"
            )

    def _check_unchanged(self) -> None:
        for name, side in self._sides.items():
            if side.current() != side.identity:
                raise RunError(
                    f"{name} ({side.title}) was changed while it was measured; begin anew"
                )


def _head_fails(troubles: Mapping[str, Trouble]) -> bool:
    """True if a test fails in head alone, by more than its limits."""
    if BASE in troubles and troubles[BASE].fails:
        return False
    return HEAD in troubles and troubles[HEAD].fails


def _sentences(troubles: Mapping[str, Trouble]) -> list[str]:
    return [f"{side}: {trouble.why}" for side, trouble in troubles.items()]


def rounded_duration(seconds: float) -> str:
    """Return "40 s" or "3 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
