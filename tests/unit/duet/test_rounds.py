"""The duet's course with processes that are made up: who is measured how long, what is repeated, what gets no verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import SETTINGS, Answer, Players, process, row, sides

from pytest_gpumem.duet import report
from pytest_gpumem.duet.errors import DuetError
from pytest_gpumem.duet.journal import Journal
from pytest_gpumem.duet.reading import Wanted
from pytest_gpumem.duet.rounds import ATTEMPTS, Duet, Progress, Result
from pytest_gpumem.duet.schedule import BASE, HEAD, Turn
from pytest_gpumem.duet.workers import Process
from pytest_gpumem.records.measurement import Conditions, Limits, Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome

A, B = "test_x.py::test_a", "test_x.py::test_b"


class Noise:
    """Latencies that the same turn always gives again, as a device's are not."""

    def __init__(self, spread: float = 0.001) -> None:
        self._spread = spread

    def __call__(self, turn: Turn, which: int, slower: float = 0.0, latency: float = 25e-6) -> float:
        rng = np.random.default_rng([turn.round, turn.side == HEAD, which])
        return float(latency * np.exp(rng.normal(0, self._spread)) * (1 + slower * (turn.side == HEAD)))


NOISE = Noise()


def plain(turn: Turn, attempt: int) -> Sequence[Row]:
    """Test a is as it was, test b 2 % slower."""
    return [row(A, NOISE(turn, 1)), row(B, NOISE(turn, 2, 0.02))]


def play(tmp_path: Path, answer: Answer, players: Players | None = None, wanted: Wanted | None = None, **changes: Any) -> Result:
    players = players or Players(answer)
    told: list[Progress] = changes.pop("told", [])
    own_sides = changes.pop("sides", sides())
    given: dict[str, Any] = {"max_regression": None, "rounds_max": 96, "seed": 0, "tell": told.append, **changes}
    journal = Journal(tmp_path / "journal", {"asked": "this"})
    try:
        return Duet(own_sides, players, journal, wanted or Wanted(), **given).play()  # type: ignore[arg-type]
    finally:
        journal.close()


def outcomes(result: Result) -> dict[str, Outcome | None]:
    return {one.key: one.outcome for one in result.told}


def test_each_test_is_measured_until_it_is_decided(tmp_path: Path) -> None:
    players, told = Players(plain), []
    result = play(tmp_path, plain, players, told=told)
    assert outcomes(result) == {B: Outcome.FAIL, A: Outcome.PASS}
    assert players.played[0][1] is None
    assert {tests for turn, tests in players.played if 1 < turn.round <= 10} == {(A, B)}
    assert {tests for turn, tests in players.played if turn.round > 10} == {(B,)}
    assert len(players.played) == 32
    assert report.exit_code(result, strict=False) == 1
    (slow,) = (one for one in result.told if one.key == B)
    assert slow.paired is not None
    assert slow.paired.change == pytest.approx(0.02, abs=0.002)
    assert slow.head_latency == pytest.approx(25.5e-6, rel=0.01)
    assert (told[-1].rounds, told[-1].seconds) == (15, 0.0)
    assert any("looks after 10, 16" in (now.note or "") for now in told)


def test_after_any_number_of_processes_the_journal_leads_to_the_same_verdicts(tmp_path: Path) -> None:
    whole = play(tmp_path, plain)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    for count in (1, 2, 3, 10, 24, 25, 30, 32, 33):
        (tmp_path / str(count)).mkdir()
        (tmp_path / str(count) / "journal").write_bytes(b"".join(lines[:count]))
        players = Players(plain)
        again = play(tmp_path / str(count), plain, players)
        assert again.told == whole.told
        assert again.resumed == count - 1
        assert len(players.played) == 33 - count


def test_limits_are_the_tests_own_unless_the_command_says_otherwise(tmp_path: Path) -> None:
    def loose(turn: Turn, attempt: int) -> Sequence[Row]:
        limits = Limits(max_regression="5%") if turn.side == HEAD else Limits(max_regression="0.1%")
        return [row(B, NOISE(turn, 2, 0.02), limits=limits)]

    assert outcomes(play(tmp_path, loose)) == {B: Outcome.PASS}
    (tmp_path / "journal").unlink()
    assert outcomes(play(tmp_path, loose, max_regression="1%")) == {B: Outcome.FAIL}
    (tmp_path / "journal").unlink()
    absolute = play(tmp_path, loose, max_regression="1% + 5 us")
    assert absolute.told[0].paired is not None
    assert absolute.told[0].paired.delta == pytest.approx(0.01 + 5 / 25, rel=0.02)


def test_launch_overhead_is_levelled(tmp_path: Path) -> None:
    """Processes differ by what a launch costs; what the kernel takes does not."""

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        overhead = 3e-6 + (1e-6 if turn.side == HEAD else 0.0)
        return [row(A, 25e-6 + overhead, overhead=overhead)]

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS}
    assert result.told[0].paired is not None
    assert abs(result.told[0].paired.change) < 1e-9


def test_a_throttled_process_is_repeated_and_then_unreliable(tmp_path: Path) -> None:
    def once(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn == Turn(3, HEAD) and attempt == 1
        return [row(A, 1.0 if bad else NOISE(turn, 1), Outcome.UNRELIABLE if bad else Outcome.NO_BASELINE)]

    told: list[Progress] = []
    result = play(tmp_path, once, told=told)
    assert outcomes(result) == {A: Outcome.PASS}
    assert len(result.processes) == 21
    assert any(now.note == f"round 3, head, repeated: {A}: because" for now in told)

    def always(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn.round == 3 and turn.side == HEAD
        return [row(A, NOISE(turn, 1), Outcome.UNRELIABLE if bad else Outcome.NO_BASELINE), row(B, NOISE(turn, 2))]

    (tmp_path / "journal").unlink()
    result = play(tmp_path, always)
    assert outcomes(result) == {A: Outcome.UNRELIABLE, B: Outcome.PASS}
    assert sum(one.turn == Turn(3, HEAD) for one in result.processes) == ATTEMPTS
    assert "head in round 3, also when repeated: because" in result.told[0].sentence
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6


def test_what_is_on_one_side_only_or_fails_there_is_named_and_no_verdict(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        rows = [row(A, NOISE(turn, 1))]
        if turn.side == HEAD:
            rows += [row("test_x.py::test_new", 1e-3), row(B, None, Outcome.FAIL, failed=True), row("test_x.py::test_c", 1e-3, failed=True)]
            said = {B: ("failed", "assert 0"), "test_x.py::test_c": ("failed", "ValueError")}
            return process(turn, rows, attempt, outcomes=said)
        rows += [row(B, 1e-3), row("test_x.py::test_c", 1e-3)]
        return process(turn, rows, attempt, outcomes={"test_x.py": ("failed", "its collection failed: SyntaxError")})

    result = play(tmp_path, answer)
    said = {one.key: one.sentence for one in result.told if one.outcome is None}
    assert said == {
        "test_x.py::test_new": "base: its collection failed: SyntaxError",
        B: "head: failed, assert 0",
        "test_x.py::test_c": "head: failed, ValueError",
    }
    assert outcomes(result)[A] is Outcome.PASS
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6


def test_a_row_that_breaks_its_own_limits_was_measured_all_the_same(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, NOISE(turn, 1), Outcome.FAIL, failed=True)]

    assert outcomes(play(tmp_path, answer)) == {A: Outcome.PASS}


@pytest.mark.parametrize(
    ("broken", "said", "other"),
    [
        (Outcome.FAIL, f"FAIL {A}[x]: 2 us is above max_latency 1 us", Outcome.PASS),
        (Outcome.FAIL, "AssertionError: wrong result", None),
        (Outcome.NO_BASELINE, "AssertionError: wrong result", None),
    ],
)
def test_a_limit_that_one_row_breaks_does_not_hide_the_other_rows_of_its_test(
    tmp_path: Path, broken: Outcome, said: str, other: Outcome | None
) -> None:
    def answer(turn: Turn, attempt: int) -> Process:
        rows = [row(A, NOISE(turn, 1), broken, label="x", failed=True), row(A, NOISE(turn, 2), label="y", failed=True)]
        return process(turn, rows, attempt, outcomes={A: ("failed", said)})

    assert outcomes(play(tmp_path, answer)) == {f"{A}[x]": other, f"{A}[y]": other}


def test_a_test_that_fails_in_one_round_is_repeated_and_then_no_verdict(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        if turn == Turn(5, BASE):
            return process(turn, [row(A, NOISE(turn, 1))], attempt, outcomes={B: ("failed", "flaky")})
        return plain(turn, attempt)

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS, B: None}
    assert [one.sentence for one in result.told if one.key == B] == ["base in round 5: failed, flaky"]
    assert sum(one.turn == Turn(5, BASE) for one in result.processes) == ATTEMPTS


def test_a_side_that_crashes_is_never_fine(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return process(turn, [], attempt, error="exit status -11: Segmentation fault") if turn.side == HEAD else plain(turn, attempt)

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: None, B: None}
    assert "head crashed: exit status -11: Segmentation fault" in result.told[0].sentence
    assert report.exit_code(result, strict=False) == 6


def test_a_test_that_nobody_has_is_named(tmp_path: Path) -> None:
    result = play(tmp_path, plain, wanted=Wanted(frozenset([A, "test_x.py::test_gone"])))
    assert outcomes(result) == {A: Outcome.PASS, "test_x.py::test_gone": None}
    assert result.told[0].sentence == "base: there is no such measurement; head: there is no such measurement"


P = "test_x.py::TestIt::test_p"


@pytest.mark.parametrize("name", [P, "test_x.py::TestIt", "test_x.py", f"{P}[1]"])
def test_a_name_is_that_of_all_tests_that_pytest_would_take_it_for(tmp_path: Path, name: str) -> None:
    """The looks follow from the measured rows, whatever the number of names."""
    every = [row(f"{P}[{size}]", NOISE(Turn(1, BASE), 1)) for size in range(3)] + [row("test_y.py::test_p", 1e-5), row(f"{P}ast", 1e-5)]
    asked = Wanted(frozenset([name, f"{P}[1]"]))
    result = play(tmp_path, lambda turn, attempt: process(turn, every, attempt), wanted=asked)
    expected = [f"{P}[1]"] if name.endswith("]") else [f"{P}[{size}]" for size in range(3)]
    assert sorted(one.key for one in result.told) == expected + ([f"{P}ast"] if P not in name else [])
    assert result.schedule is not None
    assert result.schedule.family == len(result.told)
    # What one name selects and another too is one.
    assert asked.names == [name]


def test_a_name_whose_tests_measured_nothing_has_their_reason(tmp_path: Path) -> None:
    skipped = {f"{P}[1]": ("skipped", "no cuFFT")}
    result = play(tmp_path, lambda turn, attempt: process(turn, [], attempt, outcomes=skipped), wanted=Wanted(frozenset([P])))
    assert [(one.key, one.sentence) for one in result.told] == [(P, "base: skipped, no cuFFT; head: skipped, no cuFFT")]


def test_a_crash_names_what_the_other_side_measured_and_nothing_twice(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Process:
        return process(turn, [row(f"{P}[1]", 1e-5)] if turn.side == BASE else [], error="killed" if turn.side == HEAD else None)

    result = play(tmp_path, answer, wanted=Wanted(frozenset([P, A])))
    assert outcomes(result) == {f"{P}[1]": None, A: None}


def test_only_the_flagged_measurement_of_a_test_is_judged(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, NOISE(turn, 1), label="one"), row(A, NOISE(turn, 2, 0.05), label="other")]

    result = play(tmp_path, answer, wanted=Wanted(frozenset([A]), frozenset([f"{A}[one]"])))
    assert outcomes(result) == {f"{A}[one]": Outcome.PASS}


def test_nothing_measured_is_no_verdict(tmp_path: Path) -> None:
    result = play(tmp_path, lambda turn, attempt: [])
    assert result.told == ()
    assert report.exit_code(result, strict=False) == 6


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("placements", 4, "--gpumem-placements"), ("total_budget", 60.0, "--gpumem-budget"), ("mode", "hot", "mode")],
)
def test_other_measuring_settings_are_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        settings = {**SETTINGS, "total_budget": None, **({name: value} if turn.side == HEAD else {})}
        return process(turn, plain(turn, attempt), attempt, settings=settings)

    with pytest.raises(DuetError, match=f"{name} is .* in base and .* in head.*{said}"):
        play(tmp_path, answer)


def test_another_device_is_refused(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return process(turn, plain(turn, attempt), attempt, uuid=f"GPU-{turn.round > 4}")

    with pytest.raises(DuetError, match="different devices: H200 GPU-False and H200 GPU-True"):
        play(tmp_path, answer)


def test_another_sampler_is_no_verdict_and_other_work_is_said(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        changed = {"sampler": "host"} if turn.side == HEAD else {}
        more = {"traffic": Traffic(4, 2)} if turn.side == HEAD else {}
        return [row(A, NOISE(turn, 1), **changed), row(B, NOISE(turn, 2), **more)]

    result = play(tmp_path, answer)
    said = {one.key: one for one in result.told}
    assert said[A].outcome is None
    assert "sampler was blocked in base and is host in head" in said[A].sentence
    assert said[B].outcome is Outcome.PASS
    assert "its traffic has changed from 3 B to 6 B" in said[B].sentence
    assert result.schedule is not None
    assert result.schedule.family == 1


def test_head_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DuetError, match="was changed while it was measured"):
        play(tmp_path, plain, sides=sides(lambda: "another"))


def test_noise_that_hides_a_percent_is_inconclusive_after_the_last_look(tmp_path: Path) -> None:
    noisy = Noise(0.05)
    result = play(tmp_path, lambda turn, attempt: [row(A, noisy(turn, 1))], rounds_max=20)
    assert outcomes(result) == {A: Outcome.INCONCLUSIVE}
    assert len(result.processes) == 40
    assert "could have been resolved" in result.told[0].sentence
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6


def test_too_few_rounds_are_refused_before_and_after_the_family_is_known(tmp_path: Path) -> None:
    players = Players(plain)
    with pytest.raises(DuetError, match=r"--rounds-max: 6 rounds .* 10 rounds or more"):
        play(tmp_path, plain, players, rounds_max=6)
    assert players.played == []
    many = [f"test_x.py::test_{i}" for i in range(300)]
    with pytest.raises(DuetError, match=r"--rounds-max: 12 rounds .* 14 rounds or more"):
        play(tmp_path, lambda turn, attempt: [row(nodeid, 1e-5) for nodeid in many], rounds_max=12)


MANY = [f"test_x.py::test_{i}" for i in range(20)]


def test_a_shift_of_many_tests_comes_first_and_ends_the_duet(tmp_path: Path) -> None:
    noisy = Noise(0.003)
    result = play(tmp_path, lambda turn, attempt: [row(nodeid, noisy(turn, i, 0.01)) for i, nodeid in enumerate(MANY)])
    assert result.common is not None
    assert result.common.outcome is Outcome.FAIL
    assert "the typical test of 20 is slower: +" in result.common.sentence
    assert len(result.processes) == 32
    assert set(outcomes(result).values()) <= {Outcome.FAIL, Outcome.INCONCLUSIVE}
    assert "the duet ended with the common shift" in result.told[-1].sentence
    assert report.exit_code(result, strict=False) == 1


def test_without_a_common_shift_single_tests_go_on_alone(tmp_path: Path) -> None:
    players = Players(lambda turn, attempt: [row(nodeid, NOISE(turn, i, 0.03 * (i == 7))) for i, nodeid in enumerate(MANY)])
    result = play(tmp_path, players.answer, players)
    assert result.common is not None
    assert result.common.outcome is Outcome.PASS
    assert [one.key for one in result.told if one.outcome is Outcome.FAIL] == [MANY[7]]
    assert all(outcomes(result)[nodeid] is Outcome.PASS for nodeid in MANY if nodeid != MANY[7])
    assert players.played[-1][1] == (MANY[7],)


def test_all_are_measured_until_the_common_shift_is_judged(tmp_path: Path) -> None:
    """Were those that pass left out of it, the others would look like a shift."""
    noisy = Noise(0.02)

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(nodeid, noisy(turn, i, 0.0075) if i else NOISE(turn, i)) for i, nodeid in enumerate(MANY)]

    players = Players(answer)
    result = play(tmp_path, players.answer, players)
    assert result.common is not None
    assert result.common.paired is not None
    judged = result.common.paired.pairs
    assert judged > 10
    assert any(one.paired is not None and one.paired.pairs == 10 for one in result.told)
    assert {tests for turn, tests in players.played if 1 < turn.round <= judged} == {tuple(MANY)}


def test_others_on_the_gpu_make_the_next_processes_wait_before_they_import(tmp_path: Path) -> None:
    crowded = (Conditions(other_processes=1), Conditions(other_processes=1))
    players = Players(plain)

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        if players.early:
            return plain(turn, attempt)
        return [row(A, 1e-3, Outcome.UNRELIABLE, conditions=crowded), row(B, 1e-3)]

    players.answer = answer
    result = play(tmp_path, answer, players)
    assert outcomes(result) == {A: Outcome.PASS, B: Outcome.FAIL}
    assert len(result.processes) == 33


def test_the_text_and_the_document_say_it_all(tmp_path: Path) -> None:
    result = play(tmp_path, plain)
    text = report.text(result, sides(), width=120, colour=False, seconds=42)
    assert "FAIL test_x.py::test_b: slower: +2." in text
    assert "32 processes in 42 s" in text
    document = report.to_json(result, sides(), {"seed": 0}, utc="now", seconds=42.0, code=1)
    assert document["plan"]["looks"][0] == 10
    assert [verdict["outcome"] for verdict in document["verdicts"]] == ["FAIL", "PASS"]
    assert len(document["processes"]) == 32
    assert document["processes"][0]["rows"][A]["medians"]
    assert document["simulated"] is False
    simulated = replace(result, processes=tuple(replace(one, simulated=True) for one in result.processes))
    assert "FAIL (simulated) test_x.py::test_b" in report.text(simulated, sides(), width=120, colour=False, seconds=42)


def test_simulated_passes_are_no_verdict_under_strict(tmp_path: Path) -> None:
    result = play(tmp_path, lambda turn, attempt: process(turn, [row(A, NOISE(turn, 1))], attempt, simulated=True))
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6
