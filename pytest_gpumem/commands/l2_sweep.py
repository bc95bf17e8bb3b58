"""The command `gpumem l2-sweep`: runs a test in fresh processes, each with one set-aside and hit ratio for its persisting streams."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins
from msgspec.structs import replace

from pytest_gpumem.commands import (
    examples,
    json_option,
    log,
    pytest_arguments,
    terminal,
    write_json,
)
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import NoAnswer, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.l2_sweep import Setting, Sweep
from pytest_gpumem.units import format_bytes, format_time

if TYPE_CHECKING:
    from pytest_gpumem.records.device import DeviceFacts
    from pytest_gpumem.records.measurement import Measurement
    from pytest_gpumem.runs.experiment import Experiment
    from pytest_gpumem.runs.processes import ProcessRecord

MOST = 10_000  # processes of a sweep: its search ends by itself


@click.command(
    "l2-sweep",
    short_help="Find a test's best set-aside and hit ratio.",
    epilog=examples(
        "gpumem l2-sweep tests/test_table.py::test_lookup",
        "gpumem l2-sweep TEST --json l2.json -- --gpumem-mode hot",
    ),
)
@json_option("Write the maps as JSON.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def l2_sweep(test: str, file: Path | None, pytest_arguments: tuple[str, ...]) -> None:
    """Find the set-aside and hit ratio with which the measurements of TEST, a node id, take least time.

    TEST measures with stream= of a persisting_stream, or a Case with window=. It runs some 30 times, in a fresh process each, in which
    the stream has another set-aside and hit ratio than the test asks for; a stream with set_aside="off" keeps it.
    """
    from pytest_gpumem.reporting.l2_sweep import drawn
    from pytest_gpumem.runs.experiment import Experiment, Processes
    from pytest_gpumem.runs.processes import HEAD, Turn
    from pytest_gpumem.runs.worktree import in_this_environment

    if test.startswith("-"):
        raise click.UsageError(
            f"TEST is a pytest node id such as tests/test_table.py::test_lookup, not {test!r}."
        )
    here, files = {HEAD: in_this_environment(Path.cwd())}, [test.partition("::")[0]]
    processes = Processes(here, pytest_arguments, files, os.environ, everything=True)
    with Experiment(processes, [Turn(number, HEAD) for number in range(1, MOST + 1)]) as experiment:
        found = _sweeps(_Runs(test, experiment))
    width, colour = terminal()
    for key, sweep in found.items():
        click.echo(drawn(printable(key), printable(sweep), width=width, colour=colour))
    write_json(
        file,
        [
            {"row": key, **to_builtins(sweep), "recommend": sweep.recommend()}
            for key, sweep in found.items()
        ],
    )


class _Runs:
    """The runs of a test, each in a process of its own."""

    def __init__(self, test: str, experiment: Experiment) -> None:
        self._test, self._experiment = test, experiment
        self._kept: dict[Setting, list[ProcessRecord]] = {}

    def number(self, setting: Setting, number: int) -> ProcessRecord:
        """One of the runs with a setting; the measurements of a test share them.
        `number`: counts from 1.
        Raises `NoAnswer`: as `run`.
        """
        kept = self._kept.setdefault(setting, [])
        while len(kept) < number:
            kept.append(self.run(setting))
        return kept[number - 1]

    def run(self, setting: Setting | None) -> ProcessRecord:
        """Run the test.
        `setting`: of each of its persisting streams; None: as the test asks.
        Raises `UserError`: pytest did not accept its arguments or the device, or there is no such test.
        Raises `NoAnswer`: it crashed.
        """
        from pytest_gpumem.memory.l2 import IMPOSED

        variables = (
            {}
            if setting is None
            else {IMPOSED: json.dumps({**setting.options(), "allow_thrash": True})}
        )
        process = self._experiment.measure([self._test], variables=variables, trouble=_trouble)
        if process.error is not None:
            raise NoAnswer(f"{self._test} crashed: {process.error}")
        if not process.finished and not process.outcomes:
            raise UserError(f"there is no test {self._test}")
        return process


def _trouble(process: ProcessRecord) -> str | None:
    """Why a run of the test is repeated: it crashed, or its conditions forbid a judgement."""
    from pytest_gpumem.judging.judge import unreliable

    doubts = (
        doubt
        for row in process.rows
        if row.measurement is not None
        for doubt in unreliable(row.measurement)
    )
    return process.error or next(doubts, None)


def _sweeps(runs: _Runs) -> dict[str, Sweep]:
    """By row key, the sweep of each measurement of a test that runs under an access-policy window.
    Raises `UserError`, `NoAnswer`: as `_Runs.run`; or nothing has a window, or a run lacks the measurement.
    """
    first = runs.run(None)
    measured = [
        (key, row.measurement) for key, row in first.by_key.items() if row.measurement is not None
    ]
    swept = [(key, one) for key, one in measured if one.window is not None]
    if not swept or first.device is None:
        why = "".join(
            f"; {nodeid} {outcome}: {reason}"
            for nodeid, (outcome, reason) in first.outcomes.items()
        )
        raise NoAnswer(
            f"nothing was swept: the test measures nothing with stream= of a persisting_stream and no Case with window={why}"
        )
    return {key: _sweep(runs, key, one, first.device) for key, one in swept}


def _sweep(runs: _Runs, key: str, first: Measurement, facts: DeviceFacts) -> Sweep:
    """Search for the best setting of one row.
    `first`: its measurement as the test asks.
    """
    from pytest_gpumem.judging.judge import unreliable
    from pytest_gpumem.measuring.l2_sweep import sweep
    from pytest_gpumem.reporting.l2_sweep import setting_text

    taken: Counter[Setting] = Counter()
    measured: dict[Setting, Measurement] = {}

    def measure(set_aside: int, hit_ratio: float) -> tuple[float, float | None]:
        setting = Setting(set_aside, hit_ratio)
        taken[setting] += 1
        rows = [
            row
            for row in runs.number(setting, taken[setting]).rows
            if row.key == key or row.measurement is None
        ]
        one = next((row.measurement for row in rows if row.measurement is not None), None)
        if one is None:
            why = next((row.verdict.reason for row in rows), "the test does not measure it")
            raise NoAnswer(f"{key} has no measurement at {setting_text(setting)}: {why}")
        measured[setting] = one
        log(f"gpumem: {key}: {setting_text(setting)}: {format_time(one.latency)}")
        return one.latency, one.half_width

    assert first.window is not None
    found = sweep(measure, facts, first.window.nbytes, target=first.target)
    granted = {
        setting.set_aside: one.window.set_aside
        for setting, one in measured.items()
        if one.window is not None and one.window.set_aside != setting.set_aside
    }
    notes = list(found.notes)
    if granted:
        least = min(granted)
        notes.append(
            f"the driver set aside {format_bytes(granted[least])} for a request of {format_bytes(least)}, and another size than "
            f"requested at {len(granted)} of the set-asides: the map shows the requested sizes"
        )
    if doubts := [reason for one in measured.values() for reason in islice(unreliable(one), 1)]:
        notes.append(f"unreliable measurements, at {counted(len(doubts), 'setting')}: {doubts[0]}")
    return replace(found, notes=tuple(notes))
