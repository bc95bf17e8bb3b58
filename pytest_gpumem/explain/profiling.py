"""Profiles of one side: its tests under Nsight Systems and Nsight Compute."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.nsight.ncu import ACCESS_METRICS, PROFILE_METRICS, read_csv
from pytest_gpumem.nsight.reading import read, with_results
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import (
    COLLECTED,
    NCU,
    NSYS,
    NSYS_REPORT,
    TRAFFIC_METRICS,
    Tool,
    ToolMissing,
    counting_command,
    find,
    lacks_metric,
    ncu_trouble,
    nsys_command,
    nsys_trouble,
)
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.schema import Document
from pytest_gpumem.result_files import FileError, load
from pytest_gpumem.runs import child
from pytest_gpumem.runs.workers import environment_of
from pytest_gpumem.runs.worktree import Side as Tree


class NotProfiled(Exception):
    """A run measured nothing, or its profiler recorded nothing: one line with the cause and the remedy."""


@dataclass(frozen=True)
class SideRun:
    """One side's tests, ready to run."""

    tree: Tree
    other: Tree
    """The other side, whose modules it must not see."""
    arguments: tuple[str, ...]
    """pytest's."""
    tests: tuple[str, ...]
    """Node ids; empty for all that the arguments select."""
    environment: Mapping[str, str]
    """All environment variables."""

    def command(self, results: Path) -> list[str]:
        """The command of the child, which writes its results."""
        own = [f"--gpumem-baseline={results.with_name('none')}", "-p", "no:cacheprovider"]
        return child.pytest_command([*self.arguments, *own], tests=self.tests, results=results, python=self.tree.python)

    @property
    def variables(self) -> dict[str, str]:
        """The child's environment."""
        return environment_of(self.tree, self.other, self.environment)


def results_of(results: Path, finished: child.Finished, *, problem: str | None = None, under: str = "") -> Document:
    """The measurements of a child.

    Args:
        results: its results file.
        finished: the run.
        problem: the cause in the profiler's output, if there is one.
        under: the profiler, for the message; empty without one.

    Raises:
        NotProfiled: there are none.
    """
    try:
        found = load(results) if results.exists() else None
    except FileError as error:
        raise NotProfiled(problem or f"pytest's results cannot be read: {error}") from None
    if found is None:
        where = f" under {under}" if under else ""
        raise NotProfiled(problem or f"pytest measured nothing{where} ({finished.how}); its output is above")
    return found


def trace_needed(measured: Iterable[Measurement]) -> bool:
    """True if a measurement lacks figures that a trace has."""
    for one in measured:
        if one.activity is None or one.activity.not_counted is not None:
            return True
        if one.migrations is None or one.migrations.launch is None:
            return True
    return False


def trace(run: SideRun, echo: Callable[[str], object]) -> dict[str, TestProfile]:
    """Run one side under Nsight Systems: kernels, copies and pages of its measured launches, by row key.

    Args:
        run: the side's tests.
        echo: receives each line that pytest and nsys print.

    Raises:
        NotProfiled: nsys is missing, or wrote no report that can be read.
    """
    program = _program(NSYS, run)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, report = Path(folder, "results.json"), Path(folder, f"trace{NSYS_REPORT}")
        finished = _run(nsys_command(program, run.command(results), report, name=None, managed=True), run, echo)
        collected = report.with_suffix(COLLECTED).exists()
        problem = None if report.exists() else nsys_trouble(finished.output, report, None, collected=collected) or "nsys wrote no report"
        rows = results_of(results, finished, problem=problem, under="nsys").rows
        if problem is not None:
            raise NotProfiled(problem)
        try:
            recording = read(report, run.environment)
        except (BadReport, ToolMissing) as error:
            raise NotProfiled(str(error)) from None
    found = _by_key([one for one in with_results(recording.profiles, rows) if one.kernels or one.copies or one.memsets])
    if not found:
        raise NotProfiled("nsys recorded nothing in a measured launch of these tests")
    return found


def count(run: SideRun, echo: Callable[[str], object], *, hot: bool = False) -> dict[str, TestProfile]:
    """Run one side under Nsight Compute: counters of its measured launches, by row key.

    Args:
        run: the side's tests.
        echo: receives each line that pytest and ncu print.
        hot: all of them are measured hot. Otherwise ncu empties the caches before every kernel.

    Raises:
        NotProfiled: ncu is missing, may not count, or saw no kernel.
    """
    program = _program(NCU, run)
    for further in (ACCESS_METRICS, ()):  # if ncu refuses them, sectors per request alone tell the access pattern
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
            more = [metric for metric in (*PROFILE_METRICS, *further) if metric not in TRAFFIC_METRICS]
            finished = _run(counting_command(program, run.command(results), log, hot=hot, more=more), run, echo)
            page = log.read_text(errors="replace") if log.exists() else ""
            problem = ncu_trouble(page) or ncu_trouble(finished.output)
            if further and (lacks_metric(page) or lacks_metric(finished.output)):
                continue
            rows = results_of(results, finished, problem=problem, under="ncu").rows
            try:
                profiles = read_csv(page).profiles
            except BadReport as error:
                raise NotProfiled(problem or str(error)) from None
            found = _by_key([one for one in with_results(profiles, rows) if one.kernels])
            if not found:
                raise NotProfiled(problem or "ncu counted kernels, none of them in a measured launch of these tests")
            return found
    raise AssertionError("unreachable")  # the second pass returns or raises


def _program(tool: Tool, run: SideRun) -> Path:
    try:
        return find(tool, run.environment)
    except ToolMissing as error:
        raise NotProfiled(str(error)) from None


def _run(command: Sequence[str], run: SideRun, echo: Callable[[str], object]) -> child.Finished:
    try:
        return child.run(command, run.variables, echo, folder=run.tree.folder)
    except OSError as error:
        raise NotProfiled(f"{command[0]} cannot be started: {error}") from None


def _by_key(profiles: Sequence[TestProfile]) -> dict[str, TestProfile]:
    """Profiles of measurements with a known node id."""
    return {one.key: one for one in profiles if one.nodeid is not None}
