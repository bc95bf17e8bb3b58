"""`gpumem history`: what it lists, in which order, and its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from known_devices import H100
from measurements import measurement

from pytest_gpumem.baselines import store as module
from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import record, reset
from pytest_gpumem.cli import main
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict

pytest.importorskip("ruptures", reason="ruptures is of the extra history")

Command = Callable[..., Result]
RUNS = 40
NOW = datetime.now(timezone.utc)


def row(name: str, latency: float, peak: int) -> Row:
    measured = measurement(mode="hot", placements=((latency,),), floor=1e-9)
    return Row(f"tests/test_a.py::{name}", Limits(), Verdict(Outcome.PASS, ""), measured, footprint=Footprint(peak=peak))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command on forty nightly runs, of which the last is of today."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    place, random = Storage(tmp_path / "kept"), np.random.default_rng(1)

    class Clock(datetime):
        at = NOW

        @classmethod
        def now(cls, tz: object = None) -> Any:
            return cls.at

    monkeypatch.setattr(module, "datetime", Clock)
    for run in range(RUNS):
        Clock.at = NOW - timedelta(days=RUNS - 1 - run)
        noise = 1 + 0.002 * random.standard_normal(10)
        rows = [row(f"test_{number}", 1e-4 * noise[number], 1000) for number in range(10)]
        rows[0] = row("test_slow", 1e-4 * noise[0] * (1.05 if run >= 30 else 1), 1000)
        rows[1] = row("test_large", 1e-4 * noise[1], 2000 if run >= 25 else 1000)
        rows[2] = row("test_meant", 1e-4 * noise[2] * (1.1 if run >= 20 else 1), 1000)
        rows[3] = row("test_fast", 1e-4 * noise[3] * (0.9 if run >= 35 else 1), 1000)
        rows[4] = row("test_old", 1e-4 * noise[4] * (1.2 if run >= 6 else 1), 1000)
        record(place, H100, rows, f"{run:08x}ffff", {}, str(run))
        if run == 22:
            reset(place, H100.key, ["tests/test_a.py::test_meant"], "checks bounds", "ada", None)
    return lambda *arguments: CliRunner().invoke(main, ["history", str(place), *arguments])


def test_what_got_worse_comes_first(command: Command) -> None:
    result = command()
    assert result.exit_code == 0, result.output
    places = [
        result.output.index(word) for word in ("test_large", "test_slow", "test_meant", "accepted by ada: checks bounds", "test_fast")
    ]
    assert places == sorted(places)
    (slow,) = (line for line in result.output.splitlines() if "test_slow" in line)
    assert "+5." in slow or "+4.9" in slow
    assert "0000001d..0000001e" in slow
    assert f"{NOW - timedelta(days=RUNS - 1 - 30):%Y-%m-%d}" in slow
    assert "test_old" not in result.output
    assert result.output.splitlines()[-1].endswith("2 changes for the worse, 1 accepted, 1 for the better")


@pytest.mark.parametrize("since", ["60", f"{NOW - timedelta(days=60):%Y-%m-%d}"])
def test_since(command: Command, since: str) -> None:
    assert "test_old" in command("--since", since).output


def test_one_test(command: Command) -> None:
    result = command("--test", "tests/test_a.py::test_slow")
    assert "test_slow" in result.output
    assert "test_large" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--since", "soon"), "'soon' is no time; accepted is a number of days, or a date"),
        (("--test", "tests/none.py"), "there are no runs of tests/none.py"),
        (("--gpu", "none"), "there are no runs of none"),
    ],
)
def test_errors(command: Command, arguments: tuple[str, ...], words: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 4
    assert words in result.output
    assert "Traceback" not in result.output


def test_an_empty_place(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["history", str(tmp_path)])
    assert result.exit_code == 4
    assert "--gpumem-record" in result.output


def test_without_ruptures_one_line_names_the_extra(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    result = command()
    assert result.exit_code == 4
    assert "pip install 'pytest-gpumem[history]'" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_change_of_many_tests_names_some_and_counts_the_others(tmp_path: Path, command: Command) -> None:
    for run in range(RUNS, RUNS + 3):
        names = ("slow", "large", "meant", "fast", "old", *range(5, 10))
        record(Storage(tmp_path / "kept"), H100, [row(f"test_{name}", 1e-4, 3000) for name in names], f"{run:08x}", {}, str(run))
    lines = command("--since", "1").output.splitlines()
    assert sum("1 KB -> 3 KB" in line for line in lines) == 5
    (more,) = (line for line in lines if "more with the run" in line)
    assert more.startswith(f"and 5 tests more with the run of {NOW:%Y-%m-%d %H:%M} ")
