"""The search for a commit, with pairs that are made up: which commit it names, and when it names none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from processes import measured

from pytest_gpumem.judging.bisection import PARTS, PATIENT, STEP, Level, Levels, Search
from pytest_gpumem.judging.paired import Judge, Paired, judge_pairs
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.what_ran import Step as Launched
from pytest_gpumem.records.what_ran import StepKind, what_ran
from pytest_gpumem.runs.bisect import PROOF, Conclusion, Skip, bisect_times, bisect_values

KEY = "test_a.py::test_a"


class Commits:
    """Commits that are slower than good by these shares; each runs the code of this name."""

    def __init__(
        self,
        slower: Sequence[float],
        *,
        ran: Sequence[str] | None = None,
        spread: float = 0.002,
        seed: int = 0,
    ) -> None:
        self.slower = [math.log1p(share) for share in slower]
        self.ran = ran
        self.spread = spread
        self.rng = np.random.default_rng(seed)
        self.skipped: Mapping[int, str] = {}
        self.duets: list[tuple[int, int, str]] = []
        self.kept: dict[tuple[int, int, str], list[float]] = {}

    def look(self, index: int) -> Measurement:
        if index in self.skipped:
            raise Skip(self.skipped[index])
        # Without evidence, each commit runs code of its own.
        name = self.ran[index] if self.ran is not None else str(index)
        clocks = Conditions(sm_clock_hz=1e9, memory_clock_hz=1e9)
        return measured(
            1.0,
            what_ran=what_ran([Launched(StepKind.KERNEL, "k", code=name)], {}),
            conditions=(clocks, clocks),
        )

    def time(self, base: int, head: int, judge: Judge, name: str, rounds: int = 96) -> Paired:
        self.duets.append((base, head, name))
        pairs = self.kept.setdefault((base, head, name), [])
        for count in range(1, rounds + 1):
            if len(pairs) < count:
                pairs.append(
                    self.slower[head]
                    - self.slower[base]
                    + self.rng.normal(0, self.spread * math.sqrt(2))
                )
            found = judge({KEY: pairs[:count]}, {KEY: 0.01}, ())[KEY]
            if found.outcome is not None:
                break
        return found

    def bisect(self, on_step: Callable[..., Any] = lambda *_: None) -> Conclusion:
        last = len(self.slower) - 1
        return bisect_times(
            last, self.time(0, last, judge_pairs, ""), self.look, self.time, on_step
        )


def step_at(commit: int, share: float = 0.03) -> list[float]:
    return [share * (index >= commit) for index in range(65)]


@pytest.mark.parametrize("commit", [1, 2, 31, 32, 33, 63, 64])
def test_it_names_the_commit(commit: int) -> None:
    commits = Commits(step_at(commit), seed=commit)
    found = commits.bisect()
    assert found.commit == commit
    assert found.proof is not None
    assert found.proof.bounds[0] < 0.03 < found.proof.bounds[1]
    assert commits.duets[-1] == (commit - 1, commit, PROOF)
    assert len(found.steps) <= 6


def test_without_a_change_it_says_so_after_one_duet() -> None:
    commits = Commits([0.0] * 65)
    found = commits.bisect()
    assert (found.nothing, found.commit, len(commits.duets)) == (True, None, 1)


@pytest.mark.parametrize(
    "shares", [(0.03, 0.03), (0.02, 0.05), (0.05, 0.02), (0.04, -0.02)], ids=str
)
@pytest.mark.parametrize("places", [(10, 50), (33, 34), (1, 64)], ids=str)
def test_of_two_changes_it_names_one(places: tuple[int, int], shares: tuple[float, float]) -> None:
    """Also where the commits between them lie at half of the whole, the bound between the sides."""
    slower = [
        sum(share for place, share in zip(places, shares, strict=True) if index >= place)
        for index in range(65)
    ]
    found = Commits(slower).bisect()
    assert found.commit in [place for place, share in zip(places, shares, strict=True) if share > 0]


def test_many_small_steps_are_no_commit() -> None:
    found = Commits([0.03 * index / 64 for index in range(65)]).bisect()
    assert found.commit is None


def test_noise_that_no_pair_can_tell_ends_the_search_with_what_is_left() -> None:
    commits = Commits(step_at(20, share=0.5), spread=0.001)
    commits.spread, start = 5.0, commits.time(0, 64, judge_pairs, "")
    found = bisect_times(64, start, commits.look, commits.time, lambda *_: None)
    assert found.commit is None
    assert found.low < 20 <= found.high
    assert found.proof is None


def test_a_commit_that_runs_the_same_needs_no_duet() -> None:
    commits = Commits(step_at(20), ran=["slow" if index >= 20 else "fast" for index in range(65)])
    found = commits.bisect()
    assert found.commit == 20
    assert commits.duets == [(0, 64, ""), (19, 20, PROOF)]
    assert {step.same_as for step in found.steps} == {0, 64}


def test_what_runs_tells_nothing_where_good_and_bad_run_the_same() -> None:
    commits = Commits(step_at(20), ran=["one"] * 65)
    assert commits.bisect().commit == 20
    assert len(commits.duets) > 3


def test_the_proof_finds_what_the_evidence_misses() -> None:
    """Commit 40 runs other code and is as fast; the slow commit runs the same as good."""
    commits = Commits(step_at(20), ran=["new" if index >= 40 else "old" for index in range(65)])
    found = commits.bisect()
    assert (39, 40, PROOF) in commits.duets
    assert found.commit == 20


def test_commits_that_cannot_be_measured_are_stepped_over() -> None:
    commits = Commits(step_at(20))
    commits.skipped = dict.fromkeys(range(28, 40), "does not build")
    found = commits.bisect()
    assert found.commit == 20
    assert [step.skipped for step in found.steps if step.skipped is not None][:1] == [
        "does not build"
    ]


def test_a_change_among_them_is_a_range() -> None:
    commits = Commits(step_at(20))
    commits.skipped = dict.fromkeys([19, 20, 21], "lacks the test")
    found = commits.bisect()
    assert found.commit is None
    assert (found.low, found.high) == (18, 22)
    assert found.proof is not None
    assert found.proof.outcome is Outcome.FAIL


def test_a_value_takes_one_run_a_commit() -> None:
    runs: list[int] = []

    def value(index: int) -> int:
        runs.append(index)
        if index in (30, 31):
            raise Skip("does not build")
        return 100 + 5 * (index >= 7) + 50 * (index >= 20)

    found = bisect_values(64, value, lambda *_: None)
    assert (found.commit, found.values[19], found.values[20]) == (20, 105, 155)
    assert len(runs) == len(set(runs)) <= 10
    assert bisect_values(64, lambda index: 100 - index, lambda *_: None).nothing


def test_levels_are_proven_bounds() -> None:
    whole = math.log1p(0.04)
    assert Levels(whole, STEP).of([whole] * 8) == Level(PARTS - 1, PARTS)
    assert Levels(whole, STEP).of([0.0] * 8) == Level(0, 1)
    assert Levels(whole, STEP).of([whole] * 7) == Level(0, PARTS)  # one pair too few
    assert Levels(whole, STEP).of([whole / 2] * PATIENT) == Level(3, 5)


def test_a_commit_in_the_middle_moves_the_bound() -> None:
    search = Search(0, 64)
    middle = Level(3, 5)
    assert search.side(middle, PATIENT - 1) is None
    assert search.side(middle, PATIENT) is True
    search.take(32, middle, True)
    assert search.bound < 3
    assert search.side(Level(0, 1)) is False
    assert search.side(Level(3, 5)) is True
