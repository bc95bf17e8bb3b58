"""What a terminal shows of plain rows: tables, conclusions, headers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import (
    LOST,
    Comparison,
    Difference,
    LimitResult,
    Omission,
    PairedChange,
    Row,
    Verdict,
)
from pytest_gpumem.reporting.conclusion import (
    Conclusion,
    Run,
    advice,
    conclusion_lines,
    counts_text,
    failing_text,
    missing_lines,
    renamed,
    run_lines,
    session_of,
)
from pytest_gpumem.reporting.details import conditions_text, details
from pytest_gpumem.reporting.row import asked_bandwidth, worst_first
from pytest_gpumem.reporting.table import table
from pytest_gpumem.reporting.terminal import header

MakeRow = Callable[..., Row]
SLOWER = Comparison(0.97, 0.01, processes=3, base=136.2e-6)
MEMORY = Footprint(
    96 << 20, uses=(MemoryUse("CuPy", "device", peak=96 << 20, kept=1 << 20),), watched=("CuPy",)
)
LONG = "t.py::test_a_name_that_is_longer_than_any_column[device-" + "x" * 60 + "]"


def failing(make_row: MakeRow, nodeid: str = "t.py::test_blur") -> Row:
    """A row that is slower, misses a bandwidth, and takes too much memory."""
    results = (
        LimitResult("max_peak", Outcome.FAIL, Code.TOO_MUCH_MEMORY, "a peak of 96 MiB"),
        LimitResult("max_regression", Outcome.FAIL, Code.SLOWER, "+97 % against 3 saved runs"),
        LimitResult("min_bandwidth", Outcome.FAIL, None, "3002 GB/s is below 3.5 TB/s"),
        LimitResult("faster_than", Outcome.FAIL, None, "268.3 us against 134.1 us of other"),
    )
    return replace(
        make_row(nodeid),
        limits=Limits(max_regression="2%", max_peak="64 MiB", min_bandwidth="3.5 TB/s"),
        verdict=Verdict(Outcome.FAIL, "all of it", SLOWER, code=Code.SLOWER, limits=results),
        footprint=MEMORY,
        failed=True,
        differences=(Difference("sectors per request", 4, 8),),
    )


def test_every_broken_limit_has_its_figure_its_limit_and_the_difference(make_row: MakeRow) -> None:
    repeat, accept = ["pytest t.py::test_blur"], ["gpumem accept t.py::test_blur"]
    steps = advice(repeat, ["max_latency"], accept)
    rows = [make_row(), failing(make_row)]
    ending = Conclusion(Exit.FAILED, ["1 of 2 rows fails"], rows, advice=steps)
    assert conclusion_lines(ending, 120) == [
        "red: 1 of 2 rows fails",
        "FAIL t.py::test_blur",
        "  a peak of 96 MiB",
        "  latency 268.3 us, was 136.2 us",
        "  +97 % against 3 saved runs",
        "  3002 GB/s is below 3.5 TB/s",
        "  268.3 us against 134.1 us of other",
        "  why: sectors per request 4 → 8",
        "to repeat: pytest t.py::test_blur",
        "to repair: meet or change max_latency, which cannot be accepted",
        "to accept, commit what this writes: gpumem accept t.py::test_blur",
    ]


def test_after_a_duet_the_times_are_those_that_it_measured(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    def judged(paired: PairedChange) -> Row:
        row = failing(make_row)
        return replace(row, verdict=replace(row.verdict, paired=paired))

    row = judged(PairedChange(0.5, 0.49, 0.51, 5, 200e-6, 300e-6))
    times = "latency 300.0 us, was 200.0 us"
    assert f"  {times}" in conclusion_lines(Conclusion(Exit.FAILED, [], [row]), 120)
    assert dict(details(row, facts))["change"] == f"+50.0 %, {times}"
    line = table([row], facts, width=120, colour=False).splitlines()[2]
    assert line.startswith("test_blur  300.0 us  2684 GB/s     80.1 %  200.0 us  +50.0 %")
    # An older file does not say what the change is relative to.
    older = judged(PairedChange(0.5, 0.49, 0.51, 5))
    assert ", was " not in str(conclusion_lines(Conclusion(Exit.FAILED, [], [older]), 120))
    assert dict(details(older, facts))["change"] == "+50.0 %"


def test_a_session_is_repeated_with_values_of_options_that_are_also_paths() -> None:
    words = ["--rootdir", "gpu", "gpu", "-m", "gpu", "-x", "t.py", "-k", "gpu"]
    repeat = session_of(["gpu/t.py::a[1 2]"], words, ["gpu", "t.py"])
    assert repeat == "pytest --rootdir gpu -m gpu -x -k gpu 'gpu/t.py::a[1 2]'"


def test_a_lost_test_beside_a_single_new_one_is_perhaps_renamed_whatever_its_parameters(
    make_row: MakeRow,
) -> None:
    lost = [Omission(f"t.py::test_old[{size}]", "", LOST, "gone") for size in (1, 2)]
    new = [make_row(f"t.py::test_new[{size}]", Outcome.NEW) for size in (1, 2)]
    ending = Conclusion(Exit.FAILED, [], new, lost)
    assert renamed(ending) == {"t.py::test_old": "t.py::test_new"}
    others = [*new, make_row("t.py::test_newer", Outcome.NEW)]
    assert renamed(dataclasses.replace(ending, rows=others)) == {}
    # A test that failed by itself has no verdict against the test that it was.
    broken = [replace(row, failed=True, test_error=True) for row in new]
    assert renamed(dataclasses.replace(ending, rows=broken)) == {}
    # A test with a further parameter is not new.
    known = make_row("t.py::test_new[0]")
    for rows in ([known, *new], [*new, known]):
        assert renamed(dataclasses.replace(ending, rows=rows)) == {}
    # A parameter that is gone renames nothing.
    kept = [*new, make_row("t.py::test_old[3]")]
    assert renamed(dataclasses.replace(ending, rows=kept)) == {}


def test_a_test_that_failed_by_an_error_is_named_once_with_it(make_row: MakeRow) -> None:
    rows = []
    for label in ("a", "b"):
        row = make_row("t.py::test_x", label=label)
        rows.append(replace(row, failed=True, test_error=True))
    errors = {"t.py::test_x": "assert 1 == 2", "t.py::test_nothing": "ValueError: no"}
    lines = conclusion_lines(Conclusion(Exit.FAILED, ["2 tests failed"], rows, errors=errors), 80)
    assert lines == [
        "red: 2 tests failed",
        "FAIL t.py::test_x[a]",
        "  assert 1 == 2",
        "FAIL t.py::test_nothing: ValueError: no",
    ]


def test_a_table_has_its_columns_and_cuts_no_name(facts: DeviceFacts, make_row: MakeRow) -> None:
    for width in [80, 120]:
        rows = [
            failing(make_row),
            replace(make_row("t.py::test_adopted"), extra={"host s": 3e-4}),
            replace(make_row("t.py::test_memory", measured=False), footprint=MEMORY),
            make_row(LONG, simulated=True),
        ]
        text = table(rows, facts, width=width, colour=False)
        heading, _, *lines = text.splitlines()
        names = ["test", "latency", "host", "bandwidth", "% of peak", "base", "change"]
        assert re.split(r"  +", heading) == [*names, "peak memory", "kept", "verdict"], width
        figures = "268.3 us 3002 GB/s 89.5 %"
        changed = f"test_blur {figures} 136.2 us +97.0 % 96 MiB 1 MiB FAIL"
        assert lines[0].split() == changed.split(), width
        assert "300.0 us" in lines[1], width
        assert lines[2].split() == ["test_memory", "96", "MiB", "1", "MiB", "PASS"], width
        at = lines.index(LONG.partition("::")[2])
        assert lines[at + 1].split() == [*figures.split(), "PASS", "(sim)"], width
        assert counts_text(rows) == "4 rows (simulated): 1 FAIL, 3 PASS", width
        coloured = table(rows, facts, width=width, colour=True)
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text, width
        assert re.search(r"\x1b\[[\d;]*31m[^\x1b]*FAIL", coloured), width


def test_what_leaves_rows_open_is_said_once_with_what_decides(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    open_rows = []
    for number in range(3):
        row = make_row(f"t.py::test_{number}", Outcome.UNDECIDED, code=Code.NOISY, reason="duet")
        open_rows.append(replace(row, limits=Limits(max_regression="1%")))
    other = make_row("t.py::test_w", Outcome.UNDECIDED, code=Code.NOISY, reason="by another limit")
    other = replace(
        other, verdict=replace(other.verdict, limits=(LimitResult("max_waits", Outcome.UNDECIDED),))
    )
    rows = [*open_rows, other, make_row("t.py::test_new", Outcome.NEW, reason="no row")]
    rows.append(make_row("t.py::test_old", Outcome.NEW, reason="driver 580 -> 590"))
    text = table(rows, facts, width=200, colour=False)
    assert (
        "UNDECIDED 3 rows, such as t.py::test_0: duet\n"
        "UNDECIDED t.py::test_w: by another limit\n"
        "NEW t.py::test_new: no row\n"
        "NEW t.py::test_old: driver 580 -> 590; "
        "pytest --gpumem --gpumem-save --gpumem-processes 3 stores this state"
    ) in text
    saved = table(rows, facts, width=200, colour=False, saved=True)
    assert saved.endswith("NEW t.py::test_old: driver 580 -> 590")


def test_notes_and_why_rows_have_no_share_of_the_peak_are_said_once(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [make_row(f"t.py::{name}", mode="hot", notes=("it waits",)) for name in "ab"]
    *_, note, why = table(rows, facts, width=200, colour=False).splitlines()
    assert note == "note: t.py::a and 1 more: it waits"
    assert why.startswith("no % of peak: t.py::a and 1 more: ")


def test_remarks_follow_what_a_run_decides(facts: DeviceFacts, make_row: MakeRow) -> None:
    run = Run([failing(make_row), make_row("t.py::b")], facts, {}, remarks=["a duet decides 1 row"])
    assert run_lines(run, 100)[-1] == "a duet decides 1 row"
    steps = ["to repeat: pytest"]
    ending = Conclusion(Exit.FAILED, [failing_text(run.rows[:1], run.rows)], run.rows, advice=steps)
    lines = run_lines(dataclasses.replace(run, conclusion=ending), 100)
    assert lines[0] == "red: 1 of 2 rows fails"
    assert lines[-2:] == ["a duet decides 1 row", "to repeat: pytest"]


def test_the_worst_is_first(make_row: MakeRow) -> None:
    slow = replace(failing(make_row), nodeid="t.py::test_slow")
    slow = replace(slow, verdict=replace(slow.verdict, comparison=Comparison(0.98)))
    rows = [make_row(), make_row("t.py::u", Outcome.UNDECIDED), failing(make_row), slow]
    assert worst_first(rows) == [slow, failing(make_row), rows[1], rows[0]]


def test_the_header_names_the_device_and_what_is_not_the_default(facts: DeviceFacts) -> None:
    first, second = header(facts, {"mode": "hot", "placements": 3}, "none in x")
    assert first.startswith("gpumem: NVIDIA H100 80GB HBM3, driver 580.95.05, CUDA 13.0, peak ")
    assert second == "  mode hot, placements 3; baseline: none in x"
    floats = {"mode": "hot", "precision": 0.005, "budget": 0.05, "total_budget": 600.0}
    assert header(facts, floats)[1] == (
        "  mode hot, precision 0.500 %, budget 50.00 ms, total_budget 600.0 s"
    )
    assert ", MIG 1g.10gb" in header(replace(facts, mig_profile="1g.10gb"), {})[0]
    assert "peak unknown" in header(replace(facts, dram_peak=0.0), {})[0]
    throttled = Conditions(throttle_reasons=("sw_power_cap",), other_processes=2)
    assert "THROTTLED: sw_power_cap, 2 OTHER PROCESSES" in conditions_text(throttled)
    simulated = header(replace(facts, simulated=True), {}, fallback_reason="no driver")[0]
    assert simulated.endswith("no GPU is measured, times come from a model (no driver)")
    assert conditions_text(Conditions()) == ""


def test_what_was_not_judged_is_listed_or_counted() -> None:
    crash = "t.py::test_a lost the context"
    missing = [
        Omission("t.py::test_b", "", LOST, crash, how="did not run"),
        Omission("t.py::test_c", "", LOST, "not reached", how="not reached"),
        Omission("t.py::test_d", "", LOST, "it measured nothing"),
        Omission("t.py::test_e", "", "undecided", "nothing measured", what="max_latency"),
        Omission("t.py::test_f", "", "not run", "deselected"),
    ]
    assert missing_lines(missing) == [
        "lost: 1 test did not run because t.py::test_a lost the context; "
        "--gpumem-isolate runs them all the same",
        "lost: 1 test not reached, because the session ended before; "
        "--gpumem-isolate runs them all the same",
        "lost: t.py::test_d: it measured nothing",
        "not judged: t.py::test_e, max_latency: nothing measured",
        "not run: t.py::test_f: deselected",
    ]


def test_read_and_written_bytes_are_named_where_they_add_up(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    for traffic, text in [
        (MovedBytes(2 << 20, 1 << 20), " for 3 MiB (2 MiB read, 1 MiB written);"),
        (MovedBytes(1 << 20, 1 << 20, link=True), " for 1 MiB;"),
    ]:
        row = replace(make_row(), measurement=measurement(moved_bytes=traffic))
        assert text in dict(details(row, facts))["bandwidth"]


def test_what_threads_ask_for_is_a_rate_where_it_repeats_the_compulsory_bytes() -> None:
    for requested, traffic, rate in [
        (None, MovedBytes(100, 0), None),
        (900, None, None),
        (299, MovedBytes(60, 40), None),
        (300, MovedBytes(60, 40), 3e5),
        (900, MovedBytes(0, 0, declared=300), 9e5),
    ]:
        found = measurement(requested=requested, moved_bytes=traffic)
        assert asked_bandwidth(found) == (None if rate is None else pytest.approx(rate)), (
            requested,
            traffic,
            rate,
        )
        assert found.bandwidth == (
            None if traffic is None else pytest.approx(traffic.total / 1e-3)
        ), (requested, traffic, rate)
