"""The duet: runs processes until every measurement is decided, and repeats those under bad conditions."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pytest_gpumem.judging.differences import differences
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.paired import MODE_PAIRS, Paired, judge_pairs, least_pairs
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.experiment import Experiment, Processes, pairs
from pytest_gpumem.runs.journal import Journal
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord
from pytest_gpumem.runs.reading import (
    DuetVerdict,
    Rounds,
    RowFilter,
    Way,
    changes,
    check_alike,
    delta_of,
    families,
    pair_of,
    same_tests,
    trouble,
    ways,
)
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.settings import WAYS


@dataclass(frozen=True)
class DuetProgress:
    """The progress of a duet."""

    rounds: int  # rounds that are complete
    last: int  # number of the last round that is allowed
    open: int  # measurements that are not decided yet
    at_most: (
        float | None
    )  # seconds that are left if nothing is decided before the last round; None before the first process has ended
    note: str | None = None  # an event to print


@dataclass(frozen=True)
class DuetResult:
    """The result of a duet."""

    verdicts: tuple[DuetVerdict, ...]
    """One verdict for each measurement, failures first."""
    processes: tuple[ProcessRecord, ...]
    """All that were run, in their order, repeated ones too."""
    resumed: int
    """How many of them come from the journal."""
    strict: bool
    """The ini file of head asks for strictness."""

    @property
    def open(self) -> bool:
        """True if more pairs could decide a measurement."""
        return any(one.paired is not None and one.paired.outcome is None for one in self.verdicts)


@dataclass
class Jury:
    """Judges after every round; a decision is final."""

    family: Sequence[str]
    deltas: Mapping[str, float]
    clean: int  # pairs that a PASS takes at least
    found: dict[str, Paired | DuetVerdict] = field(
        default_factory=dict
    )  # verdicts, and why a measurement gets none
    pairs: dict[str, list[float]] = field(
        default_factory=dict
    )  # log-ratios of each measurement so far

    @property
    def open(self) -> list[str]:
        """Keys that are not decided."""
        return [key for key in self.family if key not in self.found]

    def take(self, number: int, sides: Mapping[str, ProcessRecord]) -> None:
        """Judge with one more round. `sides`: its two processes, which measured all that is open."""
        for key in self.open:
            pair = pair_of(key, number, sides)
            if isinstance(pair, DuetVerdict):
                self.found[key] = pair
            else:
                self.pairs.setdefault(key, []).append(pair)
        for key, paired in self.judged().items():
            if paired.outcome is not None:
                self.found.setdefault(key, paired)

    def judged(self) -> dict[str, Paired]:
        """The verdicts by the pairs so far, of each measurement that has some."""
        pairs = {key: self.pairs.get(key, []) for key in self.family}
        return judge_pairs(pairs, self.deltas, clean=self.clean)


class Duet:
    """One duet, from the first process to the verdicts."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        processes: Processes,
        journal: Journal,
        wanted: RowFilter,
        *,
        max_regression: str | Mapping[str, str] | None,
        rounds_max: int,
        on_progress: Callable[[DuetProgress], object],
    ) -> None:
        """Nothing is run yet.
        `sides`: whose identities are to stay.
        `journal`: gives finished processes and gets new ones.
        `max_regression`: allowed slow-down of all of them, as written, or by row key; None: each test's own, else 1 %.
        Raises `RunError`: the journal cannot be read.
        """
        self._sides = sides
        self._experiment = Experiment(
            processes, islice(pairs(), 2 * rounds_max), journal, on_trouble=self._on_trouble
        )
        self._wanted = wanted
        self._max_regression = max_regression
        self._last = rounds_max
        self._on_progress = on_progress
        self._jury: Jury | None = None
        self._complete = 0
        self._tests: list[str] | None = sorted(wanted.tests) if wanted.tests is not None else None
        self._ways: dict[str, Way] = {}
        """Mode and sampler imposed on measurements that head would take in another way than base."""

    def play(self) -> DuetResult:
        """Measure until everything is decided. Raises `RunError`: the sides cannot be compared, or head's files changed meanwhile."""
        self._check_rounds(max(1, len(self._wanted.names)))
        rounds: dict[int, dict[str, ProcessRecord]] = defaultdict(dict)
        out: dict[str, DuetVerdict] = {}
        while self._experiment.coming:
            variables = {WAYS: json.dumps(self._ways)} if self._ways else {}
            process = self._experiment.measure(
                self._tests, variables=variables, trouble=self._trouble
            )
            self._report()
            number = process.turn.round
            rounds[number][process.turn.side] = process
            if len(rounds[number]) < 2:
                continue
            self._complete = number
            if self._jury is None:
                check_alike(rounds[1][BASE], rounds[1][HEAD])
                if not self._ways and (
                    changed := ways(rounds[1][BASE], rounds[1][HEAD], self._wanted)
                ):
                    self._ways = changed
                    self._experiment.again(rounds.pop(1).values())
                    self._report(
                        f"{counted(len(changed), 'measurement')} measured in another way by head: both sides now measure as base"
                    )
                    continue
                family, out = families(rounds, self._wanted)
                if not family:
                    break
                self._jury = self._begin(family, rounds[1])
            self._jury.take(number, rounds[number])
            self._tests = same_tests(self._jury.open, rounds[1][HEAD])
            if not self._tests:
                break
            if number.bit_count() == 1:  # not after every round: a large tree takes a while to read
                self._unchanged()
        self._unchanged()
        return self._result(rounds, out)

    def _check_rounds(self, family: int) -> None:
        if self._last < (least := least_pairs(family)):
            raise RunError(
                f"--rounds-max: {counted(self._last, 'pair')} cannot prove a small slow-down; accepted are {least} or more "
                f"for {family} measurement{'s' * (family > 1)} judged together"
            )

    def _begin(self, family: list[str], first: Mapping[str, ProcessRecord]) -> Jury:
        self._check_rounds(len(family))
        rows = {side: {row.key: row for row in first[side].rows} for side in (BASE, HEAD)}
        deltas = {
            key: delta_of(rows[BASE][key], rows[HEAD][key], self._max_regression) for key in family
        }
        return Jury(family, deltas, min(MODE_PAIRS, self._last))

    def _trouble(self, process: ProcessRecord) -> str | None:
        """Why a process is to be repeated: as `trouble`, with the measurements that are open."""
        return trouble(process, self._wanted, self._jury.open if self._jury is not None else None)

    def _on_trouble(self, process: ProcessRecord, why: str, again: bool) -> None:
        self._report(
            f"round {process.turn.round}, {process.turn.side}, {'repeated' if again else 'counted as it is'}: {why}"
        )

    def _unchanged(self) -> None:
        for name, side in self._sides.items():
            if side.current() != side.identity:
                raise RunError(
                    f"{name} ({side.title}) was changed while it was measured; begin anew"
                )

    def _report(self, note: str | None = None) -> None:
        finished = self._experiment.finished
        done = len({process.turn for process in finished})
        each = (
            statistics.median([process.seconds for process in finished[-8:]]) if finished else None
        )
        at_most = None if each is None else each * max(0, 2 * self._last - done)
        self._on_progress(
            DuetProgress(
                self._complete,
                self._last,
                len(self._jury.open) if self._jury is not None else 0,
                at_most,
                note,
            )
        )

    def _result(self, rounds: Rounds, out: Mapping[str, DuetVerdict]) -> DuetResult:
        verdicts = list(out.values())
        if self._jury is not None:
            last = self._jury.judged()
            verdicts += [
                self._verdict(key, self._jury.found.get(key, last[key]), rounds)
                for key in self._jury.family
            ]
        verdicts.sort(
            key=lambda one: (
                one.outcome is None,
                one.outcome.rank if one.outcome is not None else 0,
            )
        )
        head = rounds.get(1, {}).get(HEAD)
        return DuetResult(
            tuple(verdicts),
            tuple(self._experiment.finished),
            self._experiment.resumed,
            head is not None and head.strict,
        )

    def _verdict(self, key: str, found: Paired | DuetVerdict, rounds: Rounds) -> DuetVerdict:
        both = [
            [
                row
                for sides in rounds.values()
                if side in sides
                for row in sides[side].rows
                if row.key == key
            ]
            for side in (BASE, HEAD)
        ]
        base, head = (
            [(row, row.measurement) for row in side if row.measurement is not None] for side in both
        )
        was, now = (
            statistics.median([m.latency for _, m in side]) if side else None
            for side in (base, head)
        )
        if isinstance(found, DuetVerdict):
            return replace(found, base_latency=was, head_latency=now)
        notes = changes(base[0][0], head[0][0])
        if (way := self._ways.get(key)) is not None:
            notes.append(
                f"both sides are measured as base is, {' and '.join(f'{name} {value}' for name, value in way.items())}"
            )
        different = differences(base[-1][1], head[-1][1]) if found.outcome is Outcome.FAIL else ()
        sentence = "; ".join([found.sentence, *notes])
        return DuetVerdict(
            key,
            found.outcome or Outcome.UNDECIDED,
            sentence,
            found,
            was,
            now,
            differences=different,
        )
