from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.summary import (
    MOST,
    OF_FILES,
    counts_text,
    profiled_lines,
    remedies,
    summary,
)

MakeRow = Callable[..., Row]
UP = Comparison(delta=0.1234, reach=0.008, processes=5)


def draw(rows: list[Row], facts: DeviceFacts, width: int = 100) -> list[str]:
    return summary(rows, facts, width=width, colour=False, in_session=True).splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.split("  ")[0] for line in lines[2:]]


def test_rows_of_a_test_share_a_line_with_the_span_of_their_figures(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_copy", label=str(us), placements=((us * 1e-6,) * 2,))
        for us in (200, 300, 400)
    ]
    (line,) = [line for line in draw(rows, facts) if line.startswith("test_copy")]
    assert "200.0 to 400.0 us" in line
    assert "2013 to 4027 GB/s" in line
    assert line.endswith("  3 PASS")
    # What one of them has is no figure of all.
    assert "60.1 to 120.1 %" in line
    part = [*rows, make_row("t.py::test_copy", label="of L2", footprint=1 << 20)]
    assert "of peak" not in draw(part, facts)[0]


def test_a_row_of_memory_alone_leaves_the_span_of_the_measurements(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_copy", label=label, code=code)
        for label, code in (("a", None), ("b", Code.SAME_CODE))
    ]
    rows.append(
        replace(
            make_row("t.py::test_copy", measured=False),
            footprint=Footprint(peak=3 << 20, watched=("CuPy",)),
        )
    )
    rows = [replace(row, failed=True) for row in rows]
    (line,) = [line for line in draw(rows, facts) if line.startswith("test_copy")]
    assert "268.3 us" in line
    assert "3 MiB" in line
    assert line.endswith("2 PASS, 1 PASS, same code, test failed")


def test_the_span_of_a_pointer_chase_is_of_its_accesses_not_of_its_launches(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    walks = [(1000, 20e-6), (10, 3e-6)]
    rows = [
        make_row(
            "t.py::test_walk", label=str(steps), accesses_per_launch=steps, placements=((t,) * 2,)
        )
        for steps, t in walks
    ]
    (line,) = [line for line in draw(rows, facts) if line.startswith("test_walk")]
    assert "20.00 to 300.0 ns/access" in line


def test_what_fails_comes_first_then_what_is_not_decided_each_on_its_own_line(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [make_row("t.py::test_a", label=label) for label in "xy"]
    rows.append(
        make_row(
            "t.py::test_a",
            Outcome.UNDECIDED,
            label="doubt",
            code=Code.NOISY,
            comparison=replace(UP, delta=0.002),
        )
    )
    rows.append(
        make_row("t.py::test_a", Outcome.FAIL, label="slow", comparison=UP, code=Code.SLOWER)
    )
    rows.append(
        make_row("t.py::test_b", Outcome.FAIL, label="slowest", comparison=replace(UP, delta=0.3))
    )
    rows = [replace(row, failed=row.verdict.outcome is Outcome.FAIL) for row in rows]
    broken = replace(make_row("t.py::test_c"), failed=True)
    found = names(draw([*rows, broken], facts))
    assert found[:5] == [
        "test_b[slowest]",
        "test_a[slow]",
        "test_c",
        "test_a[doubt]",
        "test_a (2 others)",
    ]


def test_a_large_suite_has_a_line_for_each_kind_and_still_one_for_each_failure(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [make_row(f"t.py::test_{index}") for index in range(MOST)]
    assert len(draw(rows, facts)) == 2 + MOST + 1
    rows += [make_row("t.py::test_hot", mode="hot"), make_row("t.py::test_bad", Outcome.FAIL)]
    assert names(draw(rows, facts))[:3] == ["test_bad", "DRAM", "L2"]


def test_many_failures_do_not_fill_the_screen(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row("t.py::test_a", Outcome.FAIL, label=str(index)) for index in range(100)]
    lines = draw(rows, facts)
    assert len(lines) == 2 + MOST + 1 + 1
    assert any(line.startswith("test_a (80 others)") for line in lines)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(
    width: int, facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row(
            "t.py::test_" + "long_" * 20, Outcome.FAIL, label="one", comparison=UP, simulated=True
        )
    ]
    rows += [
        make_row("t.py::test_b", label=str(i), simulated=True, placements=((i * 1e-4,) * 2,))
        for i in (1, 2000)
    ]
    lines = draw(rows, facts, width)
    assert max(map(len, lines)) <= width
    assert "+12.34" in lines[2]
    assert "FAIL (sim)" in lines[2]
    assert "..." in lines[2]
    assert "100.0 us to 200.0 ms" in lines[3]
    held, taken = Limits(max_peak="1 GiB"), Footprint(2**30, watched=("PyTorch",), ended=True)
    failed = replace(
        make_row("t.py::test_held", comparison=UP, simulated=True),
        limits=held,
        footprint=taken,
        failed=True,
    )
    assert max(map(len, draw([*rows, failed], facts, width))) <= width


@pytest.mark.parametrize(("width", "left"), [(70, ()), (160, ("bandwidth", "of peak", "noise"))])
def test_columns_are_left_out_before_names_are_cut(
    width: int, left: tuple[str, ...], facts: DeviceFacts, make_row: MakeRow
) -> None:
    name = "test_resize_of_a_large_image[bicubic]"
    rows = [
        make_row(f"t.py::{name}", Outcome.FAIL, comparison=UP),
        make_row("t.py::test_other", comparison=UP),
    ]
    lines = draw(rows, facts, width)
    assert name in names(lines)
    assert all(("268.3 us" in line and "+12.34" in line) for line in lines[2:4])
    assert (
        tuple(heading for heading in ("bandwidth", "of peak", "noise") if heading in lines[0])
        == left
    )
    assert max(map(len, lines)) <= width


def test_the_counts_are_of_what_was_measured(facts: DeviceFacts, make_row: MakeRow) -> None:
    held = Limits(max_latency="1 ms")
    rows = [
        make_row("t.py::test_a", Outcome.MEASURED),
        replace(make_row("t.py::test_b"), limits=held),
        make_row("t.py::test_c", Outcome.FAIL),
        replace(make_row("t.py::test_d"), failed=True, test_error=True, limits=held),
        make_row("t.py::test_e", Outcome.FAIL, measured=False),
    ]
    assert counts_text(rows) == (
        "4 rows: 1 FAIL, 2 PASS, 1 measured; 1 test failed by an assertion or an error; 1 test failed without a measurement"
    )
    assert (
        counts_text([make_row(outcome=Outcome.MEASURED, simulated=True)])
        == "1 row (simulated): 1 measured"
    )
    assert counts_text(rows[-1:]) == "0 rows; 1 test failed without a measurement"


@pytest.mark.parametrize("in_session", [True, False])
def test_tests_that_measured_nothing_are_named_where_pytest_has_not(
    in_session: bool, facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_a[1]"),
        make_row("t.py::test_a[2]"),
        make_row("t.py::test_e", Outcome.FAIL, measured=False),
    ]
    drawn = summary(rows, facts, width=200, colour=False, in_session=in_session)
    assert ("test_e" not in drawn) == ("-v lists every row" in drawn) == in_session
    assert "1 test failed without a measurement" in drawn


def test_undecided_rows_are_grouped_by_what_decides_them(make_row: MakeRow) -> None:
    few = [
        make_row(
            f"t.py::test_{i}",
            Outcome.UNDECIDED,
            code=Code.TOO_FEW_RUNS,
            comparison=replace(UP, processes=1),
        )
        for i in range(9)
    ]
    noisy = make_row("t.py::test_n", Outcome.UNDECIDED, code=Code.NOISY, comparison=UP)
    hot = [
        make_row(
            f"t.py::test_h{i}",
            Outcome.UNDECIDED,
            code=Code.CONDITIONS,
            reason="throttled before the samples",
        )
        for i in range(2)
    ]
    new = make_row("t.py::test_x", Outcome.NEW, code=Code.NO_BASELINE)
    assert remedies(
        [new, *few, noisy, *hot, make_row(), make_row("t.py::test_f", Outcome.FAIL)]
    ) == [
        "UNDECIDED: 9 rows need 2 more runs: pytest --gpumem --gpumem-save, or at once: gpumem duet BASE",
        "UNDECIDED: 1 row is too close to its limit: to decide: gpumem duet BASE",
        "UNDECIDED: 2 rows: throttled before the samples",
        "NEW: 1 row has nothing to compare with: pytest --gpumem --gpumem-save stores this state as the baseline",
    ]
    absolute = make_row(
        "t.py::test_m", Outcome.UNDECIDED, code=Code.NOISY, reason="too close to max_latency"
    )
    assert remedies([absolute]) == [
        "UNDECIDED t.py::test_m: too close to max_latency"
    ]  # no duet decides it
    assert remedies([noisy, noisy], OF_FILES) == [
        "UNDECIDED: 2 rows are too close to their limit: more runs a side, or gpumem duet, decide"
    ]


def test_every_code_that_leaves_a_row_open_has_a_plural(make_row: MakeRow) -> None:
    for code in Code:
        rows = [make_row(f"t.py::test_{i}", Outcome.UNDECIDED, code=code) for i in range(2)]
        (sentence,) = remedies(rows)
        assert sentence.startswith(("UNDECIDED: 2 rows ", "UNDECIDED: 2 rows: "))
        assert not any(
            f" {verb} " in sentence.partition(": ")[2][:16]
            for verb in ("is", "has", "was", "needs", "looks")
        )


def test_a_profiled_session_has_tests_and_no_figures(make_row: MakeRow) -> None:
    lines = profiled_lines(
        [
            make_row("t.py::test_a"),
            make_row("t.py::test_a", label="b"),
            make_row("t.py::test_b", measured=False),
        ]
    )
    assert lines[0].startswith("profiled: 1 test; ")
    assert lines[1] == "  t.py::test_a"
    assert not any("us" in line.split() for line in lines)
