"""The window, the first runs and the reset of a row."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from msgspec import structs
from stored_rows import every, row, run

from pytest_gpumem.baselines.history import (
    WINDOW,
    Baseline,
    History,
    Reset,
    RunFile,
    SavedProcess,
    SavedRow,
    assemble,
    changes,
)
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Repeat

START = datetime(2026, 11, 1, tzinfo=timezone.utc)
KEY = row().key


def accepted(
    day: int,
    *,
    mode: str = "clean-cold",
    reset: str | None = None,
    name: str = "test_triad",
    processes: int = 1,
    revision: str | None = None,
) -> SavedRow:
    stored = row(name, mode=mode, latency=(100 + day) * 1e-6)
    assert stored.measurement is not None
    process = SavedProcess(f"p{day}", START + timedelta(days=day), revision, H100, day)
    further = (Repeat(stored.measurement.medians, None),) * (processes - 1)
    return SavedRow(
        stored.nodeid, structs.replace(stored.measurement, further=further), process, reset
    )


def reset(day: int, id: str) -> Reset:
    return Reset(id, KEY, "why", "ada", START + timedelta(days=day))


def days(rows: tuple[SavedRow, ...]) -> list[int]:
    return [(one.process.utc - START).days for one in rows]


def first(history: History) -> list[int]:
    return days(history.first)


def of(rows: list[SavedRow], *resets: Reset, window: int = WINDOW) -> Baseline:
    return assemble([run(one) for one in rows], window, resets)


def test_the_window_rolls_and_the_first_runs_stay() -> None:
    history = of([accepted(day) for day in range(25)]).history(KEY, every)
    assert (days(history.accepted), first(history)) == (list(range(5, 25)), [0, 1, 2])
    assert len(history.measurements) == WINDOW == 20
    history = of([accepted(day) for day in range(25)], window=4).history(KEY, every)
    assert (days(history.accepted), first(history)) == ([21, 22, 23, 24], [0, 1, 2])


@pytest.mark.parametrize(("runs", "since"), [(0, []), (3, []), (4, [0, 1, 2])])
def test_first_runs_are_something_to_have_moved_on_from(runs: int, since: list[int]) -> None:
    history = of([accepted(day) for day in range(runs)]).history(KEY, every)
    assert first(history) == since
    assert history.first_measurements == tuple(accepted(day).measurement for day in since)


def test_a_window_is_counted_in_runs_whatever_their_processes() -> None:
    history = of([accepted(day, processes=1 + day % 3) for day in range(10)], window=4).history(
        KEY, every
    )
    assert (days(history.accepted), first(history)) == ([6, 7, 8, 9], [0, 1, 2])


def test_window_and_first_runs_are_comparable_ones() -> None:
    """Where none is, the window holds the others: the judge says how they differ."""
    baseline = of([accepted(day, mode="hot" if day % 2 else "clean-cold") for day in range(50)])
    history = baseline.history(KEY, lambda past: past.mode == "hot")
    assert (days(history.accepted), first(history)) == (list(range(11, 50, 2)), [1, 3, 5])
    other = baseline.history(KEY, lambda past: False)
    assert (days(other.accepted), first(other)) == (list(range(30, 50)), [])


def test_window_and_first_runs_are_of_the_reset() -> None:
    rows = [accepted(day) for day in range(10)] + [
        accepted(day, reset="b") for day in range(10, 16)
    ]
    history = of(rows, reset(5, "a"), reset(9, "b")).history(KEY, every)
    assert (days(history.accepted), first(history)) == ([10, 11, 12, 13, 14, 15], [10, 11, 12])


def test_a_reset_is_of_one_row() -> None:
    baseline = of([accepted(0), accepted(0, name="test_copy")], reset(1, "a"))
    assert list(baseline.rows) == [row("test_copy").key]
    assert baseline.before == {KEY: 1}


@pytest.mark.parametrize(
    ("revisions", "rejected", "left"),
    [
        ("aabb", ("b", 4), [0, 1]),
        ("abab", ("b", 4), [0, 2]),
        ("abab", ("b", 3), [0, 2, 3]),  # the last was saved after the rejection
        ("abab", ("c", 4), [0, 1, 2, 3]),
        ("bbbb", ("b", 4), [0, 1, 2, 3]),  # a revision is not slower than itself
        ("bbba", ("b", 4), [3]),
    ],
)
def test_earlier_runs_of_a_revision_leave_once_it_is_shown_to_be_slower(
    revisions: str, rejected: tuple[str, int], left: list[int]
) -> None:
    rows = [accepted(day, revision=revision) for day, revision in enumerate(revisions)]
    runs = [run(row, replace(row, nodeid="tests/test_a.py::test_copy")) for row in rows]
    revision, sequence = rejected
    slower = SavedProcess("slower", START, revision, H100, sequence)
    found = assemble([*runs, RunFile(H100.key, slower, rejected=(KEY,))])
    assert days(found.rows[KEY]) == left
    assert days(found.rows["tests/test_a.py::test_copy"]) == [0, 1, 2, 3]


@given(st.permutations(range(8)))
def test_order_does_not_matter(order: list[int]) -> None:
    rows = [accepted(day, reset="a" if day > 3 else None) for day in order]
    assert days(of(rows, reset(4, "a"), reset(2, "z")).rows[KEY]) == [4, 5, 6, 7]


# What has changed since the baseline


FACTS = structs.replace(H100, driver="580.95.05", cuda="13.0")
AT = datetime(2026, 11, 1, tzinfo=timezone.utc)


def clocked(
    memory: float | None = 2.619e9, sm: float | None = 1.98e9, **changed: Any
) -> Measurement:
    # Before the samples the device was idle.
    conditions = (
        Conditions(sm_clock_hz=345e6, memory_clock_hz=1.593e9),
        Conditions(sm_clock_hz=sm, memory_clock_hz=memory),
    )
    made = row(conditions=conditions, **{"kernel_source": "k" * 64, **changed}).measurement
    assert made is not None
    return made


def run_of(
    facts: DeviceFacts = FACTS, test_source: str | None = "t" * 64, **changed: Any
) -> SavedRow:
    return SavedRow(
        "a.py::test",
        clocked(**changed),
        SavedProcess("p", AT, None, facts),
        test_source=test_source,
    )


def said(
    *window: SavedRow,
    facts: DeviceFacts = FACTS,
    test_source: str | None = "t" * 64,
    **changed: Any,
) -> tuple[str, ...]:
    return changes(clocked(**changed), facts, test_source, window)


def test_nothing_changed() -> None:
    assert said(run_of(), run_of()) == ()
    assert said() == ()


def test_driver_and_cuda() -> None:
    assert said(run_of(), facts=structs.replace(FACTS, driver="590.10")) == (
        "driver 580.95.05 -> 590.10",
    )
    assert said(run_of(), facts=structs.replace(FACTS, cuda="13.1")) == ("CUDA 13.0 -> 13.1",)


def test_a_change_is_said_until_the_window_has_moved_on() -> None:
    old, older = structs.replace(FACTS, driver="570.1"), structs.replace(FACTS, driver="560.1")
    assert said(run_of(older), run_of(old), run_of(), run_of()) == ("driver 570.1 -> 580.95.05",)
    assert said(run_of(), run_of()) == ()


def test_sources() -> None:
    assert said(run_of(test_source="u" * 64)) == ("the test's source",)
    assert said(run_of(kernel_source="l" * 64)) == ("the kernel's source",)


def test_what_is_unknown_is_no_change() -> None:
    assert said(run_of(test_source=None, kernel_source=None)) == ()
    assert said(run_of(), test_source=None, kernel_source=None) == ()
    unknown = structs.replace(FACTS, driver=None)
    assert said(run_of(unknown), facts=unknown) == ()
    assert said(run_of(structs.replace(FACTS, driver="570.1")), run_of(unknown)) == (
        "driver 570.1 -> 580.95.05",
    )


def test_clocks_under_load() -> None:
    assert said(run_of(), run_of(), memory=2.3e9) == ("memory clock 2619 -> 2300 MHz",)
    assert said(run_of(), memory=2.61e9, sm=1.965e9) == ()  # one step of 15 MHz
    assert said(run_of(), sm=1.95e9) == ("SM clock 1980 -> 1950 MHz",)
    assert said(run_of(), sm=1.7e9) == ("SM clock 1980 -> 1700 MHz",)
    assert said(run_of(memory=None, sm=None), memory=1e9, sm=1e9) == ()
    assert said(run_of(), memory=None, sm=None) == ()
