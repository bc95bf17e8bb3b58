"""What a row says, in the words that every report shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulting_pass import FAULTING
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Window
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.records.row import Comparison, Row, Verdict
from pytest_gpumem.reporting.row_facts import (
    conditions_text,
    failure_text,
    migrations_text,
    row_facts,
)
from pytest_gpumem.units import MiB

Make = Callable[..., Row]
FAST = Conditions(
    sm_clock_hz=1.98e9,
    memory_clock_hz=2.619e9,
    temperature_c=41.0,
    power_w=310.4,
    other_processes=0,
)
SLOW = Conditions(sm_clock_hz=1.41e9, throttle_reasons=("sw_power_cap",), other_processes=1)


@pytest.mark.parametrize(
    ("conditions", "text"),
    [
        (Conditions(), ""),
        (FAST, "SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, not throttled"),
        (SLOW, "SM 1410 MHz, THROTTLED: sw_power_cap, 1 OTHER PROCESS"),
        (Conditions(other_processes=2), "2 OTHER PROCESSES"),
        (Conditions(temperature_c=41.0, throttle_reasons=None), "41 C"),
    ],
)
def test_conditions_in_words(conditions: Conditions, text: str) -> None:
    assert conditions_text(conditions) == text


def test_the_text_of_a_failure(make_row: Make, facts: DeviceFacts) -> None:
    comparison = Comparison(0.1, 0.01, processes=3)
    row = make_row(
        "t.py::test_a",
        Outcome.FAIL,
        label="b",
        reason="too slow",
        comparison=comparison,
        simulated=True,
        discarded=2,
        conditions=(FAST, SLOW),
        during=SLOW,
        window=Window(8 * MiB, 0.5, 9_830_400),
        notes=("only 2 of 16 placements: the budget was spent",),
    )
    row = replace(
        row,
        limits=Limits(max_regression="1%", origin={"max_regression": "marker"}),
        extra={"elements/s": 1.25e9},
    )
    assert failure_text(row, facts, 120).splitlines() == [
        "too slow",
        "  verdict       FAIL (simulated), t.py::test_a[b]",
        "  latency       268.3 us ± 0.100 % (95 %), triad",
        "  bandwidth     3002 GB/s for 768 MiB (512 MiB read, 256 MiB written), 89.5 % of peak",
        "  window        8 MiB at hit ratio 0.5 and a set-aside of 9.375 MiB",
        "  samples       6 samples on 2 placements, spread between placements 0 %, 2 discarded under throttling",
        "  method        clean-cold, sampler graph (it can be captured)",
        "  before        SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, not throttled",
        "  worst, after  SM 1410 MHz, THROTTLED: sw_power_cap, 1 OTHER PROCESS",
        "  note          only 2 of 16 placements: the budget was spent",
        "  extra         elements/s 1.25e+09",
        f"  device        NVIDIA H100 80GB HBM3, driver 580.95.05, {facts.key}",
    ]


def test_the_text_of_a_failing_test_is_as_wide_as_the_terminal(
    make_row: Make, facts: DeviceFacts
) -> None:
    row = make_row(
        "t.py::test_a", Outcome.FAIL, reason="+8.8 % against 3 runs: " + "slower than allowed, " * 9
    )
    text = failure_text(row, facts, 60)
    assert (
        max(len(line) for line in text.splitlines())
        <= 60
        < max(len(line) for line in failure_text(row, facts, 200).splitlines())
    )
    assert text.split() == failure_text(row, facts, 200).split()
    first, second = (
        line for line in text.splitlines() if "512 MiB read" in line or "89.5 % of peak" in line
    )
    assert first.index("3002 GB/s") == len(second) - len(second.lstrip())


def test_the_text_of_a_test_that_measured_nothing(facts: DeviceFacts) -> None:
    text = failure_text(
        Row("t.py::test_a", Limits(), Verdict(Outcome.FAIL, "wrong result"), failed=True),
        facts,
        120,
    )
    assert text.splitlines()[:2] == ["wrong result", "  verdict  FAIL, t.py::test_a"]
    assert len(text.splitlines()) == 3


def test_names_are_split_into_the_function_and_what_tells_its_rows_apart(
    make_row: Make, facts: DeviceFacts
) -> None:
    rows = [
        make_row("a/t.py::test_b[4-pinned]"),
        make_row("a/t.py::test_b[near]", label="near, 4 MiB"),
        make_row("a/t.py::test_c"),
    ]
    rows.append(make_row("a/t.py::test_d[]"))
    assert [(one.name, one.function, one.apart) for one in row_facts(rows, facts)] == [
        ("test_b[4-pinned]", "test_b", "4-pinned"),
        ("test_b[near][near, 4 MiB]", "test_b", "near, 4 MiB"),
        ("test_c", "test_c", ""),
        ("test_d[]", "test_d", "[]"),
    ]


def test_modes_of_the_placements_and_which_count(make_row: Make, facts: DeviceFacts) -> None:
    placements = ((2.25e-4,),) * 7 + ((2.51e-4,),)
    for window, count in ((None, "all count"), (Window(8 * MiB, 1.0, 9_830_400), "the 7 count")):
        row = make_row("t.py::test_a", Outcome.FAIL, placements=placements, window=window)
        assert f"modes      placements: 7 at 225.0 us, 1 at 251.0 us; {count}\n" in failure_text(
            row, facts, 120
        )


# A counting pass


def test_both_parts_of_a_pass_are_said() -> None:
    back = PageCounts(to_host=16 * MiB, to_host_seconds=0.5e-3, causes={"prefetch": 16 * MiB})
    assert list(migrations_text(Migrations(before=back, launch=FAULTING, source="CUPTI"))) == [
        "one launch, counted by CUPTI: 159 GPU page faults in 26 groups on 150 pages (9 duplicates), 48 CPU page faults, "
        "16 MiB to the device in 1.000 ms = 16.78 GB/s, 0 B to the host, 2 MiB mapped where it was, "
        "moved by fault 10 MiB, speculation 6 MiB",
        "before it, not timed: 0 GPU page faults, 0 CPU page faults, 0 B to the device, 16 MiB to the host in 500.0 us = 33.55 GB/s, "
        "moved by prefetch 16 MiB",
    ]


def test_a_pass_that_put_nothing_back_says_one_sentence() -> None:
    for mapped in (0, None):
        assert (
            len(
                list(
                    migrations_text(
                        Migrations(PageCounts(mapped=mapped), PageCounts(mapped=mapped), "CUPTI")
                    )
                )
            )
            == 1
        )


def test_what_was_not_counted_says_why() -> None:
    assert list(migrations_text(Migrations(not_counted="no cupti-python"))) == [
        "not counted: no cupti-python"
    ]
