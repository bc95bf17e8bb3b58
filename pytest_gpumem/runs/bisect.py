"""Find the commit that made a test slower, larger or busier: which commits are run, and what is known of each.

The search runs each commit that it comes to once. That run shows whether the commit has the test, and what a launch runs. A commit needs
no duet if it runs the same as one that was judged. A folder has the results: a journal for each commit, and one for each pair of commits.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpumem.judging.bisection import (
    BAD,
    GOOD,
    STEP,
    STEP_AGAIN,
    Level,
    Levels,
    Search,
    of_proof,
    of_step,
    whole_of,
)
from pytest_gpumem.judging.judge import ran_the_same
from pytest_gpumem.judging.paired import Judge, Paired, judge_pairs
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.revisions import Commit
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.experiment import AHEAD, ATTEMPTS, Experiment, Processes
from pytest_gpumem.runs.journal import Journal
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn
from pytest_gpumem.runs.reading import RowFilter, unmeasured
from pytest_gpumem.runs.rounds import Duet, DuetProgress, DuetResult
from pytest_gpumem.runs.worktree import Side, commit_side, working_tree

KEPT = 3  # commits whose worktree and environment are kept: good, and the two last ones
PROOF = "proof-"  # begins the journal of the duet that proves a commit
_UNPREPARED = "not prepared: "  # begins the error of a commit that cannot be run


class Skip(Exception):
    """A commit cannot be measured: it does not build, lacks the test, or the test fails there."""


@dataclass(frozen=True)
class CommitStep:
    """What is known of one commit."""

    index: int  # on the line from good, which is 0, to bad
    bad: bool | None = None  # it is on bad's side; None: skipped, or not decided
    skipped: str | None = None  # why
    same_as: int | None = None  # the commit that ran the same, from which the side follows
    paired: Paired | None = None  # its duet with good
    value: int | None = None  # its bytes or its count


@dataclass(frozen=True)
class Conclusion:
    """How a search ended: the change is in the commits `low + 1` to `high`."""

    low: int
    high: int
    steps: tuple[CommitStep, ...] = ()
    start: Paired | None = None  # bad against good; None for bytes and counts
    proof: Paired | None = None  # `high` against `low`; None if they were not compared
    values: Mapping[int, int] = field(default_factory=dict)  # bytes or counts by index
    nothing: bool = False  # bad is not worse than good

    @property
    def commit(self) -> int | None:
        """The commit that carries the change, beyond doubt; None if it is not known."""
        proven = bool(self.values) or (
            self.proof is not None and self.proof.outcome is Outcome.FAIL
        )
        return self.high if proven and not self.nothing and self.high - self.low == 1 else None


Look = Callable[[int], Measurement]
"""What runs at a commit. Raises `Skip`."""
Time = Callable[[int, int, Judge, str], Paired]
"""The duet of two commits; each name has pairs of its own. Raises `Skip`: the second one cannot be measured."""
OnStep = Callable[
    [Search, int, CommitStep | None], object
]  # is called with a commit before it is measured, and after, with what is known then


def bisect_times(
    commits: int, start: Paired, look: Look, time: Time, on_step: OnStep
) -> Conclusion:
    """Find the commit that made a test slower.

    Args:
        commits: index of bad; good is 0.
        start: the duet of good and bad.
        look: is called for every commit that the search comes to.
        time: is called for those whose side does not follow from what they ran.
        on_step: is called before and after each commit.
    """
    found = Conclusion(0, commits, (), start, nothing=start.outcome is Outcome.PASS)
    if start.outcome is not Outcome.FAIL:
        return found
    if commits == 1:
        return Conclusion(0, 1, (), start, start)
    line = _Line(commits, whole_of(start), look, time, on_step)
    for error, evidence in ((STEP, True), (STEP_AGAIN, False)):
        search, decided = line.narrow(error, evidence=evidence)
        found = Conclusion(search.low, search.high, tuple(line.steps), start)
        if not decided:
            break
        try:
            proof = time(search.low, search.high, of_proof(line.whole), PROOF)
        except Skip:
            break
        found = Conclusion(search.low, search.high, tuple(line.steps), start, proof)
        if proof.outcome is not Outcome.PASS:
            break
    return found


@dataclass
class _Line:
    """The commits between good and bad, and what is known of them."""

    commits: int
    whole: float
    look: Look
    time: Time
    on_step: OnStep
    steps: list[CommitStep] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    known: dict[int, tuple[Measurement, Level]] = field(
        default_factory=dict
    )  # what commits ran whose level was measured

    def narrow(self, error: float, *, evidence: bool) -> tuple[Search, bool]:
        """Search as far as possible; False if a commit is not decided.
        `evidence`: a commit that runs the same as another one is on its side.
        """
        search = Search(0, self.commits, error)
        good, bad = (self.look(index) for index in (0, self.commits))
        # If both ran the same, what a commit runs does not tell its side.
        self.known = (
            {0: (good, GOOD), self.commits: (bad, BAD)}
            if evidence and not ran_the_same(good, bad)
            else {}
        )
        while (index := search.next(self.skipped)) is not None:
            self.on_step(search, index, None)
            step, found = self._step(search, index)
            self.steps.append(step)
            self.on_step(search, index, step)
            if step.skipped is not None:
                self.skipped.add(index)
            elif step.bad is None:
                return search, False
            else:
                search.take(index, found, step.bad)
        return search, True

    def _step(self, search: Search, index: int) -> tuple[CommitStep, Level]:
        try:
            ran = self.look(index)
            for known, (other, found) in self.known.items():
                if ran_the_same(ran, other) and (bad := search.side(found)) is not None:
                    return CommitStep(index, bad, same_as=known), found
            paired = self.time(0, index, of_step(search, self.whole), "")
        except Skip as reason:
            return CommitStep(index, skipped=str(reason)), GOOD
        found = Levels(self.whole, search.error).of(paired.log_ratios)
        if paired.outcome is not None and self.known:
            self.known[index] = ran, found
        return CommitStep(
            index, None if paired.outcome is None else paired.outcome is Outcome.FAIL, paired=paired
        ), found


def bisect_values(commits: int, value: Callable[[int], int], on_step: OnStep) -> Conclusion:
    """Find the commit that raised a figure which is exact, by one run a commit.
    `commits`: index of bad; good is 0.
    `value`: of a commit. Raises `Skip`.
    """
    values = {0: value(0), commits: value(commits)}
    if values[commits] <= values[0]:
        return Conclusion(0, commits, values=values, nothing=True)
    search, steps, skipped = Search(0, commits), list[CommitStep](), set[int]()
    while (index := search.next(skipped)) is not None:
        on_step(search, index, None)
        try:
            values[index] = value(index)
        except Skip as reason:
            skipped.add(index)
            step = CommitStep(index, skipped=str(reason))
        else:
            # The middle between good and bad: a larger change on one side of it is never lost.
            bad = 2 * values[index] > values[0] + values[commits]
            step = CommitStep(index, bad, value=values[index])
            search.take(index, BAD if bad else GOOD, bad)
        steps.append(step)
        on_step(search, index, step)
    return Conclusion(search.low, search.high, tuple(steps), values=values)


def by_times(
    pairs: Mapping[str, Sequence[float]], deltas: Mapping[str, float], _same: Collection[str] = ()
) -> dict[str, Paired]:
    """As `judge_pairs`, whatever ran: good and bad may differ by what nothing but the times shows, and no search finds a rare mode."""
    return judge_pairs(pairs, deltas, clean=1)


@dataclass(frozen=True)
class Question:
    """What is measured, and how."""

    here: Path  # folder in which the command was called
    tests: tuple[str, ...]  # node ids, as `RowFilter.tests`
    arguments: tuple[str, ...]  # pytest's
    journal: Path  # folder
    environment: Mapping[str, str]
    rounds_max: int  # pairs of a duet at most
    identity: Mapping[str, Any]  # a journal that was measured under other values is refused


class Commits:
    """Measures commits in worktrees of their own. Processes that were run before come from the journals."""

    def __init__(
        self,
        line: Sequence[Commit],
        asked: Question,
        progress: Callable[[], AbstractContextManager[Callable[[DuetProgress], None]]],
    ) -> None:
        """Nothing is run yet.
        `line`: the commits from good to bad.
        `progress`: shows a duet while it runs.
        """
        self.processes = self.resumed = (
            0  # that were measured, the resumed ones included; that come from journals
        )
        self.duets = 0
        self.tests = asked.tests  # node ids that a process runs
        self._line = line
        self._asked = asked
        self._progress = progress
        self.tree = working_tree(asked.here)  # of which no commit may import anything
        self._ready: OrderedDict[int, tuple[Side, ExitStack]] = OrderedDict()
        self._looks: dict[int, ProcessRecord] = {}
        self._played: dict[str, int] = {}  # processes of each duet, by the name of its journal

    def close(self) -> None:
        """Remove all worktrees and environments."""
        while self._ready:
            self._ready.popitem()[1][1].close()

    def side(self, index: int) -> Side:
        """A commit, ready to run. Raises `RunError`: it cannot be prepared, or has not the file of a test."""
        if index not in self._ready:
            stack = ExitStack()
            try:
                side = stack.enter_context(commit_side(self._line[index].id, self._asked.here))
            except BaseException:
                stack.close()
                raise
            self._ready[index] = side, stack
        self._ready.move_to_end(index)
        while len(self._ready) > KEPT:
            self._ready.popitem(last=False)[1][1].close()
        side = self._ready[index][0]
        if missing := [file for file in self._files if not (side.folder / file).exists()]:
            raise RunError(f"there is no {missing[0]}")
        return side

    def look(self, index: int) -> ProcessRecord:
        """One process of a commit. Raises `Skip`: it measures none of the tests."""
        if index not in self._looks:
            self._looks[index] = self._looked(index)
        process = self._looks[index]
        if (why := unmeasured(process, RowFilter(frozenset(self.tests)))) is not None:
            raise Skip(why.removeprefix(f"crashed: {_UNPREPARED}"))
        return process

    def _looked(self, index: int) -> ProcessRecord:
        turn = Turn(1, HEAD)
        with (
            self._journal(self._line[index].short) as journal,
            Experiment(self._processes({HEAD: index}, 0), [turn], journal) as alone,
        ):
            try:
                process = alone.measure(self.tests)
            except RunError as error:
                utc = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
                process = ProcessRecord(turn, ATTEMPTS, utc, 0.0, 0, error=f"{_UNPREPARED}{error}")
                journal.append(to_plain(process))
            self.resumed += alone.resumed
            self.processes += len(journal.lines)
        return process

    def _processes(self, indices: Mapping[str, int], ahead: int = AHEAD) -> Processes:
        asked = self._asked
        return Processes(
            _LazySides(self, indices),
            asked.arguments,
            self._files,
            asked.environment,
            ahead=ahead,
            evidence=True,
            tree=self.tree,
        )

    @property
    def _files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})

    def _journal(self, name: str) -> Journal:
        return Journal(self._asked.journal / f"{name}.jsonl", self._asked.identity)

    def duet(
        self,
        base: int,
        head: int,
        wanted: RowFilter,
        *,
        judge: Judge = by_times,
        max_regression: Mapping[str, str] | None = None,
        name: str = "",
    ) -> DuetResult:
        """The duet of two commits.
        `judge`: as of `Duet`.
        `name`: of the journal, where two duets of the same commits are to have pairs of their own.
        """
        sides = {
            # A worktree of a commit does not change.
            side: Side(
                f"commit {commit.short}",
                commit.id,
                self._asked.here,
                self._asked.here,
                sys.executable,
                partial(str, commit.id),
            )
            for side, commit in ((BASE, self._line[base]), (HEAD, self._line[head]))
        }
        processes = self._processes({BASE: base, HEAD: head})
        stem = f"{name}{self._line[base].short}-{self._line[head].short}"
        with self._journal(stem) as journal, self._progress() as show:
            try:
                duet = Duet(
                    sides,
                    processes,
                    journal,
                    wanted,
                    max_regression=max_regression,
                    rounds_max=self._asked.rounds_max,
                    seed=int(
                        self._line[head].id[:6], 16
                    ),  # another order of base and head in every duet
                    on_progress=show,
                    judge=judge,
                )
                played = duet.play()
            finally:
                processes.close()
        known = self._played.get(stem, 0)  # a second search goes on with the duets of the first
        self.duets += not known
        self.processes += len(played.processes) - known
        self.resumed += 0 if known else played.resumed
        self._played[stem] = len(played.processes)
        return played

    def timed(self, wanted: RowFilter, key: str) -> Time:
        """The duets of one measurement."""

        def time(base: int, head: int, judge: Judge, name: str) -> Paired:
            played = self.duet(base, head, wanted, judge=judge, name=name)
            verdict = next((one for one in played.verdicts if one.key == key), None)
            if verdict is None:
                raise Skip("it measured nothing")
            if verdict.paired is not None:
                return verdict.paired
            if verdict.outcome is Outcome.UNDECIDED:  # by the conditions
                return Paired(None, (), 0.0, 1.0, 1.0)
            raise Skip(verdict.sentence)

        return time


class _LazySides(Mapping[str, Side]):
    """The sides of a duet, prepared when the first process needs them: a journal may hold them all."""

    def __init__(self, commits: Commits, indices: Mapping[str, int]) -> None:
        self._commits = commits
        self._indices = indices

    def __getitem__(self, side: str) -> Side:
        return self._commits.side(self._indices[side])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def rows_of_test(process: ProcessRecord, test: str) -> dict[str, Row]:
    """The rows of a test, or the row of this key, by key."""
    keys = {row.key: row for row in process.rows}
    if test in keys:
        return {test: keys[test]}
    wanted = RowFilter(frozenset({test}))
    return {key: row for key, row in keys.items() if wanted.holds(row.nodeid, key)}
