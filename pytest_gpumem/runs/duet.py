"""A duet: base and head in turn on one GPU, in pairs of processes, until each row is decided.

Each process measures all rows that are open. After throttling, other work, a crash or a failed
test, a pair is taken again for the rows concerned, twice at most.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from pytest_gpumem.baselines.acceptances import covers, under_other_name
from pytest_gpumem.baselines.store import reduced
from pytest_gpumem.judging.duet import LOOKS, DuetRow
from pytest_gpumem.limits import TIME, of_the_test
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records import selects
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs.decisions import compared_limits
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, ProcessRecord
from pytest_gpumem.runs.worktree import Side, working_tree
from pytest_gpumem.settings import flag_of
from pytest_gpumem.units import counted, did_you_mean

GONE = "no such measurement", False  # of `Troubles`
ATTEMPTS = 3  # at a pair
MEASURING = ("device", "mode", "sampler", "placements", "precision", "budget", "total_budget")
"""Settings that base and head share: latencies under different ones are not comparable."""
Pair = Mapping[str, ProcessRecord]
"""A process of each side."""
Troubles = dict[str, tuple[str, bool]]
"""By side, why it measured nothing of a row, and whether it crashed or its test failed."""


@dataclass(frozen=True)
class RowFilter:
    """The rows that a duet compares: by default, all."""

    tests: frozenset[str] = frozenset()  # node ids, as on pytest's command line; empty: all
    limits: Mapping[str, Limits] | None = None  # by row key; other rows are not compared
    old_names: Mapping[str, str] = field(default_factory=dict)
    """Of renamed tests: the name in base by the name in head."""
    differing: Sequence[str] = ()  # keys of rows that may be measured differently

    def missing(self, rows: Mapping[str, Row]) -> list[str]:
        """Return the requested names that select none of these rows."""
        if self.limits is not None:
            return sorted(set(self.limits).difference(rows))
        missing = []
        for name in sorted(self.tests):
            if not any(selects(name, row.nodeid) for row in rows.values()):
                missing.append(name)
        return missing

    def selects(self, row: Row) -> bool:
        """True if a duet compares a row; one of memory alone needs a limit."""
        if self.limits is not None:
            return row.key in self.limits
        return row.measurement is not None or row.footprint is None or bool(compared_limits(row))


def order_of(number: int) -> tuple[str, str]:
    """Return the sides in the order of a pair: by a coin if it is odd, then the reverse."""
    order = (BASE, HEAD)
    if random.Random((number + 1) // 2).random() < 0.5:
        order = (HEAD, BASE)
    return order if number % 2 else order[::-1]


class Duet:
    """One duet, from the first process to the verdicts."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        runner: Processes,
        wanted: RowFilter,
        *,
        max_regression: str | None,
        say: Callable[[str], object],
    ) -> None:
        # `max_regression` is of tests that have no limit in their code.
        self.sides, self.wanted, self.max_regression = sides, wanted, max_regression
        self._runner, self._say = runner, say
        self.processes: list[ProcessRecord] = []  # in the order in which they ended
        self.device: DeviceFacts | None = None
        self.first: Pair = {}  # without a crash, if any
        self._rows: dict[str, DuetRow] = {}

    def play(self) -> None:
        """Measure until everything is decided.

        Raises `UserError`: the sides cannot be compared, or head's files changed meanwhile.
        """
        for number in range(1, LOOKS[-1] + 1):
            self._take_pair(number)
            undecided = len(self._open())
            if not undecided:
                break
            if number in (1, *LOOKS):
                each = statistics.median(process.seconds for process in self.processes[-8:])
                left = rounded_duration(each * 2 * (LOOKS[-1] - number))
                pairs, rows = counted(number, "pair"), counted(undecided, "row")
                self._say(f"after {pairs}: {rows} undecided, at most {left} left")
                self._check_unchanged()
        self._check_unchanged()

    @property
    def rows(self) -> list[DuetRow]:
        """Failures first."""
        return sorted(self._rows.values(), key=lambda row: (row.outcome or Outcome.UNDECIDED).rank)

    @property
    def skipped_in_base(self) -> set[str]:
        """Node ids of the tests that skip in base."""
        skipped = set[str]()
        for process in self.processes:
            if process.side == BASE:
                outcomes = process.outcomes
                skipped.update(name for name in outcomes if outcomes[name][0] == "skipped")
        return skipped

    def _open(self) -> list[str]:
        return [key for key, row in self._rows.items() if row.open]

    def _check_unchanged(self) -> None:
        head = self.sides[HEAD]
        if working_tree(head.folder).identity != head.identity:
            raise UserError(f"head ({head.title}) was changed while it was measured; begin anew")

    # Pairs

    def _take_pair(self, number: int) -> None:
        """Measure what is open in one pair, and again what is in trouble."""
        keys = self._open()
        tests = sorted(self.wanted.tests) or None  # before the first pair no row is known
        if number > 1:
            tests = self._tests(keys)
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            pair = self._measure(number, attempt, tests)
            if not self._rows:
                crash = pair[BASE].error or pair[HEAD].error
                if crash and not last:
                    self._say(f"pair {number} is taken again: {crash}")
                    continue
                self._begin(pair)
                keys = self._open()
            troubles = {}
            for key in keys:
                trouble = self._take(self._rows[key], pair, last=last)
                if trouble:
                    troubles[key] = trouble
            keys = list(troubles)
            if last or not keys:
                return
            self._say(f"pair {number} is taken again: {keys[0]}: {troubles[keys[0]]}")
            tests = self._tests(keys)

    def _tests(self, keys: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self._rows[key].nodeid for key in keys))

    def _measure(self, number: int, attempt: int, tests: list[str] | None) -> Pair:
        pair = {}
        for side in order_of(number):
            names = tests
            if side == BASE and tests is not None:
                names = [under_other_name(test, self.wanted.old_names) for test in tests]
            process = self._runner.run(side, names, pair=number, attempt=attempt)
            if side == BASE:
                _rename(process, self.wanted.old_names)
            self._check_device(process)
            process.rows = {key: _with_medians(row) for key, row in process.rows.items()}
            self.processes.append(process)
            pair[side] = process
        return pair

    def _check_device(self, process: ProcessRecord) -> None:
        if process.device is None:
            return
        self.device = self.device or process.device
        both = self.device, process.device
        first, device = [f"{facts.key} {facts.uuid or ''}".strip() for facts in both]
        if first != device:
            raise UserError(
                f"the processes ran on different devices: {first} and {device}; "
                "they can be compared on one GPU alone"
            )

    def _take(self, row: DuetRow, pair: Pair, *, last: bool) -> str | None:
        """Judge a row with a pair. Return why the pair is to be taken again, or None."""
        troubles = _troubles(row.key, pair)
        if troubles:
            if last:
                _end(row, troubles)
            return _texts(troubles)[0]
        for side in (BASE, HEAD):
            verdict = pair[side].rows[row.key].verdict
            if verdict.code is Code.CONDITIONS:
                if last:
                    text = f"{side}, also when it was taken again: {verdict.reason}"
                    row.end(Outcome.UNDECIDED, text, Code.CONDITIONS)
                return f"{side}: {verdict.reason}"
        row.add(pair[BASE].rows[row.key], pair[HEAD].rows[row.key])
        return None

    # The first pair

    def _begin(self, pair: Pair) -> None:
        self.first, base, head = pair, pair[BASE], pair[HEAD]
        _check_alike(base, head)
        rows = {}
        for measured in (*base.rows.values(), *head.rows.values()):
            if self.wanted.selects(measured):
                rows[measured.key] = measured
        for key in (*rows, *self.wanted.missing(rows)):
            nodeid = rows[key].nodeid if key in rows else key
            limits = Limits()
            if self.wanted.limits:
                limits = self.wanted.limits[key]
            elif key in head.rows:
                limits = self._limits_of(head.rows[key])
            self._rows[key] = row = DuetRow(key, nodeid, limits, key in self.wanted.differing)
            troubles = _troubles(key, pair)
            if list(troubles.values()) == [GONE, GONE]:
                why = f"no such test on either side{did_you_mean(key, rows)}"
                if any(selects(key, test) for test in base.finished | head.finished):
                    why = "nothing was measured"
                row.end(None, why)
            elif troubles and not (key in rows and self.wanted.limits and _fails(troubles)):
                _end(row, troubles)
        if self.wanted.limits is None and head.error is None:
            # Tests and files without a row that fail in head alone, such as by an import.
            for nodeid in head.outcomes:
                troubles = _troubles(nodeid, pair)
                covered = any(covers(nodeid, key) for key in self._rows)
                if not covered and _fails(troubles) == [HEAD]:
                    self._rows[nodeid] = DuetRow(nodeid, nodeid)
                    _end(self._rows[nodeid], troubles)

    def _limits_of(self, row: Row) -> Limits:
        limits = {name: getattr(row.limits, name) for name in compared_limits(row)}
        if row.measurement is not None or not limits:
            limit = row.limits.max_regression
            if not of_the_test(row.limits.origin.get(TIME)):
                limit = self.max_regression or limit
            limits[TIME] = limit or "1%"
        return Limits(**limits)


def _troubles(key: str, pair: Pair) -> Troubles:
    """Return why a row cannot be compared; empty if it can."""
    troubles = {}
    for side in (BASE, HEAD):
        trouble = _trouble_of(key, pair[side])
        if trouble:
            troubles[side] = trouble
    return troubles


def _trouble_of(key: str, process: ProcessRecord) -> tuple[str, bool] | None:
    """Return why a process measured nothing of a row, and whether it failed, or None."""
    if process.error is not None:
        return f"crashed: {process.error}", True
    row = process.rows.get(key)
    # A test that breaks its limits alone was measured.
    if row and row.measured_something and not row.test_error:
        return None
    nodeid = _test_of(key, process)
    if nodeid is None:
        return GONE
    outcome, words = process.outcomes[nodeid]
    if words and not key.startswith(f"{nodeid}::"):  # of a test
        words = f"{outcome}, {words}"
    return words or outcome, outcome == "failed"


def _texts(troubles: Troubles) -> list[str]:
    return [f"{side}: {why}" for side, (why, _) in troubles.items()]


def _fails(troubles: Troubles) -> list[str]:
    return [side for side, (_, failed) in troubles.items() if failed]


def _end(row: DuetRow, troubles: Troubles) -> None:
    outcome = None
    if _fails(troubles) == [HEAD]:
        outcome = Outcome.FAIL
    elif not row.base and troubles == {BASE: GONE}:
        outcome = Outcome.NEW
    row.end(outcome, "; ".join(_texts(troubles)))


def _test_of(key: str, process: ProcessRecord) -> str | None:
    """Return the test or file of a row that did not pass in a process."""
    for nodeid in process.outcomes:
        # A file that cannot be imported fails all tests in it.
        if covers(nodeid, key) or selects(key, nodeid):
            return nodeid
    return None


def _rename(process: ProcessRecord, old_names: Mapping[str, str]) -> None:
    """Give tests of base their names in head."""
    new_names = {old: new for new, old in old_names.items()}
    rows, outcomes = process.rows.values(), process.outcomes
    process.rows, process.outcomes = {}, {}
    for row in rows:
        renamed = structs.replace(row, nodeid=under_other_name(row.nodeid, new_names))
        process.rows[renamed.key] = renamed
    for nodeid in outcomes:
        process.outcomes[under_other_name(nodeid, new_names)] = outcomes[nodeid]


def _with_medians(row: Row) -> Row:
    """Return the row with medians alone: a duet keeps many processes."""
    if row.measurement is None:
        return row
    return structs.replace(row, measurement=reduced(row.measurement))


def _check_alike(base: ProcessRecord, head: ProcessRecord) -> None:
    was, now = base.settings, head.settings
    for name in MEASURING:
        if name in was and name in now and was[name] != now[name]:
            raise UserError(
                f"base and head measure in different ways: {name} is {was[name]!r} in base and "
                f"{now[name]!r} in head; give {flag_of(name)} among pytest's arguments"
            )


def rounded_duration(seconds: float) -> str:
    """Return "40 s" or "3 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
