"""The window, the anchor and the epoch of a row."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from stored_rows import row

from pytest_gpumem.baselines.history import ANCHOR, WINDOW, Accepted, Baseline, Epoch, Process, assemble
from pytest_gpumem.records.measurement import Repeat
from pytest_gpumem.settings import Settings

START = datetime(2026, 11, 1, tzinfo=timezone.utc)
KEY = row().key


def accepted(day: int, *, mode: str = "clean-cold", epoch: str | None = None, name: str = "test_triad", processes: int = 1) -> Accepted:
    stored = row(name, mode=mode, latency=(100 + day) * 1e-6)
    assert stored.measurement is not None
    process = Process(f"p{day}", START + timedelta(days=day), None, H100)
    further = (Repeat(stored.measurement.medians, None),) * (processes - 1)
    return Accepted(stored.nodeid, replace(stored.measurement, further=further), process, epoch)


def epoch(day: int, id: str) -> Epoch:
    return Epoch(id, KEY, "why", "ada", START + timedelta(days=day))


def days(rows: tuple[Accepted, ...]) -> list[int]:
    return [(one.process.utc - START).days for one in rows]


def of(rows: list[Accepted], *epochs: Epoch, window: int = WINDOW) -> Baseline:
    return assemble(rows, epochs, len(rows), window)


def test_the_window_rolls_and_the_anchor_stays() -> None:
    history = of([accepted(day) for day in range(25)]).history(KEY, "clean-cold")
    assert days(history.accepted) == list(range(5, 25))
    assert days(history.anchor) == [0, 1, 2]
    assert history.processes == 25
    assert len(history.measurements) == WINDOW == 20


def test_a_window_of_another_length() -> None:
    history = of([accepted(day) for day in range(25)], window=4).history(KEY, "clean-cold")
    assert (days(history.accepted), days(history.anchor)) == ([21, 22, 23, 24], [0, 1, 2])


@pytest.mark.parametrize(("processes", "anchor"), [(1, []), (3, []), (4, [0, 1, 2])])
def test_an_anchor_is_something_to_have_moved_on_from(processes: int, anchor: list[int]) -> None:
    assert days(of([accepted(day) for day in range(processes)]).history(KEY, "clean-cold").anchor) == anchor
    assert ANCHOR == 3


def test_runs_of_several_processes_are_counted_by_their_processes() -> None:
    """A window of 20 is none of 60, and an anchor of three is the first run alone."""
    history = of([accepted(day, processes=3) for day in range(10)]).history(KEY, "clean-cold")
    assert (days(history.accepted), days(history.anchor), history.processes) == (list(range(3, 10)), [0], 30)
    # From 20 processes on a baseline is no longer forming: a window must reach that.
    assert sum(one.processes for one in history.accepted) >= WINDOW
    assert of([accepted(0, processes=3)]).history(KEY, "clean-cold").anchor == ()
    mixed = of([accepted(0), accepted(1, processes=3), accepted(2)], window=1).history(KEY, "clean-cold")
    assert (days(mixed.accepted), days(mixed.anchor)) == ([2], [0, 1])


def test_the_window_is_of_the_mode() -> None:
    rows = [accepted(day, mode="hot" if day % 2 else "clean-cold") for day in range(30)]
    history = of(rows).history(KEY, "hot")
    assert (days(history.accepted), days(history.anchor), history.processes) == (list(range(1, 30, 2)), [1, 3, 5], 15)


def test_window_and_anchor_are_of_the_epoch() -> None:
    rows = [accepted(day) for day in range(10)] + [accepted(day, epoch="b") for day in range(10, 16)]
    history = of(rows, epoch(5, "a"), epoch(9, "b")).history(KEY, "clean-cold")
    assert (days(history.accepted), days(history.anchor)) == ([10, 11, 12, 13, 14, 15], [10, 11, 12])


def test_an_epoch_is_of_one_row() -> None:
    baseline = of([accepted(0), accepted(0, name="test_copy")], epoch(1, "a"))
    assert list(baseline.rows) == [row("test_copy").key]
    assert baseline.before == {KEY: 1}


@given(st.permutations(range(8)))
def test_order_does_not_matter(order: list[int]) -> None:
    rows = [accepted(day, epoch="a" if day > 3 else None) for day in order]
    assert days(of(rows, epoch(4, "a"), epoch(2, "z")).rows[KEY]) == [4, 5, 6, 7]


def test_the_option_has_the_same_default() -> None:
    assert Settings().baseline_window == WINDOW
