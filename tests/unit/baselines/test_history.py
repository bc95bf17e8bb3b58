"""The window, the first run and the reset of a row."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from msgspec import structs
from stored_rows import every, row

from pytest_gpumem.baselines.history import WINDOW, Accepted, Baseline, History, Process, Rejection, Reset, assemble
from pytest_gpumem.records.measurement import Repeat
from pytest_gpumem.settings import Settings

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
) -> Accepted:
    stored = row(name, mode=mode, latency=(100 + day) * 1e-6)
    assert stored.measurement is not None
    process = Process(f"p{day}", START + timedelta(days=day), revision, H100, day)
    further = (Repeat(stored.measurement.medians, None),) * (processes - 1)
    return Accepted(stored.nodeid, structs.replace(stored.measurement, further=further), process, reset)


def reset(day: int, id: str) -> Reset:
    return Reset(id, KEY, "why", "ada", START + timedelta(days=day))


def days(rows: tuple[Accepted, ...]) -> list[int]:
    return [(one.process.utc - START).days for one in rows]


def first(history: History) -> int | None:
    return days((history.first,))[0] if history.first is not None else None


def of(rows: list[Accepted], *resets: Reset, window: int = WINDOW) -> Baseline:
    return assemble(rows, resets, len(rows), window)


def test_the_window_rolls_and_the_first_run_stays() -> None:
    history = of([accepted(day) for day in range(25)]).history(KEY, every)
    assert (days(history.accepted), first(history)) == (list(range(5, 25)), 0)
    assert len(history.measurements) == WINDOW == 20 == Settings().baseline_window
    history = of([accepted(day) for day in range(25)], window=4).history(KEY, every)
    assert (days(history.accepted), first(history)) == ([21, 22, 23, 24], 0)


@pytest.mark.parametrize(("runs", "since"), [(0, None), (1, None), (2, 0)])
def test_a_first_run_is_something_to_have_moved_on_from(runs: int, since: int | None) -> None:
    assert first(of([accepted(day) for day in range(runs)]).history(KEY, every)) == since


def test_a_window_is_counted_in_runs_whatever_their_processes() -> None:
    history = of([accepted(day, processes=1 + day % 3) for day in range(10)], window=4).history(KEY, every)
    assert (days(history.accepted), first(history)) == ([6, 7, 8, 9], 0)


def test_window_and_first_run_are_comparable_ones() -> None:
    """Where none is, the window holds the others: the judge says how they differ."""
    baseline = of([accepted(day, mode="hot" if day % 2 else "clean-cold") for day in range(50)])
    history = baseline.history(KEY, lambda past: past.mode == "hot")
    assert (days(history.accepted), first(history)) == (list(range(11, 50, 2)), 1)
    other = baseline.history(KEY, lambda past: False)
    assert (days(other.accepted), first(other)) == (list(range(30, 50)), None)


def test_window_and_first_run_are_of_the_reset() -> None:
    rows = [accepted(day) for day in range(10)] + [accepted(day, reset="b") for day in range(10, 16)]
    history = of(rows, reset(5, "a"), reset(9, "b")).history(KEY, every)
    assert (days(history.accepted), first(history)) == ([10, 11, 12, 13, 14, 15], 10)


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
def test_earlier_runs_of_a_revision_leave_once_it_is_shown_to_be_slower(revisions: str, rejected: tuple[str, int], left: list[int]) -> None:
    rows = [accepted(day, revision=revision) for day, revision in enumerate(revisions)]
    rows += [replace(row, nodeid="tests/test_a.py::test_copy") for row in rows]
    found = assemble(rows, (), len(rows), WINDOW, [Rejection(KEY, *rejected)])
    assert days(found.rows[KEY]) == left
    assert days(found.rows["tests/test_a.py::test_copy"]) == [0, 1, 2, 3]


@given(st.permutations(range(8)))
def test_order_does_not_matter(order: list[int]) -> None:
    rows = [accepted(day, reset="a" if day > 3 else None) for day in order]
    assert days(of(rows, reset(4, "a"), reset(2, "z")).rows[KEY]) == [4, 5, 6, 7]
