"""Counters of one side: its tests under Nsight Compute, few launches of each, joined with the rows of the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pytest_gpumem.explain.session import NotCounted, Run, by_key, results_of
from pytest_gpumem.nsight import ncu, running
from pytest_gpumem.nsight.ncu_report import ACCESS_METRICS, PROFILE_METRICS, read_csv
from pytest_gpumem.nsight.profile_tools import ncu_trouble
from pytest_gpumem.nsight.reading import with_results
from pytest_gpumem.nsight.tools import ToolMissing, find_ncu
from pytest_gpumem.records.profile import TestProfile


def count(run: Run, echo: Callable[[str], object], *, hot: bool = False) -> dict[str, TestProfile]:
    """What one side's launches did, by row key.

    Args:
        run: the side's tests.
        hot: all of them are measured hot; else caches are emptied before every kernel, as ncu does by default.
        echo: takes each line that pytest and ncu print.

    Raises:
        NotCounted: ncu is missing, may not count, or saw no kernel.
    """
    try:
        program = find_ncu(run.environment)
    except ToolMissing as error:
        raise NotCounted(str(error)) from None
    for further in (ACCESS_METRICS, ()):  # where ncu refuses these, sectors per request alone tell the access pattern
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
            more = [metric for metric in (*PROFILE_METRICS, *further) if metric not in ncu.METRICS]
            command = ncu.counting_command(program, run.child(results), log, hot=hot, more=more)
            try:
                finished = running.run(command, run.own, echo, folder=run.tree.folder)
            except OSError as error:
                raise NotCounted(f"{program} cannot be started: {error}") from None
            said = log.read_text(errors="replace") if log.exists() else ""
            problem = ncu_trouble(said) or ncu_trouble(finished.output)
            if further and problem is not None and "metric" in problem:
                continue
            rows = results_of(results, finished, problem=problem, under="ncu").rows
            try:
                profiles = read_csv(said).profiles
            except ncu.BadOutput as error:
                raise NotCounted(problem or str(error)) from None
            found = by_key([one for one in with_results(profiles, rows) if one.kernels])
            if not found:
                raise NotCounted(problem or "ncu counted kernels, none of them in a measured launch of these tests")
            return found
    raise AssertionError("unreachable")  # the second pass returns or raises
