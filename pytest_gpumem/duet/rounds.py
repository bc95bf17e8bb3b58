"""The duet itself: process after process until every measurement is decided, repeating what conditions spoilt."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_gpumem.duet.errors import DuetError
from pytest_gpumem.duet.journal import Journal
from pytest_gpumem.duet.reading import (
    Rounds,
    Unjudged,
    Wanted,
    changes,
    check_alike,
    check_device,
    delta_of,
    families,
    others_on_the_gpu,
    pairs_of,
    same_tests,
    trouble,
)
from pytest_gpumem.duet.schedule import BASE, HEAD, Turn, turns
from pytest_gpumem.duet.workers import Process, Workers
from pytest_gpumem.duet.worktree import Side
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.verdicts.paired import MANY, Paired, Plan, TooFewRounds, common_plan, common_shift, judge_pairs, plan

ATTEMPTS = 3
"""Times that a process is run at most before its conditions are taken as they are."""
COMMON = "all tests together"
"""Key of the verdict about a shift of all of them."""


@dataclass(frozen=True)
class Told:
    """One verdict."""

    key: str
    outcome: Outcome | None
    """None: no verdict, because there is nothing to compare."""
    sentence: str
    paired: Paired | None = None
    """The figures behind it."""
    base_latency: float | None = None
    """Seconds: the median over base's processes."""
    head_latency: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where a duet is."""

    rounds: int
    """Rounds that are complete."""
    look: int
    """Round of the next look."""
    last: int
    """Round of the last one."""
    open: int
    """Measurements that are not decided yet."""
    seconds: float | None
    """Expected until the next look; None before the first process has ended."""
    at_most: float | None
    """Expected if nothing is decided before the last look."""
    note: str | None = None
    """What happened, if it is worth a line."""


@dataclass(frozen=True)
class Result:
    """What a duet found."""

    schedule: Plan | None
    """None where nothing could be compared."""
    common: Told | None
    """The shift of all tests together, where there are many."""
    told: tuple[Told, ...]
    """One verdict for each measurement, failures first."""
    processes: tuple[Process, ...]
    """All that were run, in their order, repeated ones too."""
    resumed: int
    """How many of them the journal held."""
    strict: bool
    """The ini file of head asks for strictness."""


@dataclass
class Jury:
    """Judges at each look, in order; what it has decided stays."""

    family: Sequence[str]
    schedule: Plan
    deltas: Mapping[str, float]
    found: dict[str, Paired | Unjudged] = field(default_factory=dict)
    """What is decided."""
    last: dict[str, Paired] = field(default_factory=dict)
    """What the last look said of the others."""
    common: Paired | None = None
    """The common shift; its outcome is None while it is open."""
    common_schedule: Plan | None = None

    def __post_init__(self) -> None:
        if len(self.family) > MANY:
            self.common_schedule = common_plan(self.schedule)

    @property
    def common_open(self) -> bool:
        """Whether the common shift is still to be judged: until then every test is measured, lest those that are left lead it astray."""
        return self.common_schedule is not None and (self.common is None or self.common.outcome is None)

    @property
    def open(self) -> list[str]:
        """Keys that are not decided."""
        return [key for key in self.family if key not in self.found]

    @property
    def measured(self) -> list[str]:
        """Keys that the next processes measure."""
        return list(self.family) if self.common_open else self.open

    @property
    def done(self) -> bool:
        """Whether nothing is left to measure for."""
        return not self.measured or (self.common is not None and self.common.outcome is Outcome.FAIL)

    def look(self, number: int, rounds: Rounds) -> None:
        """Judge after `number` complete rounds."""
        reached = {index: sides for index, sides in rounds.items() if index <= number}
        pairs, spoilt = {}, {}
        for key in self.family:
            pairs[key], why = pairs_of(key, reached)
            if why is not None:
                spoilt[key] = why
        if self.common_schedule is not None and self.common_open:
            whole = {key: values for key, values in pairs.items() if len(values) == number}
            if whole:
                delta = statistics.median(self.deltas[key] for key in whole)
                self.common = judge_pairs({COMMON: common_shift(whole)}, {COMMON: delta}, self.common_schedule)[COMMON]
        judged = judge_pairs(pairs, self.deltas, self.schedule)
        for key in self.open:
            if judged[key].outcome is not None:
                self.found[key] = judged[key]
            elif key in spoilt:
                self.found[key] = spoilt[key]
            else:
                self.last[key] = judged[key]


class Duet:
    """One duet, from the first process to the verdicts."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        workers: Workers,
        journal: Journal,
        wanted: Wanted,
        *,
        max_regression: str | None,
        rounds_max: int,
        seed: int,
        tell: Callable[[Progress], object],
    ) -> None:
        """Nothing is run yet.

        Args:
            sides: by `BASE` and `HEAD`.
            workers: run the processes.
            journal: what was measured before is taken from it, what is measured is added to it.
            wanted: the measurements to compare.
            max_regression: allowed slow-down of all of them, as written; None: each test's own, else 1 %.
            rounds_max: pairs at most.
            seed: of the order of base and head.
            tell: called whenever there is progress.

        Raises:
            DuetError: the journal holds what cannot be read.
        """
        self._sides = sides
        self._workers = workers
        self._journal = journal
        self._wanted = wanted
        self._max_regression = max_regression
        self._rounds_max = rounds_max
        self._seed = seed
        self._tell = tell
        self._known: dict[Turn, list[Process]] = defaultdict(list)
        for line in journal.lines:
            process = Process.from_json(line)
            self._known[process.turn].append(process)
        self._resumed = len(journal.lines)
        self._all: list[Process] = []
        self._first: dict[str, Process] = {}
        self._jury: Jury | None = None
        self._complete = 0
        self._tests: list[str] | None = sorted(wanted.tests) if wanted.tests is not None else None

    def play(self) -> Result:
        """Measure until everything is decided.

        Raises:
            DuetError: the sides cannot be compared, or head's files changed meanwhile.
        """
        try:
            # Of the smallest family there can be: the true one is known after the first pair.
            plan(max(1, len(self._wanted.names)), self._rounds_max)
        except TooFewRounds as error:
            raise DuetError(f"--rounds-max: {error}") from None
        rounds: dict[int, dict[str, Process]] = defaultdict(dict)
        order = turns(self._seed)
        coming = [next(order) for _ in range(2 * self._rounds_max)]
        out: dict[str, Unjudged] = {}
        for index, turn in enumerate(coming):
            process = self._take(coming[index : self._horizon()])
            rounds[turn.round][turn.side] = process
            if len(rounds[turn.round]) < 2:
                continue
            self._complete = turn.round
            if turn.round == 1:
                check_alike(rounds[1][BASE], rounds[1][HEAD])
                family, out = families(rounds, self._wanted)
                if not family:
                    break
                self._begin(family, rounds[1])
            jury = self._jury
            assert jury is not None
            if turn.round in jury.schedule.looks:
                self._unchanged()
                jury.look(turn.round, rounds)
                self._tests = same_tests(jury.measured, rounds[1][HEAD])
                if jury.done or turn.round == jury.schedule.looks[-1]:
                    break
        return self._result(rounds, out)

    def _horizon(self) -> int:
        """Turns up to the last look; before the family is known, up to where any would have it."""
        return 2 * (self._jury.schedule.looks[-1] if self._jury is not None else self._rounds_max)

    def _begin(self, family: list[str], first: Mapping[str, Process]) -> None:
        """The looks, by the number of measurements that are judged together."""
        try:
            schedule = plan(len(family), self._rounds_max)
        except TooFewRounds as error:
            raise DuetError(f"--rounds-max: {error}") from None
        rows = {side: {row.key: row for row in first[side].rows} for side in (BASE, HEAD)}
        deltas = {key: delta_of(rows[BASE][key], rows[HEAD][key], self._max_regression) for key in family}
        self._jury = Jury(family, schedule, deltas)
        self._tests = same_tests(family, first[HEAD])
        self._report(schedule.reason)

    def _take(self, coming: Sequence[Turn]) -> Process:
        """The process of the next turn: as the journal has it, or run now; repeated while conditions spoil it."""
        turn = coming[0]
        for attempt in range(1, ATTEMPTS + 1):
            known = self._known[turn]
            if len(known) >= attempt:
                process = known[attempt - 1]
            else:
                process = self._workers.run(coming, self._tests, attempt)
                self._check(process)
                known.append(process)
                self._journal.append(process.to_json())
            self._check(process)
            self._all.append(process)
            why = trouble(process, self._wanted, self._jury.measured if self._jury is not None else None)
            if why is None:
                break
            if others_on_the_gpu(process) and not self._workers.early:
                self._workers.wait_early()
            again = "repeated" if attempt < ATTEMPTS else "taken as it is"
            self._report(f"round {turn.round}, {turn.side}, {again}: {why}")
        self._report()
        return process

    def _check(self, process: Process) -> None:
        """All processes are of one device."""
        if process.device:
            first = self._first.setdefault("any", process)
            check_device(first, process)

    def _unchanged(self) -> None:
        for name, side in self._sides.items():
            if side.current() != side.identity:
                raise DuetError(f"{name} ({side.what}) was changed while it was measured; begin anew")

    def _report(self, note: str | None = None) -> None:
        jury = self._jury
        last = jury.schedule.looks[-1] if jury is not None else self._rounds_max
        looks = jury.schedule.looks if jury is not None else (last,)
        look = next((number for number in looks if number > self._complete), last)
        taken = len({process.turn for process in self._all})
        each = statistics.median([process.seconds for process in self._all[-8:]]) if self._all else None
        seconds = None if each is None or jury is None else each * max(0, 2 * look - taken)
        at_most = None if each is None or jury is None else each * max(0, 2 * last - taken)
        self._tell(Progress(self._complete, look, last, len(jury.open) if jury is not None else 0, seconds, at_most, note))

    def _result(self, rounds: Rounds, out: Mapping[str, Unjudged]) -> Result:
        jury = self._jury
        told = [Told(key, why.outcome, why.sentence) for key, why in out.items()]
        common = None
        if jury is not None:
            told = [self._told(key, rounds) for key in jury.family] + told
            if jury.common is not None:
                verdict = jury.common if jury.common.outcome is not None else replace(jury.common, outcome=Outcome.INCONCLUSIVE)
                sentence = f"the typical test of {len(jury.family)} is {verdict.sentence}"
                common = Told(COMMON, verdict.outcome, sentence, verdict)
        told.sort(key=lambda one: _ORDER.index(one.outcome))
        head = rounds.get(1, {}).get(HEAD)
        strict = head is not None and head.strict
        return Result(jury.schedule if jury else None, common, tuple(told), tuple(self._all), self._resumed, strict)

    def _told(self, key: str, rounds: Rounds) -> Told:
        jury = self._jury
        assert jury is not None
        base, head = (self._series(key, rounds, side) for side in (BASE, HEAD))
        latencies = [statistics.median(_latencies(side)) if side else None for side in (base, head)]
        found = jury.found.get(key)
        if isinstance(found, Unjudged):
            return Told(key, found.outcome, found.sentence, None, *latencies)
        verdict = found or jury.last.get(key)
        assert verdict is not None
        sentence = verdict.sentence
        if verdict.outcome is None:  # the common shift ended the duet
            verdict = replace(verdict, outcome=Outcome.INCONCLUSIVE)
            sentence = f"{sentence}; the duet ended with the common shift"
        notes = changes(base[1], head[1])
        return Told(key, verdict.outcome, "; ".join([sentence, *notes]), verdict, *latencies)

    @staticmethod
    def _series(key: str, rounds: Rounds, side: str) -> dict[int, Row]:
        """The rows of one measurement on one side, by round."""
        found = {}
        for number, sides in rounds.items():
            for row in sides[side].rows if side in sides else ():
                if row.key == key and row.measurement is not None:
                    found[number] = row
        return found


_ORDER = (Outcome.FAIL, Outcome.UNRELIABLE, Outcome.INCONCLUSIVE, None, Outcome.PASS, Outcome.SUSPECT, Outcome.NO_BASELINE)


def _latencies(rows: Mapping[int, Row]) -> list[float]:
    return [row.measurement.latency for row in rows.values() if row.measurement is not None]
