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
    ToolMissing,
    counting_command,
    find,
    ncu_trouble,
    nsys_command,
    nsys_trouble,
)
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.result_file import FileError, load
from pytest_gpumem.records.schema import Document
from pytest_gpumem.runs import child
from pytest_gpumem.runs.child import Finished
from pytest_gpumem.runs.workers import environment_of
from pytest_gpumem.runs.worktree import Side as Tree


class NotCounted(Exception):
    """A run measured nothing, or its profiler saw nothing: one line with the cause and the remedy."""


@dataclass(frozen=True)
class Run:
    """One side's tests, ready to be run."""

    tree: Tree
    other: Tree
    """The other side, of which it may see nothing."""
    arguments: tuple[str, ...]
    """pytest's."""
    tests: tuple[str, ...]
    """Node ids; empty for all that the arguments select."""
    environment: Mapping[str, str]
    """All environment variables."""

    def child(self, results: Path) -> list[str]:
        """The command that measures and writes its results."""
        own = [f"--gpumem-baseline={results.with_name('none')}", "-p", "no:cacheprovider"]
        return child.pytest_command([*self.arguments, *own], tests=self.tests, results=results, python=self.tree.python)

    @property
    def own(self) -> dict[str, str]:
        """The child's environment."""
        return environment_of(self.tree, self.other, self.environment)


def results_of(results: Path, finished: Finished, *, problem: str | None = None, under: str = "") -> Document:
    """What a child measured.

    Args:
        results: the file that it wrote.
        finished: the run.
        problem: what the tool complained of that it ran under.
        under: that tool, for the message; empty where there was none.

    Raises:
        NotCounted: nothing.
    """
    try:
        found = load(results) if results.exists() else None
    except FileError as error:
        raise NotCounted(problem or f"pytest's results cannot be read: {error}") from None
    if found is None:
        where = f" under {under}" if under else ""
        raise NotCounted(problem or f"pytest measured nothing{where} ({finished.how}); what it said is above")
    return found


def by_key(profiles: Sequence[TestProfile]) -> dict[str, TestProfile]:
    """Profiles of measurements that are known by their node id."""
    return {one.key: one for one in profiles if one.nodeid is not None}


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
        program = find(NSYS, run.environment)
    except ToolMissing as error:
        raise NotCounted(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, report = Path(folder, "results.json"), Path(folder, f"trace{NSYS_REPORT}")
        command = nsys_command(program, run.child(results), report, name=None, managed=True)
        try:
            finished = child.run(command, run.own, echo, folder=run.tree.folder)
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
        program = find(NCU, run.environment)
    except ToolMissing as error:
        raise NotCounted(str(error)) from None
    for further in (ACCESS_METRICS, ()):  # where ncu refuses these, sectors per request alone tell the access pattern
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
            more = [metric for metric in (*PROFILE_METRICS, *further) if metric not in TRAFFIC_METRICS]
            command = counting_command(program, run.child(results), log, hot=hot, more=more)
            try:
                finished = child.run(command, run.own, echo, folder=run.tree.folder)
            except OSError as error:
                raise NotCounted(f"{program} cannot be started: {error}") from None
            said = log.read_text(errors="replace") if log.exists() else ""
            problem = ncu_trouble(said) or ncu_trouble(finished.output)
            if further and problem is not None and "metric" in problem:
                continue
            rows = results_of(results, finished, problem=problem, under="ncu").rows
            try:
                profiles = read_csv(said).profiles
            except BadReport as error:
                raise NotCounted(problem or str(error)) from None
            found = by_key([one for one in with_results(profiles, rows) if one.kernels])
            if not found:
                raise NotCounted(problem or "ncu counted kernels, none of them in a measured launch of these tests")
            return found
    raise AssertionError("unreachable")  # the second pass returns or raises
