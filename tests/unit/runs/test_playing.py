"""The duet's course with processes that are made up: who is measured how long, what is repeated, what gets no verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from known_devices import H100
from msgspec import structs
from processes import SETTINGS, Answer, Players, Turn, process, row, sides

from pytest_gpumem.commands.duet import duet_text, exit_code, to_json
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs.duet import ATTEMPTS, Duet, order_of
from pytest_gpumem.runs.pairs import RowFilter
from pytest_gpumem.runs.processes import BASE, HEAD

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


def play(
    answer: Answer, players: Players | None = None, wanted: RowFilter | None = None, **changes: Any
) -> Duet:
    players = players or Players(answer)
    said: list[str] = changes.pop("said", [])
    of_sides = changes.pop("sides", sides())
    given: dict[str, Any] = {"max_regression": None, "say": said.append, **changes}
    duet = Duet(of_sides, players, wanted or RowFilter(), **given)
    duet.play()
    return duet


def outcomes(result: Duet) -> dict[str, Outcome | None]:
    return {one.key: one.outcome for one in result.rows}


def test_each_pair_has_a_coin_and_the_next_is_the_other_way_round() -> None:
    """Else noise with a period of four processes fails unchanged code."""
    orders = [order_of(number) for number in range(1, 401)]
    assert set(orders) == {(BASE, HEAD), (HEAD, BASE)}
    odd, even = orders[::2], orders[1::2]
    assert all(first == second[::-1] for first, second in zip(odd, even, strict=True))
    assert 70 <= odd.count((BASE, HEAD)) <= 130


def test_each_test_is_measured_until_it_is_decided() -> None:
    players, said = Players(plain), list[str]()
    result = play(plain, players, said=said)
    assert outcomes(result) == {B: Outcome.FAIL, A: Outcome.PASS}
    assert players.played[0][1] is None
    found = {one.key: len(one.pairs.log_ratios) for one in result.rows if one.pairs is not None}
    assert found == {A: 5, B: 5}
    assert len(players.played) == 10
    assert exit_code(result, strict=False) == 1
    (slow,) = (one for one in result.rows if one.key == B)
    assert slow.pairs is not None
    assert slow.pairs.change == pytest.approx(0.02, abs=0.002)
    assert slow.latencies[1] == pytest.approx(25.5e-6, rel=0.01)
    assert said == ["after 1 pair: 2 rows undecided, at most 62 s left"]


@pytest.mark.parametrize(("slower", "outcome"), [(0.0, Outcome.PASS), (0.02, Outcome.FAIL)])
def test_a_noisy_row_takes_more_pairs_alone(slower: float, outcome: Outcome) -> None:
    noisy = Noise(0.008)

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, noisy(turn, 1, slower)), row(B, NOISE(turn, 2))]

    players = Players(answer)
    result = play(answer, players)
    assert outcomes(result) == {A: outcome, B: Outcome.PASS}
    assert {tests for turn, tests in players.played if turn.round > 5} == {(A,)}


def test_what_32_pairs_leave_open_says_at_which_limit_it_would_pass() -> None:
    noisy = Noise(0.05)
    result = play(lambda turn, attempt: [row(A, noisy(turn, 1, 0.01))])
    (verdict,) = result.rows
    assert verdict.outcome is Outcome.UNDECIDED
    assert len(result.processes) == 64
    assert re.search(r"open at max_regression 1%; at \S+ % it would pass", verdict.sentence)
    assert (exit_code(result, strict=False), exit_code(result, strict=True)) == (0, 6)


def test_the_commands_limit_is_of_tests_without_their_own() -> None:
    def loose(turn: Turn, attempt: int) -> Sequence[Row]:
        limits = Limits(max_regression="5%") if turn.side == HEAD else Limits(max_regression="0.1%")
        return [row(B, NOISE(turn, 2, 0.02), limits=limits)]

    assert outcomes(play(loose)) == {B: Outcome.PASS}
    assert outcomes(play(loose, max_regression="1%")) == {B: Outcome.FAIL}

    def of_the_test(turn: Turn, attempt: int) -> Sequence[Row]:
        return [
            structs.replace(
                one, limits=structs.replace(one.limits, origin={"max_regression": "marker"})
            )
            for one in loose(turn, attempt)
        ]

    assert outcomes(play(of_the_test, max_regression="1%")) == {B: Outcome.PASS}
    absolute = play(loose, max_regression="1% + 5 us")
    assert absolute.rows[0].pairs is not None
    assert math.expm1(absolute.rows[0].pairs.limit) == pytest.approx(0.01 + 5 / 25, rel=0.02)


def test_launch_overhead_is_levelled() -> None:
    """Processes differ by what a launch costs; what the kernel takes does not."""

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        overhead = 3e-6 + (1e-6 if turn.side == HEAD else 0.0)
        return [row(A, 25e-6 + overhead, overhead=overhead)]

    result = play(answer)
    assert outcomes(result) == {A: Outcome.PASS}
    assert result.rows[0].pairs is not None
    assert abs(result.rows[0].pairs.change) < 1e-9


def test_a_throttled_pair_is_taken_again_and_then_undecided() -> None:
    def once(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn == Turn(3, HEAD) and attempt == 1
        code = Code.CONDITIONS if bad else Code.NO_BASELINE
        return [row(A, 1.0 if bad else NOISE(turn, 1), code), row(B, NOISE(turn, 2))]

    said: list[str] = []
    players = Players(once)
    result = play(once, players, said=said)
    assert outcomes(result) == {A: Outcome.PASS, B: Outcome.PASS}
    assert len(result.processes) == 12
    assert [tests for turn, tests in players.played if turn.round == 3] == [(A, B)] * 2 + [(A,)] * 2
    assert said[1:] == [f"pair 3 is taken again: {A}: head: because"]

    def always(turn: Turn, attempt: int) -> Sequence[Row]:
        bad = turn.round == 3 and turn.side == HEAD
        code = Code.CONDITIONS if bad else Code.NO_BASELINE
        return [row(A, NOISE(turn, 1), code), row(B, NOISE(turn, 2))]

    result = play(always)
    assert outcomes(result) == {A: Outcome.UNDECIDED, B: Outcome.PASS}
    assert sum((one.pair, one.side) == (3, HEAD) for one in result.processes) == ATTEMPTS
    assert "head, also when it was taken again: because" in result.rows[0].sentence
    assert exit_code(result, strict=False) == 0
    assert exit_code(result, strict=True) == 6


def test_what_is_on_one_side_only_is_no_verdict_and_what_fails_in_head_alone_is_red() -> None:
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

    result = play(answer)
    said = {one.key: (one.outcome, one.sentence) for one in result.rows if one.key != A}
    assert said == {
        "test_x.py::test_new": (None, "base: its collection failed: SyntaxError"),
        B: (Outcome.FAIL, "head: failed, assert 0"),
        "test_x.py::test_c": (Outcome.FAIL, "head: failed, ValueError"),
    }
    assert outcomes(result)[A] is Outcome.PASS
    assert exit_code(result, strict=False) == 1


def test_a_test_that_fails_in_base_or_on_both_sides_is_reported_and_not_red() -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        failing = (B, "test_x.py::test_c") if turn.side == BASE else ("test_x.py::test_c",)
        rows = [
            row(A, NOISE(turn, 1)),
            *(row(key, 1e-3, failed=key in failing) for key in (B, "test_x.py::test_c")),
        ]
        return process(turn, rows, attempt, outcomes=dict.fromkeys(failing, ("failed", "assert 0")))

    result = play(answer)
    assert outcomes(result) == {A: Outcome.PASS, B: None, "test_x.py::test_c": None}
    assert exit_code(result, strict=False) == 0


@pytest.mark.parametrize(("nodeid", "label"), [(f"{B}[x[1]]", "warm")])
def test_a_test_that_begins_to_fail_in_head_is_red_whatever_its_pairs_say(
    nodeid: str, label: str
) -> None:
    failing = row(nodeid, NOISE(Turn(1, HEAD), 2), label=label)

    def answer(turn: Turn, attempt: int) -> Any:
        if turn.side == HEAD and turn.round >= 4:
            return process(
                turn, [row(A, NOISE(turn, 1))], attempt, outcomes={nodeid: ("failed", "wrong")}
            )
        return [row(A, NOISE(turn, 1)), row(nodeid, NOISE(turn, 2), label=label)]

    result = play(answer)
    assert outcomes(result) == {A: Outcome.PASS, failing.key: Outcome.FAIL}
    assert [one.sentence for one in result.rows if one.key == failing.key] == [
        "head: failed, wrong"
    ]


def test_what_base_does_not_have_is_new() -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        labels = ("one", "other") if turn.side == BASE else ("one", "new")
        rows = [row(A, NOISE(turn, 1), label=label) for label in labels]
        skipped = {} if turn.side == HEAD else {"test_x.py::test_s": ("skipped", "no torch")}
        new = [row(B, 1e-3), row("test_x.py::test_s", 1e-3)] if turn.side == HEAD else []
        return process(turn, [*rows, *new], attempt, outcomes=skipped)

    result = play(answer)
    assert outcomes(result) == {
        f"{A}[one]": Outcome.PASS,
        f"{A}[other]": None,
        f"{A}[new]": Outcome.NEW,
        B: Outcome.NEW,
        "test_x.py::test_s": None,
    }


def test_a_row_that_breaks_its_own_limits_was_measured_all_the_same() -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, NOISE(turn, 1), None, failed=True)]

    assert outcomes(play(answer)) == {A: Outcome.PASS}


def test_a_side_that_crashes_is_never_fine() -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return (
            process(turn, [], attempt, error="ended by SIGSEGV: Segmentation fault")
            if turn.side == HEAD
            else plain(turn, attempt)
        )

    result = play(answer)
    assert outcomes(result) == {A: Outcome.FAIL, B: Outcome.FAIL}
    assert "head: crashed: ended by SIGSEGV: Segmentation fault" in result.rows[0].sentence
    assert exit_code(result, strict=False) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("placements", 4, "-o gpumem_placements"),
    ],
)
def test_other_measuring_settings_are_refused(name: str, value: Any, said: str) -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        settings = {
            **SETTINGS,
            "total_budget": None,
            **({name: value} if turn.side == HEAD else {}),
        }
        return process(turn, plain(turn, attempt), attempt, settings=settings)

    with pytest.raises(UserError, match=f"{name} is .* in base and .* in head.*{said}"):
        play(answer)


def test_another_device_is_refused() -> None:
    def answer(turn: Turn, attempt: int) -> Any:
        return process(
            turn,
            plain(turn, attempt),
            attempt,
            device=structs.replace(H100, uuid=f"GPU-{turn.round > 2}"),
        )

    with pytest.raises(UserError, match=r"different devices: .* GPU-False and .* GPU-True"):
        play(answer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampler": "host"}, "sampler was blocked in base and is host in head"),
        ({"moved_bytes": MovedBytes(1, 1)}, "head declares 2 bytes, and base 3"),
    ],
)
def test_what_head_measures_in_another_way_is_red(change: dict[str, Any], words: str) -> None:
    """It may hide a slow-down."""

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [row(A, 1e-5, **(change if turn.side == HEAD else {}))]

    result = play(answer)
    (verdict,) = result.rows
    assert verdict.outcome is Outcome.FAIL
    assert [one.code for one in verdict.results] == [Code.MEASURED_DIFFERENTLY]
    assert words in verdict.sentence
    assert len(result.processes) == 2


def peak(nodeid: str, nbytes: int) -> Row:
    """A row of memory alone."""
    return structs.replace(row(nodeid, None), footprint=Footprint(peak=nbytes))


@pytest.mark.parametrize(
    ("head", "outcome"), [((64, 64, 96), Outcome.PASS), ((64, 96, 96), Outcome.FAIL)]
)
def test_a_peak_is_decided_by_three_pairs(head: tuple[int, ...], outcome: Outcome) -> None:
    """By the middle process of head against the greatest of base."""

    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        return [peak(A, 64 if turn.side == BASE else head[turn.round - 1])]

    limits = {A: Limits(max_peak_regression="0 B")}
    result = play(answer, wanted=RowFilter(frozenset([A]), limits))
    assert outcomes(result) == {A: outcome}
    assert len(result.processes) == 6


def test_a_duet_that_is_stopped_has_what_is_decided() -> None:
    def answer(turn: Turn, attempt: int) -> Sequence[Row]:
        if turn.round == 7:
            raise KeyboardInterrupt
        return [row(A, Noise(0.05)(turn, 1)), row(B, NOISE(turn, 2))]

    duet = Duet(sides(), Players(answer), RowFilter(), max_regression=None, say=lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        duet.play()
    assert outcomes(duet) == {A: Outcome.UNDECIDED, B: Outcome.PASS}


def test_head_that_changes_meanwhile_is_refused() -> None:
    with pytest.raises(UserError, match="was changed while it was measured"):
        play(plain, sides=sides("another"))


def test_the_text_and_the_document_say_it_all() -> None:
    result = play(plain)
    text = duet_text(result, width=120, colour=False, seconds=42)
    assert "FAIL test_x.py::test_b: +" in text
    assert "10 processes in 42 s" in text
    document = to_json(result, {"seed": 0}, utc="now", seconds=42.0, code=1)
    assert [
        (verdict["outcome"], verdict["paired"]["pairs"]) for verdict in document["verdicts"]
    ] == [("FAIL", 5), ("PASS", 5)]
    assert len(document["processes"]) == 10
    assert document["processes"][0]["rows"][A]
    assert document["simulated"] is False
    result.device = SIMULATED
    assert "FAIL (simulated) test_x.py::test_b" in duet_text(
        result, width=120, colour=False, seconds=42
    )
