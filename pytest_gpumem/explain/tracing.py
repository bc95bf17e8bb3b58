"""Copies and page faults of one side by Nsight Systems, for where CUPTI could not watch in the process itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_gpumem.explain.session import NotCounted, Run, by_key, results_of
from pytest_gpumem.nsight import running
from pytest_gpumem.nsight.profile_tools import COLLECTED, NSYS_REPORT, nsys_command, nsys_trouble
from pytest_gpumem.nsight.reading import read, with_results
from pytest_gpumem.nsight.sqlite_tables import BadReport
from pytest_gpumem.nsight.tools import ToolMissing, find_nsys
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.profile import TestProfile


def needed(measured: Iterable[Measurement]) -> bool:
    """Whether some measurement lacks what a trace would tell."""
    for one in measured:
        if one.activity is None or one.activity.not_counted is not None:
            return True
        if one.migrations is None or one.migrations.launch is None:
            return True
    return False


def trace(run: Run, echo: Callable[[str], object]) -> dict[str, TestProfile]:
    """What one side's measured launches consist of, and what their pages did, by row key.

    Args:
        run: the side's tests.
        echo: takes each line that pytest and nsys print.

    Raises:
        NotCounted: nsys is missing, or wrote no report that can be read.
    """
    try:
        program = find_nsys(run.environment)
    except ToolMissing as error:
        raise NotCounted(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, report = Path(folder, "results.json"), Path(folder, f"trace{NSYS_REPORT}")
        command = nsys_command(program, run.child(results), report, name=None, managed=True)
        try:
            finished = running.run(command, run.own, echo, folder=run.tree.folder)
        except OSError as error:
            raise NotCounted(f"{program} cannot be started: {error}") from None
        collected = report.with_suffix(COLLECTED).exists()
        problem = None if report.exists() else nsys_trouble(finished.output, report, None, collected=collected) or "nsys wrote no report"
        rows = results_of(results, finished, problem=problem, under="nsys").rows
        if problem is not None:
            raise NotCounted(problem)
        try:
            recording = read(report, run.environment)
        except (BadReport, ToolMissing) as error:
            raise NotCounted(str(error)) from None
    found = by_key([one for one in with_results(recording.profiles, rows) if one.kernels or one.copies or one.memsets])
    if not found:
        raise NotCounted("nsys recorded nothing in a measured launch of these tests")
    return found
