"""pytest under Nsight Compute, and the counts of each measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.nsight.ncu import read_csv
from pytest_gpumem.nsight.profile import results_of
from pytest_gpumem.nsight.reading import by_row
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import NCU, NO_KERNEL, counting_command, find, ncu_trouble
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs import child


@dataclass(frozen=True)
class CountedRun:
    """The counts of one run."""

    facts: DeviceFacts  # the device
    rows: tuple[Row, ...]  # the run's rows
    profiles: Mapping[str, TestProfile]  # by `Row.key`, the counters of the measured launches
    command: tuple[str, ...]


def under_ncu(
    pytest_command: Callable[[Path], Sequence[str]],
    environment: Mapping[str, str],
    run: Callable[[Sequence[str]], child.CommandResult],
    *,
    metrics: Sequence[str],
) -> CountedRun:
    """Run pytest under Nsight Compute and count the launches of each measurement.
    `pytest_command`: gives the command that writes its results into a file.
    `environment`: finds Nsight Compute.
    `run`: runs a command.
    `metrics`: beside `tools.TRAFFIC_METRICS`.
    Raises `ToolMissing`: Nsight Compute is not installed.
    Raises `NoAnswer`: it ran and counted nothing.
    """
    program = find(NCU, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
        command = counting_command(program, pytest_command(results), log, more=metrics)
        finished = run(command)
        page = log.read_text(errors="replace") if log.exists() else ""
        problem = ncu_trouble(page) or ncu_trouble(finished.output)
        document = results_of(results, finished, problem=problem, under=NCU.program)
    if document.device.simulated:
        raise NoAnswer(f"{document.device.name} is a simulated device: it has no counters, so there is nothing to count; use a GPU")
    if not any(row.measurement is not None for row in document.rows):
        raise NoAnswer(problem or "pytest measured nothing; its output is above")
    try:
        profiles = by_row(read_csv(page), document.rows) if '"ID"' in page else {}
    except BadReport as error:
        raise NoAnswer(problem or str(error)) from None
    if not profiles:
        raise NoAnswer(problem or NO_KERNEL)
    return CountedRun(document.device, document.rows, profiles, tuple(command))
