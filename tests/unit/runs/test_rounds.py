"""The duet's course with processes that are made up: who is measured how long, what is repeated, what gets no verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_devices import H100
from msgspec import structs
from processes import SETTINGS, Answer, Players, process, row, sides

from pytest_gpumem.judging.paired import MODE_PAIRS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Conditions, Limits, MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran
from pytest_gpumem.runs import RunError, report, rounds
from pytest_gpumem.runs.experiment import ATTEMPTS
from pytest_gpumem.runs.journal import Journal
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn
from pytest_gpumem.runs.reading import RowFilter
from pytest_gpumem.runs.rounds import Duet, DuetProgress, DuetResult

A, B = "test_x.py::test_a", "test_x.py::test_b"
SIMULATED = structs.replace(H100, simulated=True)


class Noise:
    """Latencies that the same turn always gives again, as a device's are not."""

    def __init__(self, spread: float = 0.001) -> None:
        self._spread = spread

    def __call__(
        self, turn: Turn, which: int, slower: float = 0.0, latency: float = 25e-6
    ) -> float:
        rng = np.random.default_rng([turn.round, turn.side == HEAD, which])
        return float(
            latency * np.exp(rng.normal(0, self._spread)) * (1 + slower * (turn.side == HEAD))
        )


NOISE = Noise()


def plain(turn: Turn, attempt: int) -> Sequence[Row]:
    """Test a is as it was, test b 2 % slower."""
    return [row(A, NOISE(turn, 1)), row(B, NOISE(turn, 2, 0.02))]


QUICK = 8  # pairs of a PASS: as soon as the median pair shows it


def play(
    tmp_path: Path,
    answer: Answer,
    players: Players | None = None,
    wanted: RowFilter | None = None,
    **changes: Any,
) -> DuetResult:
    players = players or Players(answer)
    told: list[DuetProgress] = changes.pop("told", [])
    mode_pairs = changes.pop("mode_pairs", QUICK)
    own_sides = changes.pop("sides", sides())
    given: dict[str, Any] = {
        "max_regression": None,
        "rounds_max": 96,
        "on_progress": told.append,
        **changes,
    }
    journal = Journal(tmp_path / "journal", {"asked": "this"})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "MODE_PAIRS", mode_pairs)
            return Duet(own_sides, players, journal, wanted or RowFilter(), **given).play()
    finally:
        journal.close()


def outcomes(result: DuetResult) -> dict[str, Outcome | None]:
    return {one.key: one.outcome for one in result.verdicts}


@pytest.mark.parametrize(("most", "pairs", "share"), [(96, MODE_PAIRS, "9.50"), (12, 12, "22.1")])
def test_a_pass_takes_the_pairs_that_exclude_a_slow_mode_or_all(
    tmp_path: Path, most: int, pairs: int, share: str
) -> None:
    (verdict,) = play(
        tmp_path, lambda turn, _: [row(A, NOISE(turn, 1))], rounds_max=most, mode_pairs=MODE_PAIRS
    ).verdicts
    assert verdict.paired is not None
    assert (verdict.outcome, verdict.paired.pairs) == (Outcome.PASS, pairs)
    assert f"a slow mode in up to {share} % of processes may be missed" in verdict.sentence


def test_each_test_is_measured_until_it_is_decided(tmp_path: Path) -> None:
    players, told = Players(plain), list[DuetProgress]()
    result = play(tmp_path, plain, players, told=told)
    assert outcomes(result) == {B: Outcome.FAIL, A: Outcome.PASS}
    assert players.played[0][1] is None
    assert {tests for turn, tests in players.played if 1 < turn.round <= 8} == {(A, B)}
    assert {tests for turn, tests in players.played if turn.round > 8} == {(B,)}
    assert {one.key: one.paired.pairs for one in result.verdicts if one.paired is not None} == {
        A: 8,
        B: 11,
    }
    assert len(players.played) == 22
    assert report.exit_code(result, strict=False) == 1
    (slow,) = (one for one in result.verdicts if one.key == B)
    assert slow.paired is not None
    assert slow.paired.change == pytest.approx(0.02, abs=0.002)
    assert slow.head_latency == pytest.approx(25.5e-6, rel=0.01)
    # Before the last process: of the pair that is then complete nothing is open.
    assert (told[-1].rounds, told[-1].last, told[-1].open, told[-1].at_most) == (
        10,
        96,
        1,
        2 * (96 - 11),
    )


CLOCKS = Conditions(sm_clock_hz=1.98e9, memory_clock_hz=2.6e9)


def ran(code: str, *arguments: str) -> WhatRan:
    return what_ran([Step(StepKind.KERNEL, "triad", code=code, arguments=arguments)], {})


@pytest.mark.parametrize(
    ("slower", "head", "outcome", "pairs", "settled"),
    [
        (0.0, {}, Outcome.PASS, 5, True),
        (0.0, {"what_ran": ran("b")}, Outcome.PASS, 8, False),
        (0.0, {"what_ran": None}, Outcome.PASS, 8, False),
        (
            0.0,
            {"conditions": (structs.replace(CLOCKS, sm_clock_hz=1.5e9),) * 2},
            Outcome.PASS,
            8,
            False,
        ),
        (0.0, {"what_ran": ran("b"), "from_round": 5}, Outcome.PASS, 8, False),
        (0.02, {}, Outcome.FAIL, 11, False),  # whatever ran
    ],
)
def test_the_same_machine_code_on_both_sides_needs_fewer_pairs(
    tmp_path: Path, slower: float, head: dict[str, Any], outcome: Outcome, pairs: int, settled: bool
) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        given: dict[str, Any] = {"what_ran": ran("a"), "conditions": (CLOCKS, CLOCKS)}
        changes = dict(head)
        if turn.side == HEAD and turn.round >= changes.pop("from_round", 1):
            given |= changes
        return [row(A, NOISE(turn, 1, slower), **given)]

    (verdict,) = play(tmp_path, answer).verdicts
    assert verdict.paired is not None
    assert (verdict.outcome, verdict.paired.pairs, verdict.paired.same_code) == (
        outcome,
        pairs,
        settled,
    )
    assert ("the same machine code ran" in verdict.sentence) == settled


@pytest.mark.parametrize(("size", "pairs"), [("100000", 5), ("107ae1", 8)])
def test_bytes_of_arguments_that_vary_between_processes_of_base_are_not_compared(
    tmp_path: Path, size: str, pairs: int
) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        padding = f"{turn.round + 100 * (turn.side == HEAD):02x}00000001"
        given = ran("a", size if turn.side == HEAD else "100000", padding)
        return [row(A, NOISE(turn, 1, 0.0), what_ran=given, conditions=(CLOCKS, CLOCKS))]

    (verdict,) = play(tmp_path, answer).verdicts
    assert verdict.paired is not None
    assert (verdict.outcome, verdict.paired.pairs) == (Outcome.PASS, pairs)


def test_after_any_number_of_processes_the_journal_leads_to_the_same_verdicts(
    tmp_path: Path,
) -> None:
    whole = play(tmp_path, plain)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    for count in (1, 2, 3, 10, 17, 18, 22, 23):
        (tmp_path / str(count)).mkdir()
        (tmp_path / str(count) / "journal").write_bytes(b"".join(lines[:count]))
        players = Players(plain)
        again = play(tmp_path / str(count), plain, players)
        assert again.verdicts == whole.verdicts
        assert again.resumed == count - 1
        assert len(players.played) == 23 - count


def test_the_commands_limit_is_of_tests_without_their_own(tmp_path: Path) -> None:
    def loose(turn: Turn, attempt: int) -> Sequence[Row]:
        limits = Limits(max_regression="5%") if turn.side == HEAD else Limits(max_regression="0.1%")
        return [row(B, NOISE(turn, 2, 0.02), limits=limits)]

    assert outcomes(play(tmp_path, loose)) == {B: Outcome.PASS}
    (tmp_path / "journal").unlink()
    assert outcomes(play(tmp_path, loose, max_regression="1%")) == {B: Outcome.FAIL}
    (tmp_path / "journal").unlink()

    def of_the_test(turn: Turn, attempt: int) -> Sequence[Row]:
        return [
            structs.replace(
                one, limits=structs.replace(one.limits, origin={"max_regression": "marker"})
            )
            for one in loose(turn, attempt)
        ]

    assert outcomes(play(tmp_path, of_the_test, max_regression="1%")) == {B: Outcome.PASS}
    (tmp_path / "journal").unlink()
    absolute = play(tmp_path, loose, max_regression="1% + 5 us")
    assert absolute.verdicts[0].paired is not None
    assert absolute.verdicts[0].paired.delta == pytest.approx(0.01 + 5 / 25, rel=0.02)


def test_launch_overhead_is_levelled(tmp_path: Path) -> None:
    """Processes differ by what a launch costs; what the kernel takes does not."""

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        overhead = 3e-6 + (1e-6 if turn.side == HEAD else 0.0)
        return [row(A, 25e-6 + overhead, overhead=overhead)]

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS}
    assert result.verdicts[0].paired is not None
    assert abs(result.verdicts[0].paired.change) < 1e-9


def test_a_throttled_process_is_repeated_and_then_undecided(tmp_path: Path) -> None:
    def once(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn == Turn(3, HEAD) and attempt == 1
        return [
            row(A, 1.0 if bad else NOISE(turn, 1), Code.CONDITIONS if bad else Code.NO_BASELINE)
        ]

    told: list[DuetProgress] = []
    result = play(tmp_path, once, told=told)
    assert outcomes(result) == {A: Outcome.PASS}
    assert len(result.processes) == 17
    assert any(now.note == f"round 3, head, repeated: {A}: because" for now in told)

    def always(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn.round == 3 and turn.side == HEAD
        return [
            row(A, NOISE(turn, 1), Code.CONDITIONS if bad else Code.NO_BASELINE),
            row(B, NOISE(turn, 2)),
        ]

    (tmp_path / "journal").unlink()
    result = play(tmp_path, always)
    assert outcomes(result) == {A: Outcome.UNDECIDED, B: Outcome.PASS}
    assert sum(one.turn == Turn(3, HEAD) for one in result.processes) == ATTEMPTS
    assert "head in round 3, also when repeated: because" in result.verdicts[0].sentence
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6


def test_what_is_on_one_side_only_is_no_verdict_and_what_fails_in_head_alone_is_red(
    tmp_path: Path,
) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        rows = [row(A, NOISE(turn, 1))]
        if turn.side == HEAD:
            rows += [
                row("test_x.py::test_new", 1e-3),
                row(B, None, None, failed=True),
                row("test_x.py::test_c", 1e-3, failed=True),
            ]
            said = {B: ("failed", "assert 0"), "test_x.py::test_c": ("failed", "ValueError")}
            return process(turn, rows, attempt, outcomes=said)
        rows += [row(B, 1e-3), row("test_x.py::test_c", 1e-3)]
        return process(
            turn,
            rows,
            attempt,
            outcomes={"test_x.py": ("failed", "its collection failed: SyntaxError")},
        )

    result = play(tmp_path, answer)
    said = {one.key: (one.outcome, one.sentence) for one in result.verdicts if one.key != A}
    assert said == {
        "test_x.py::test_new": (None, "base: its collection failed: SyntaxError"),
        B: (Outcome.FAIL, "head: failed, assert 0"),
        "test_x.py::test_c": (Outcome.FAIL, "head: failed, ValueError"),
    }
    assert outcomes(result)[A] is Outcome.PASS
    assert report.exit_code(result, strict=False) == 1


def test_a_test_that_fails_in_base_or_on_both_sides_is_reported_and_not_red(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        failing = (B, "test_x.py::test_c") if turn.side == BASE else ("test_x.py::test_c",)
        rows = [
            row(A, NOISE(turn, 1)),
            *(row(key, 1e-3, failed=key in failing) for key in (B, "test_x.py::test_c")),
        ]
        return process(turn, rows, attempt, outcomes=dict.fromkeys(failing, ("failed", "assert 0")))

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS, B: None, "test_x.py::test_c": None}
    assert report.exit_code(result, strict=False) == 0


def test_a_file_that_head_alone_cannot_import_is_red_also_where_base_has_no_such_file(
    tmp_path: Path,
) -> None:
    said = {
        "test_y.py": ("failed", "its collection failed: SyntaxError"),
        "test_z.py::test_cpu": ("failed", "assert 0"),
    }

    def answer(turn: Turn, attempt: int) -> Any:
        both = {"test_z.py::test_cpu": said["test_z.py::test_cpu"]}
        return process(
            turn, [row(A, NOISE(turn, 1))], attempt, outcomes=said if turn.side == HEAD else both
        )

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS, "test_y.py": Outcome.FAIL}
    (tmp_path / "journal").unlink()
    assert outcomes(play(tmp_path, answer, wanted=RowFilter(frozenset([A])))) == {A: Outcome.PASS}


@pytest.mark.parametrize(("nodeid", "label"), [(B, ""), (f"{B}[x[1]]", "warm")])
def test_a_test_that_begins_to_fail_in_head_is_red_whatever_its_pairs_say(
    tmp_path: Path, nodeid: str, label: str
) -> None:
    failing = row(nodeid, NOISE(Turn(1, HEAD), 2), label=label)

    def answer(turn: Turn, attempt: int) -> Any:
        if turn.side == HEAD and turn.round >= 8:
            return process(
                turn, [row(A, NOISE(turn, 1))], attempt, outcomes={nodeid: ("failed", "wrong")}
            )
        return [row(A, NOISE(turn, 1)), row(nodeid, NOISE(turn, 2), label=label)]

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS, failing.key: Outcome.FAIL}
    assert [one.sentence for one in result.verdicts if one.key == failing.key] == [
        "head in round 8: failed, wrong"
    ]


def test_what_base_does_not_have_is_new_unless_it_stands_for_something_that_head_lacks(
    tmp_path: Path,
) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        labels = ("one", "other") if turn.side == BASE else ("one", "renamed")
        rows = [row(A, NOISE(turn, 1), label=label) for label in labels]
        skipped = {} if turn.side == HEAD else {"test_x.py::test_s": ("skipped", "no torch")}
        new = [row(B, 1e-3), row("test_x.py::test_s", 1e-3)] if turn.side == HEAD else []
        return process(turn, [*rows, *new], attempt, outcomes=skipped)

    result = play(tmp_path, answer)
    assert {one.key: one.new for one in result.verdicts} == {
        f"{A}[one]": False,
        f"{A}[other]": False,
        f"{A}[renamed]": False,
        B: True,
        "test_x.py::test_s": False,
    }
    (renamed,) = (one.sentence for one in result.verdicts if one.key == f"{A}[renamed]")
    assert (
        renamed
        == f"base: it measured nothing; base measures {A}[other] in that test, which head does not"
    )


def test_a_row_that_breaks_its_own_limits_was_measured_all_the_same(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, NOISE(turn, 1), None, failed=True)]

    assert outcomes(play(tmp_path, answer)) == {A: Outcome.PASS}


@pytest.mark.parametrize(
    ("broken", "error", "other"),
    [(None, False, Outcome.PASS), (None, True, None), (Code.NO_BASELINE, True, None)],
)
def test_a_limit_that_one_row_breaks_does_not_hide_the_other_rows_of_its_test(
    tmp_path: Path, broken: Code | None, error: bool, other: Outcome | None
) -> None:
    def answer(turn: Turn, attempt: int) -> ProcessRecord:
        rows = [
            row(A, NOISE(turn, 1), broken, label="x", failed=True),
            row(A, NOISE(turn, 2), label="y", failed=True),
        ]
        rows = [structs.replace(one, test_error=True) for one in rows] if error else rows
        return process(turn, rows, attempt, outcomes={A: ("failed", "by a limit, or an error")})

    assert outcomes(play(tmp_path, answer)) == {f"{A}[x]": other, f"{A}[y]": other}


def test_a_limit_on_memory_that_a_test_breaks_does_not_hide_its_times(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> ProcessRecord:
        of_memory = structs.replace(
            row(A, None, None, label="load", failed=True), footprint=Footprint(peak=1 << 30)
        )
        return process(
            turn,
            [row(A, NOISE(turn, 1), failed=True), of_memory],
            attempt,
            outcomes={A: ("failed", "by a limit")},
        )

    assert outcomes(play(tmp_path, answer)) == {A: Outcome.PASS}


def test_a_test_that_fails_in_one_round_is_repeated_and_then_no_verdict(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        if turn == Turn(5, BASE):
            return process(
                turn, [row(A, NOISE(turn, 1))], attempt, outcomes={B: ("failed", "flaky")}
            )
        return plain(turn, attempt)

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.PASS, B: None}
    assert [one.sentence for one in result.verdicts if one.key == B] == [
        "base in round 5: failed, flaky"
    ]
    assert sum(one.turn == Turn(5, BASE) for one in result.processes) == ATTEMPTS


def test_a_side_that_crashes_is_never_fine(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return (
            process(turn, [], attempt, error="ended by SIGSEGV: Segmentation fault")
            if turn.side == HEAD
            else plain(turn, attempt)
        )

    result = play(tmp_path, answer)
    assert outcomes(result) == {A: Outcome.FAIL, B: Outcome.FAIL}
    assert "head crashed: ended by SIGSEGV: Segmentation fault" in result.verdicts[0].sentence
    assert report.exit_code(result, strict=False) == 1


def test_a_test_that_nobody_has_is_named(tmp_path: Path) -> None:
    result = play(tmp_path, plain, wanted=RowFilter(frozenset([A, "test_x.py::test_gone"])))
    assert outcomes(result) == {A: Outcome.PASS, "test_x.py::test_gone": None}
    assert [one.sentence for one in result.verdicts if one.outcome is None] == [
        "base: there is no such measurement; head: there is no such measurement"
    ]


P = "test_x.py::TestIt::test_p"


@pytest.mark.parametrize("name", [P, "test_x.py::TestIt", "test_x.py", f"{P}[1]"])
def test_a_name_is_that_of_all_tests_that_pytest_would_take_it_for(
    tmp_path: Path, name: str
) -> None:
    every = [row(f"{P}[{size}]", NOISE(Turn(1, BASE), 1)) for size in range(3)] + [
        row("test_y.py::test_p", 1e-5),
        row(f"{P}ast", 1e-5),
    ]
    asked = RowFilter(frozenset([name, f"{P}[1]"]))
    result = play(tmp_path, lambda turn, attempt: process(turn, every, attempt), wanted=asked)
    expected = [f"{P}[1]"] if name.endswith("]") else [f"{P}[{size}]" for size in range(3)]
    assert sorted(one.key for one in result.verdicts) == expected + (
        [f"{P}ast"] if P not in name else []
    )
    assert set(outcomes(result).values()) == {Outcome.PASS}
    # What one name selects and another too is one.
    assert asked.names == [name]


def test_a_name_whose_tests_measured_nothing_has_their_reason(tmp_path: Path) -> None:
    skipped = {f"{P}[1]": ("skipped", "no cuFFT")}
    result = play(
        tmp_path,
        lambda turn, attempt: process(turn, [], attempt, outcomes=skipped),
        wanted=RowFilter(frozenset([P])),
    )
    assert [(one.key, one.sentence) for one in result.verdicts] == [
        (P, "base: skipped, no cuFFT; head: skipped, no cuFFT")
    ]


def test_a_crash_names_what_the_other_side_measured_and_nothing_twice(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> ProcessRecord:
        return process(
            turn,
            [row(f"{P}[1]", 1e-5)] if turn.side == BASE else [],
            error="killed" if turn.side == HEAD else None,
        )

    result = play(tmp_path, answer, wanted=RowFilter(frozenset([P, A])))
    assert outcomes(result) == {f"{P}[1]": Outcome.FAIL, A: Outcome.FAIL}


def test_only_the_flagged_measurement_of_a_test_is_judged(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, NOISE(turn, 1), label="one"), row(A, NOISE(turn, 2, 0.05), label="other")]

    result = play(tmp_path, answer, wanted=RowFilter(frozenset([A]), frozenset([f"{A}[one]"])))
    assert outcomes(result) == {f"{A}[one]": Outcome.PASS}


def test_nothing_measured_is_no_verdict(tmp_path: Path) -> None:
    result = play(tmp_path, lambda turn, attempt: [])
    assert result.verdicts == ()
    assert report.exit_code(result, strict=False) == 6


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("placements", 4, "-o gpumem_placements"),
        ("total_budget", 60.0, "--gpumem-budget"),
        ("mode", "hot", "mode"),
    ],
)
def test_other_measuring_settings_are_refused(
    tmp_path: Path, name: str, value: Any, said: str
) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        settings = {
            **SETTINGS,
            "total_budget": None,
            **({name: value} if turn.side == HEAD else {}),
        }
        return process(turn, plain(turn, attempt), attempt, settings=settings)

    with pytest.raises(RunError, match=f"{name} is .* in base and .* in head.*{said}"):
        play(tmp_path, answer)


def test_another_device_is_refused(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return process(
            turn,
            plain(turn, attempt),
            attempt,
            device=structs.replace(H100, uuid=f"GPU-{turn.round > 4}"),
        )

    with pytest.raises(RunError, match=r"different devices: .* GPU-False and .* GPU-True"):
        play(tmp_path, answer)


@pytest.mark.parametrize("obeys", [True, False])
def test_what_head_measures_in_another_way_is_measured_as_base_is_or_red(
    tmp_path: Path, obeys: bool
) -> None:
    """The sampler that head asks for may hide a slow-down."""
    players = Players(lambda turn, attempt: [])

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        own: Mapping[str, Any] = {"sampler": "host"} if turn.side == HEAD else {}
        own = players.ways.get(A, own) if obeys else own
        return [
            row(A, NOISE(turn, 1, 0.0 if own.get("sampler") == "host" else 2.0), **own),
            row(B, NOISE(turn, 2)),
        ]

    players.answer = answer
    result = play(tmp_path, answer, players)
    assert players.ways == {A: {"mode": "clean-cold", "sampler": "blocked"}}
    said = {one.key: one for one in result.verdicts}
    assert (said[A].outcome, said[B].outcome) == (Outcome.FAIL, Outcome.PASS)
    assert (
        "both sides are measured as base is"
        if obeys
        else "sampler was blocked in base and is host in head"
    ) in said[A].sentence
    assert report.exit_code(result, strict=False) == 1
    # The first pair is in the journal, and leads to the same when it is read again.
    again = play(tmp_path, answer, Players(lambda turn, attempt: []))
    assert again.verdicts == result.verdicts
    assert again.resumed == len(players.played)


def test_other_work_is_said(tmp_path: Path) -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [
            row(
                A,
                NOISE(turn, 1),
                moved_bytes=MovedBytes(4, 2) if turn.side == HEAD else MovedBytes(2, 1),
            )
        ]

    (said,) = play(tmp_path, answer).verdicts
    assert said.outcome is Outcome.PASS
    assert "its traffic has changed from 3 B to 6 B" in said.sentence


def test_head_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="was changed while it was measured"):
        play(tmp_path, plain, sides=sides(lambda: "another"))


def test_noise_that_hides_a_percent_is_undecided_until_more_pairs_show_it(tmp_path: Path) -> None:
    """Pairs of the journal count: a duet that goes on ends as if it had never stopped."""
    noisy = Noise(0.02)

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, noisy(turn, 1, 0.03)), row(B, NOISE(turn, 2))]

    result = play(tmp_path, answer, rounds_max=12)
    assert (outcomes(result), result.open) == ({A: Outcome.UNDECIDED, B: Outcome.PASS}, True)
    assert len(result.processes) == 24
    assert (report.exit_code(result, strict=False), report.exit_code(result, strict=True)) == (0, 6)
    players = Players(answer)
    extended = play(tmp_path, answer, players, rounds_max=300)
    assert (outcomes(extended), extended.open, extended.resumed) == (
        {A: Outcome.FAIL, B: Outcome.PASS},
        False,
        24,
    )
    assert {(turn.round > 12, tests) for turn, tests in players.played} == {(True, (A,))}
    (tmp_path / "journal").unlink()
    assert play(tmp_path, answer, rounds_max=300).verdicts == extended.verdicts


def test_too_few_rounds_are_refused_before_and_after_the_family_is_known(tmp_path: Path) -> None:
    players = Players(plain)
    with pytest.raises(RunError, match=r"--rounds-max: 6 pairs .* 11 or more"):
        play(tmp_path, plain, players, rounds_max=6)
    assert players.played == []
    many = [f"test_x.py::test_{i}" for i in range(300)]
    with pytest.raises(RunError, match=r"--rounds-max: 12 pairs .* 14 or more"):
        play(tmp_path, lambda turn, attempt: [row(nodeid, 1e-5) for nodeid in many], rounds_max=12)


def test_a_gross_change_is_decided_by_six_pairs_and_nothing_by_eight(tmp_path: Path) -> None:
    result = play(
        tmp_path, lambda turn, attempt: [row(A, NOISE(turn, 1, 0.5)), row(B, NOISE(turn, 2))]
    )
    found = {
        one.key: (one.outcome, one.paired.pairs, one.paired.gross)
        for one in result.verdicts
        if one.paired is not None
    }
    assert found == {A: (Outcome.FAIL, 6, True), B: (Outcome.PASS, 8, False)}
    assert len(result.processes) == 16


MANY = [f"test_x.py::test_{i}" for i in range(20)]


def test_one_slow_test_among_many_fails_alone(tmp_path: Path) -> None:
    players = Players(
        lambda turn, attempt: [
            row(nodeid, NOISE(turn, i, 0.03 * (i == 7))) for i, nodeid in enumerate(MANY)
        ]
    )
    result = play(tmp_path, players.answer, players)
    assert outcomes(result) == {
        nodeid: Outcome.FAIL if nodeid == MANY[7] else Outcome.PASS for nodeid in MANY
    }
    assert players.played[-1][1] == (MANY[7],)


def test_others_on_the_gpu_make_the_next_processes_wait_before_they_import(tmp_path: Path) -> None:
    crowded = (Conditions(other_processes=1), Conditions(other_processes=1))
    players = Players(plain)

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        if players.early:
            return plain(turn, attempt)
        return [row(A, 1e-3, Code.CONDITIONS, conditions=crowded), row(B, 1e-3)]

    players.answer = answer
    result = play(tmp_path, answer, players)
    assert outcomes(result) == {A: Outcome.PASS, B: Outcome.FAIL}
    assert len(result.processes) == 23  # the first is repeated once


def test_the_text_and_the_document_say_it_all(tmp_path: Path) -> None:
    result = play(tmp_path, plain)
    text = report.text(result, sides(), width=120, colour=False, seconds=42)
    assert "FAIL test_x.py::test_b: +" in text
    assert "22 processes in 42 s" in text
    document = report.to_json(result, sides(), {"seed": 0}, utc="now", seconds=42.0, code=1)
    assert [
        (verdict["outcome"], verdict["paired"]["pairs"]) for verdict in document["verdicts"]
    ] == [("FAIL", 11), ("PASS", 8)]
    assert len(document["processes"]) == 22
    assert document["processes"][0]["rows"][A]["medians"]
    assert document["simulated"] is False
    simulated = replace(
        result, processes=tuple(structs.replace(one, device=SIMULATED) for one in result.processes)
    )
    assert "FAIL (simulated) test_x.py::test_b" in report.text(
        simulated, sides(), width=120, colour=False, seconds=42
    )


def test_simulated_passes_are_no_verdict_under_strict(tmp_path: Path) -> None:
    result = play(
        tmp_path,
        lambda turn, attempt: process(turn, [row(A, NOISE(turn, 1))], attempt, device=SIMULATED),
    )
    assert report.exit_code(result, strict=False) == 0
    assert report.exit_code(result, strict=True) == 6
