"""`--gpumem-processes`: tests are measured in several fresh processes, and each row is judged over all of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from pytest_gpumem.plugin.marks import may_measure
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.terminal import EVERY, on_a_terminal
from pytest_gpumem.plugin.workers import refuse_workers
from pytest_gpumem.reporting.progress import of_processes
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.experiment import Processes
from pytest_gpumem.runs.processes import HEAD, ProcessRecord, Turn
from pytest_gpumem.runs.worktree import in_this_environment
from pytest_gpumem.settings import FURTHER_PROCESS

AHEAD = max(
    0, min(2, (os.cpu_count() or 1) - 1)
)  # processes that get ready while another one measures


class RepeatFeature(Feature):
    """Runs the further processes before the tests of this one; registered only with more than one process."""

    def __init__(self, session: GpuSession) -> None:
        refuse_workers(session.config, "--gpumem-processes runs its processes one after another")
        self._session = session
        self._count = session.settings.processes
        self._reported: set[str] = set()
        self._tests = 0  # that measure, or may
        self._begun = self._shown = (
            0.0  # when the first process began, and when the last line was written
        )

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        gpu = self._session
        self._tests = sum(map(may_measure, session.items))
        if not gpu.config.option.collectonly and not session.testsfailed and self._tests:
            self._begun = self._shown = time.monotonic()
            announce(gpu, self._line())
            try:
                self._run_processes()
            except RunError as failed:
                raise pytest.exit.Exception(
                    f"gpumem: {failed}", returncode=pytest.ExitCode.TESTS_FAILED
                ) from None
        yield

    def _run_processes(self) -> None:
        """Run the further processes: the same command in this environment.

        They save, report and compare nothing: this process judges the rows of all. None is
        repeated: a test that crashes now and then fails.
        """
        gpu, config = self._session, self._session.config
        arguments = [*map(str, config.invocation_params.args)]
        total = gpu.settings.total_budget
        if total is not None:
            arguments.append(f"--gpumem-budget={total / self._count!r} s total")
        processes = Processes(
            {HEAD: in_this_environment(config.invocation_params.dir)},
            arguments,
            (),
            {**os.environ, FURTHER_PROCESS: "1"},
            ahead=AHEAD,
            evidence=gpu.evidence,  # tells apart the bytes of arguments that differ by process
            everything=True,
            titles=lambda turn: f"process {turn.round} of {self._count} of --gpumem-processes",
        )
        turns = [Turn(number, HEAD) for number in range(2, self._count + 1)]
        with contextlib.closing(processes):
            for index in range(len(turns)):
                process = processes.run(turns[index:], None, watch=self._watch)
                self._check(process)
                gpu.further.append(process)
                announce(gpu, self._line())

    def _check(self, process: ProcessRecord) -> None:
        """Raise `RunError` if a process measured nothing, or on another device."""
        reported = process.error and (process.texts or process.finished)
        if process.device is None and not reported:
            why = (
                process.error or process.failed_as_a_whole or "no test of it reached a measurement"
            )
            raise RunError(f"{process.name} measured nothing: {why}")
        if process.device is not None and process.device.key != self._session.facts.key:
            raise RunError(
                f"{process.name} measured on {process.device.key}, this one is on "
                f"{self._session.facts.key}"
            )

    def _line(self, finished: int = 0) -> str:
        """`finished`: tests that the present process has finished."""
        return of_processes(
            len(self._session.further),
            self._count,
            finished,
            self._tests,
            time.monotonic() - self._begun,
        )

    def _watch(self, finished: int) -> None:
        if (
            not replace_line(self._session, self._line(finished))
            and time.monotonic() - self._shown >= EVERY
        ):
            self._shown = time.monotonic()
            announce(self._session, self._line(finished))

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        self._reported.add(report.nodeid)
        return NOTHING

    def failed_elsewhere(self) -> bool:
        """Return True if a further process failed in a way that no test of this process reports. The summary says how."""
        failed = False
        for process in self._session.further:
            remarks = [
                process.failure_of(nodeid)
                for nodeid in process.texts
                if nodeid not in self._reported
            ]
            remarks += (
                [f"{process.name} failed as a whole: {process.failed_as_a_whole}"]
                if process.failed_as_a_whole
                else []
            )
            self._session.remark(*(remark for remark in remarks if remark is not None))
            failed = failed or bool(remarks)
        return failed


def announce(session: GpuSession, line: str) -> None:
    """Write a line at once; not under -q."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and reporter.verbosity >= 0:
        if reporter.isatty:
            reporter.rewrite("", erase=True)  # the line of progress
        reporter.ensure_newline()
        reporter.write_line(line)


def replace_line(session: GpuSession, line: str) -> bool:
    """Replace the line of progress on a terminal. False if the output is no terminal."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or reporter.verbosity < 0 or not on_a_terminal(session.config, reporter):
        return False
    reporter.rewrite(line[: reporter._tw.fullwidth - 1], erase=True)
    return True
