from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.table import table
from pytest_gpumem.units import MiB

MakeRow = Callable[..., Row]
COMPARISON = Comparison(delta=0.1234, reach=0.008, processes=5)


def draw(rows: list[Row], facts: DeviceFacts, width: int = 100, *, notes: bool = True) -> list[str]:
    return table(rows, facts, width=width, colour=False, notes=notes).splitlines()


def fields(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


_USUAL = {
    "latency": "268.3 us",
    "bandwidth": "3002 GB/s",
    "of peak": "89.5 % #########.",
    "noise": "0.100 %",
}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        # 805 306 368 bytes in 268.3 us are 3001.5 GB/s, 89.5 % of 3352.3 GB/s.
        ({}, _USUAL),
        ({"comparison": COMPARISON}, {**_USUAL, "change": "+12.34 %"}),
        # A small change has no negative zero.
        (
            {"comparison": replace(COMPARISON, delta=-1e-5)},
            {**_USUAL, "change": "+0.00 %"},
        ),
        ({"moved_bytes": None, "half_width": None}, {"latency": "268.3 us"}),
        (
            {"accesses_per_launch": 1000, "moved_bytes": None},
            {"latency": "268.3 ns/access", "noise": "0.100 %"},
        ),
        # Twice the compulsory bytes are still a share of what DRAM could give; ten times are none.
        ({"requested": 2 * 768 * MiB}, _USUAL),
        (
            {"requested": 10 * 768 * MiB},
            {"latency": "268.3 us", "bandwidth": "30.02 TB/s asked", "noise": "0.100 %"},
        ),
        # Placements whose medians fall on the same tick of the clock.
        ({"half_width": 1e-15}, {**_USUAL, "noise": "< 0.00100 %"}),
    ],
)
def test_columns_are_those_that_have_a_figure(
    changes: dict[str, object], shown: dict[str, str], facts: DeviceFacts, make_row: MakeRow
) -> None:
    heading, rule, line, *_ = draw([make_row(**changes)], facts)
    assert set(rule) <= {"-"}
    assert dict(zip(fields(heading), fields(line), strict=True)) == {
        "test": "test_triad",
        **shown,
        "verdict": "PASS",
    }


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"footprint": 200 * MiB}, True),
        ({"footprint": 200 * MiB - 1}, False),
        ({"footprint": None}, False),
        ({"mode": "hot"}, False),
        ({"mode": "dirty-cold"}, True),
        ({"moved_bytes": MovedBytes(512 * MiB, 256 * MiB, link=True)}, False),
        ({"moved_bytes": None}, False),
    ],
)
def test_share_of_the_peak_only_where_it_means_dram(
    changes: dict[str, object], shown: bool, facts: DeviceFacts, make_row: MakeRow
) -> None:
    heading, _, line, *_ = draw([make_row(**changes)], facts)
    assert ("of peak" in heading) == shown
    assert ("89.5 %" in line) == shown


@pytest.mark.parametrize(("width", "word"), [(60, "sim"), (80, "sim"), (200, "simulated")])
def test_every_simulated_verdict_says_so_on_its_own_line(
    width: int, word: str, facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row(f"t.py::test_{outcome.name}", outcome, simulated=True, comparison=COMPARISON)
        for outcome in Outcome
    ]
    lines = draw(rows, facts, width)
    body = lines[2 : 2 + len(rows)]
    assert [re.search(rf"\b{word}\b", line) is not None for line in body] == [True] * len(rows)
    assert ("sim: simulated, no GPU was measured" in lines) == (word == "sim")
    assert max(map(len, body)) <= width


@pytest.mark.parametrize("width", [100, 50])
def test_bandwidth_that_threads_ask_for_is_explained_where_it_is_shown(
    width: int, facts: DeviceFacts, make_row: MakeRow
) -> None:
    lines = draw([make_row(requested=2**40, comparison=COMPARISON)], facts, width)
    assert (
        any(line.startswith("asked: by the threads") for line in lines)
        == any(line.startswith("test_triad") and "/s asked" in line for line in lines)
        == (width == 100)
    )
    assert not any(line.startswith("asked:") for line in draw([make_row()], facts, width))


def test_rows_of_one_test_stand_under_its_name(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row("a/t.py::test_" + "x" * 80, label=label) for label in ("off", "on")]
    rows.append(make_row("a/t.py::test_y[1-2]", sampler="batched", label="last"))
    lines = draw(rows, facts, 100)
    assert lines[2] == "test_" + "x" * 80
    assert [line.split("  268.3")[0].rstrip() for line in lines[3:6]] == [
        "  off",
        "  on",
        "test_y[1-2][last]",
    ]
    assert lines[6] == "  clean-cold, batched"


def test_a_row_of_the_whole_test_has_the_line_of_its_name(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    lines = draw([make_row("t.py::test_x", label="part"), make_row("t.py::test_x")], facts)
    assert [line.split("  268.3")[0].rstrip() for line in lines[2:4]] == ["test_x", "  part"]


def test_a_name_that_is_too_long_gets_a_line_for_its_test(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row(
            "t.py::test_the_link_bounds_what_is_read_in_place",
            label="mapped, 1 x",
            sampler="batched",
        ),
        make_row("t.py::test_a_host_that_reads_results_in_place_gets_them"),
        make_row("t.py::test_short", label="mapped"),
    ]
    lines = draw(rows, facts, 80)
    assert max(map(len, lines)) <= 80
    assert [line.split("  268.3")[0].rstrip() for line in lines[2:7]] == [
        "test_the_link_bounds_what_is_read_in_place",
        "  mapped, 1 x",
        "    clean-cold, batched",
        "test_a_host_..._place_gets_them",
        "test_short[mapped]",
    ]
    wide = draw(rows, facts, 140)
    assert wide[2].startswith("test_the_link_bounds_what_is_read_in_place[mapped, 1 x]  268.3")


def test_rows_whose_names_are_cut_are_told_apart(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(f"t.py::test_copy_of_a_{size}_buffer_to_the_device_and_back_again")
        for size in ("small", "large")
    ]
    rows += [
        make_row(
            "t.py::test_a", label=f"from the {where} node of the host into a buffer of the device"
        )
        for where in ("near", "far")
    ]
    names = [line.split("  268.3")[0].rstrip() for line in draw(rows, facts, 70)[2:7]]
    assert len(set(names)) == 5
    assert all("..." in name for name in names if name != "test_a")


def test_a_way_that_all_rows_of_a_test_share_is_said_once(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [make_row("t.py::test_a", label=str(i), sampler="batched") for i in range(2)] + [
        make_row(f"t.py::test_b{i}") for i in range(3)
    ]
    lines = draw(rows, facts)
    assert lines[2] == "test_a (clean-cold, batched)"
    assert sum("batched" in line for line in lines) == 1


def test_what_got_worse_stands_first_then_the_slowest_by_kind_of_test(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    slow = ((300e-6,), (301e-6,))
    rows = [
        make_row("t.py::test_fine"),
        make_row("t.py::test_slow", placements=slow),
        make_row("t.py::test_worse", Outcome.FAIL, mode="hot"),
        make_row("t.py::test_hot", mode="hot", label="quick"),
        make_row("t.py::test_hot", mode="hot", label="slow", placements=slow),
        make_row("t.py::test_doubtful", Outcome.UNDECIDED, code=Code.LOOKS_SLOWER),
        make_row("t.py::test_nothing", Outcome.FAIL, measured=False),
    ]
    lines = table(rows, facts, width=100, colour=False).splitlines()
    said = [
        line.split("  268.3")[0].split("  300.5")[0].split("  FAIL")[0].rstrip()
        for line in lines[2:14]
    ]
    assert said == [
        "-- L2",
        "test_worse",
        "  hot, graph",
        "test_hot (hot, graph)",
        "  slow",
        "  quick",
        "-- not measured",
        "test_nothing",
        "-- DRAM",
        "test_doubtful",
        "test_slow",
        "test_fine",
    ]


def test_the_noise_of_a_chase_is_that_of_its_latency_per_access(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    row = make_row(accesses_per_launch=1000, moved_bytes=None)
    lines = draw([row], facts)
    # 268.3 us +- 0.2683 us for a thousand accesses.
    assert fields(lines[2])[1:3] == ["268.3 ns/access", "0.100 %"]
    assert lines[3] == "  268.0 ns to 268.6 ns/access"
    assert "ns to" not in table([row], facts, width=100, colour=False, notes=False)


@pytest.mark.parametrize(
    ("sectors", "shown"),
    [(8.0, "8 sectors a request"), (18.25, "18.2 sectors a request"), (4.0, None), (None, None)],
)
def test_sectors_of_a_request_are_shown_where_it_is_not_coalesced(
    sectors: float | None, shown: str | None, facts: DeviceFacts, make_row: MakeRow
) -> None:
    row = make_row(sectors_per_request=sectors)
    assert [line.strip() for line in draw([row], facts) if "sectors" in line] == (
        [shown] if shown else []
    )
    assert "sectors" not in table([row], facts, width=100, colour=False, notes=False)


def test_a_test_that_measured_nothing_is_still_a_row(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(),
        make_row(
            "tests/test_stream.py::test_wrong",
            Outcome.FAIL,
            reason="3 of 64 elements differ",
            measured=False,
        ),
    ]
    lines = draw(rows, facts)
    assert fields(lines[3]) == ["test_wrong", "FAIL"]
    assert not any("3 of 64" in line for line in lines)  # pytest shows it


def test_a_row_taken_in_another_way_says_how(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row("t.py::test_a"),
        make_row("t.py::test_b"),
        make_row("t.py::test_c", sampler="batched"),
    ]
    lines = draw(rows, facts)
    assert lines[5] == "  clean-cold, batched"
    assert lines[6].startswith("clean-cold, sampler graph, unless noted otherwise")


def test_reasons_of_all_but_passes_are_given_in_full(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(f"t.py::test_{outcome.name}", outcome, reason=f"because of {outcome.name}")
        for outcome in Outcome
    ]
    text = "\n".join(draw(rows, facts))
    for outcome in (Outcome.UNDECIDED, Outcome.NEW):
        assert f"{outcome.value} t.py::test_{outcome.name}: because of {outcome.name}" in text
    # pytest shows why a test failed, but one reason only.
    assert "because of PASS" not in text
    assert "because of FAIL" not in text
    also = replace(make_row("t.py::test_also", Outcome.FAIL, reason="too slow"), test_error=True)
    assert "FAIL t.py::test_also: too slow" in draw([also], facts)


def test_a_note_of_many_rows_is_shown_once(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(f"t.py::test_{noise}", notes=(f"noise 0.{noise} % after 8 placements",))
        for noise in (2, 4, 3)
    ]
    notes = [
        line
        for line in draw([*rows, make_row("t.py::test_x", notes=("1 of 8 placements",))], facts)
        if line.startswith("note ")
    ]
    assert notes == [
        "note test_2: noise 0.2 % after 8 placements (2 rows more with such a note)",
        "note test_x: 1 of 8 placements",
    ]


def test_long_names_are_shortened_in_the_middle_and_the_table_fits(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    name = "test_lookup_table_stays_in_l2_" + "x" * 90
    rows = [
        make_row(
            f"tests/memory/test_l2.py::{name}{rest}",
            Outcome.PASS,
            comparison=COMPARISON,
            simulated=True,
        )
        for rest in ("", "x[264-8MiB]")
    ]
    lines = draw(rows, facts)
    assert max(map(len, lines)) <= 100
    assert re.match(r"test_\w+\.\.\.x+  ", lines[2])
    assert re.fullmatch(r"test_\w+\.\.\.x+", lines[3])
    assert lines[4].startswith("  264-8MiB  ")


def test_a_label_that_repeats_its_parameters_is_shown_alone(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [make_row(f"t.py::test_a[{how}]", label=f"{how}, 4 MiB") for how in ("near", "far")]
    rows += [
        make_row("t.py::test_b[near]", label="near"),
        make_row("t.py::test_b[4]", label="4 MiB"),
    ]
    lines = draw(rows, facts)
    assert [line.split("  268.3")[0].rstrip() for line in lines[2:8]] == [
        "test_a", "  near, 4 MiB", "  far, 4 MiB", "test_b", "  near", "  4, 4 MiB",
    ]  # fmt: skip


def test_the_file_is_shown_where_names_need_it(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row("tests/memory/test_a.py::test_x"), make_row("tests/memory/test_b.py::test_x")]
    lines = draw(rows, facts)
    assert [fields(line)[0] for line in lines[2:4]] == ["test_a.py::test_x", "test_b.py::test_x"]


def test_brackets_in_ids_are_no_markup(facts: DeviceFacts, make_row: MakeRow) -> None:
    assert (
        fields(draw([make_row("t.py::test_a[bold]", label="red")], facts)[2])[0]
        == "test_a[bold][red]"
    )


def test_plain_text_is_ascii_and_colour_changes_nothing_else(
    facts: DeviceFacts, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = [
        make_row(f"t.py::test_{outcome.name}", outcome, comparison=COMPARISON)
        for outcome in Outcome
    ]
    plain = table(rows, facts, width=100, colour=False)
    assert plain.isascii()
    assert "\x1b" not in plain
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = table(rows, facts, width=100, colour=True)
    assert "\x1b[1;31mFAIL" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


def test_no_rows_no_table(facts: DeviceFacts) -> None:
    assert table([], facts, width=100, colour=False) == ""


def test_a_pass_in_a_failed_test_says_so(facts: DeviceFacts, make_row: MakeRow) -> None:
    row = replace(make_row("t.py::test_a", Outcome.PASS), failed=True)
    assert any("PASS, test failed" in line for line in draw([row], facts, 100))


def test_notes_are_counted_where_they_are_not_spelled_out(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    row = make_row("t.py::test_a", Outcome.PASS)
    assert row.measurement is not None
    noted = replace(row, measurement=replace(row.measurement, notes=("one", "two")))
    short = table([noted], facts, width=100, colour=False, notes=False)
    assert "2 notes on how it was measured; -v shows them" in short
    assert "note test_a: one" not in short
    assert "note test_a: one" in table([noted], facts, width=100, colour=False)
