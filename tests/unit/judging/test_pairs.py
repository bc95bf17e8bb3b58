"""What the pairs of a row decide, one after the other."""

from __future__ import annotations

from dataclasses import replace as replace_row
from typing import Any

import pytest
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.judging.duet import DuetRow
from pytest_gpumem.limits import PEAK, TIME
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes, Window
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.what_ran import Migrations, PageCounts
from pytest_gpumem.runs.duet import RowFilter, order_of
from pytest_gpumem.runs.processes import BASE, HEAD

UNJUDGED = Verdict(Outcome.MEASURED, "no limit")


def measured(latency: float = 1e-3, **changes: Any) -> Row:
    taken = measurement(**{"placements": ((latency,),), "moved_bytes": MovedBytes(2, 1), **changes})
    return Row("t.py::a", Limits(), UNJUDGED, taken)


def of_memory(nbytes: int) -> Row:
    return Row("t.py::a", Limits(), UNJUDGED, footprint=Footprint(peak=nbytes))


def duet_row(**limits: Any) -> DuetRow:
    return DuetRow("t.py::a", limits=Limits(**limits))


def test_each_pair_has_a_coin_and_the_next_is_the_other_way_round() -> None:
    """Else noise with a period of four processes fails unchanged code."""
    orders = [order_of(number) for number in range(1, 401)]
    assert set(orders) == {(BASE, HEAD), (HEAD, BASE)}
    odd, even = orders[::2], orders[1::2]
    assert all(first == second[::-1] for first, second in zip(odd, even, strict=True))
    assert 70 <= odd.count((BASE, HEAD)) <= 130


def test_a_duet_compares_measurements_or_the_rows_with_a_limit() -> None:
    everything, of_limits = RowFilter(), RowFilter(limits={"t.py::a": Limits()})
    assert (everything.selects(measured()), everything.selects(of_memory(1))) == (True, False)
    assert of_limits.selects(of_memory(1))
    assert not of_limits.selects(replace(measured(), label="other"))
    assert of_limits.missing({"t.py::b": measured()}) == ["t.py::a"]
    of_tests = RowFilter(frozenset(["t.py", "t.py::b"]))
    assert of_tests.missing({"t.py::a": measured()}) == ["t.py::b"]


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [("1%", Outcome.FAIL), ("3%", Outcome.PASS), ("1% + 15 us", Outcome.PASS)],
)
def test_the_time_is_decided_at_a_look(limit: str, outcome: Outcome) -> None:
    row = duet_row(max_regression=limit)
    for number in range(5):
        assert row.open
        assert (row.outcome, row.results[0].code) == (Outcome.UNDECIDED, Code.NOISY)
        noise = 1e-9 * number
        row.add(measured(1e-3 + noise), measured(1.02e-3 - noise))
    assert (row.open, row.outcome) == (False, outcome)
    assert row.pairs is not None
    assert row.pairs.change == pytest.approx(0.02, rel=1e-3)
    assert row.latencies == pytest.approx((1e-3, 1.02e-3), rel=1e-3)


def test_launch_overhead_is_levelled() -> None:
    """Processes differ by what a launch costs; what the kernel takes does not."""
    row = duet_row(max_regression="1%")
    for _ in range(5):
        row.add(measured(28e-6, overhead=3e-6), measured(29e-6, overhead=4e-6))
    assert row.outcome is Outcome.PASS
    assert row.pairs is not None
    assert abs(row.pairs.change) < 1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "hot"}, "mode was clean-cold in base and is hot in head"),
        ({"sampler": "host"}, "sampler was blocked in base and is host in head"),
        ({"window": Window(1 << 20, 1, 1 << 20)}, "head has another access-policy window"),
        ({"moved_bytes": MovedBytes(1, 1)}, "head declares fewer bytes"),
        ({"moved_bytes": None}, "head declares no bytes"),
        ({"moved_bytes": MovedBytes(3, 1)}, None),
    ],
)
def test_what_head_measures_in_another_way_is_red(
    change: dict[str, Any], words: str | None
) -> None:
    """It may hide a slow-down. A launch that moves more bytes does more work."""
    row = duet_row(max_regression="1%")
    row.add(measured(), measured(**change))
    assert row.open is (words is None)
    if words is not None:
        assert (row.outcome, row.results[0].code) == (Outcome.FAIL, Code.MEASURED_DIFFERENTLY)
        assert words in row.sentence
        accepting = replace_row(duet_row(max_regression="1%"), may_differ=True)
        accepting.add(measured(), measured(**change))
        assert accepting.outcome is Outcome.ACCEPTED


def test_three_pairs_decide_a_peak_and_one_counts() -> None:
    row = duet_row(max_peak_regression="0 B", max_copies="base")
    for number, peak in enumerate((64, 96, 96)):
        decided = {result.limit: result.code for result in row.results}
        assert decided[PEAK] is Code.NOISY
        assert decided["max_copies"] is (Code.NOT_READ if number else Code.NOISY)
        row.add(of_memory(64), of_memory(peak))
    assert (row.open, row.outcome, row.head_peak) == (False, Outcome.FAIL, 96)
    assert [result.limit for result in row.results] == [PEAK, "max_copies"]


def test_what_a_stopped_duet_left_open() -> None:
    row = duet_row(max_regression="1%", max_peak_regression="0 B")
    row.add(measured(), measured())
    assert {result.limit: result.outcome for result in row.results} == dict.fromkeys(
        (TIME, PEAK), Outcome.UNDECIDED
    )
    assert "+0 % over 1 pair of processes: open at max_regression 1%" in row.sentence
    assert "the duet ended before" in row.sentence


def test_page_faults_fail_only_if_five_pairs_have_more_than_base() -> None:
    """They differ between processes of the same code."""

    def faults(count: int) -> Row:
        return measured(migrations=Migrations(PageCounts(), PageCounts(gpu_faults=count)))

    for heads, outcomes in [((6, 7, 5), {Outcome.PASS}), ((6, 7, 6, 7, 6), {Outcome.FAIL})]:
        row = duet_row(max_gpu_page_faults="base")
        for head in heads:
            assert row.open
            row.add(faults(5), faults(head))
        assert not row.open
        assert {result.outcome for result in row.results} == outcomes
