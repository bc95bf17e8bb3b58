"""Declared and counted traffic: the table of `gpumem profile ncu --traffic`, and what the usual reports say of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import DramBytes, MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.table import traffic_table
from pytest_gpumem.units import MiB

MakeRow = Callable[..., Row]

RIGHT = DramBytes(512 * MiB, 250 * MiB, 512 * MiB, 256 * MiB, 5, "ncu")
HALF = DramBytes(256 * MiB, 256 * MiB, 256 * MiB, 256 * MiB, 5, "ncu")
TWICE = DramBytes(1024 * MiB, 256 * MiB, None, None, 5, "ncu")


def draw(rows: list[Row], facts: DeviceFacts, width: int = 150) -> list[str]:
    return traffic_table(rows, facts, width=width, colour=False).splitlines()


def test_one_line_a_measurement_and_a_sentence_where_they_differ(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_right", dram_bytes=RIGHT),
        make_row("t.py::test_half", dram_bytes=HALF),
        make_row("t.py::test_twice", dram_bytes=TWICE),
        make_row("t.py::test_none", dram_bytes=RIGHT, moved_bytes=None),
        make_row(
            "t.py::test_moved", dram_bytes=RIGHT, moved_bytes=MovedBytes(0, 0, declared=768 * MiB)
        ),
        make_row("t.py::test_copy"),
        make_row(
            "t.py::test_raised",
            Outcome.FAIL,
            reason="failed before anything was measured",
            measured=False,
        ),
    ]
    heading, _rule, *lines = draw(rows, facts)
    assert re.split(r"\s{2,}", heading) == [
        "test",
        "declared read + written",
        "DRAM read + written",
        "difference",
        "asked of L2",
        "the count says",
    ]
    fields = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert fields[0] == [
        "test_right",
        "512 MiB + 256 MiB",
        "512 MiB + 250 MiB",
        "-0.781 %",
        "512 MiB + 256 MiB",
        "agrees",
    ]
    assert fields[1][3] == "-33.3 %"
    assert fields[1][-1] == "declared too much"
    assert fields[2][3:] == ["+66.7 %", "-", "moves more"]
    assert (fields[3][1], fields[3][-1]) == ("-", "not declared")
    assert fields[4][1] == "768 MiB moved"
    assert fields[5] == ["test_copy", "512 MiB + 256 MiB", "-", "-", "not counted"]
    assert fields[6] == ["test_raised", "not counted"]
    below = " ".join(line.strip() for line in lines[7:])
    assert "declared too much t.py::test_half: declared 768 MiB" in below
    assert "moves more t.py::test_twice" in below
    assert "not counted t.py::test_copy: no kernel ran" in below
    assert "not counted t.py::test_raised: failed before anything was measured" in below
    assert "test_right:" not in below


def test_names_give_way_and_figures_do_not(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row("t.py::test_" + "x" * 90 + "_end", dram_bytes=RIGHT)]
    line = draw(rows, facts, 120)[2]
    assert len(line) <= 120
    assert "_end" in line
    assert "512 MiB + 250 MiB" in draw(rows, facts, 20)[2]


def test_plain_text_is_ascii(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row(dram_bytes=HALF)]
    assert traffic_table(rows, facts, width=100, colour=False).isascii()
    assert "\x1b[1;31mdeclared too much" in traffic_table(rows, facts, width=100, colour=True)
