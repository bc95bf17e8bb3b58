"""`--gpumem-processes`: tests are measured in several fresh processes, and each row is judged over
all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from pytest_gpumem.outcomes import UserError
from pytest_gpumem.plugin.marks import uses
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import in_parts
from pytest_gpumem.runs.processes import HEAD, Processes
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.settings import FURTHER_PROCESS
from pytest_gpumem.units import counted


class RepeatFeature(Feature):
    """Runs the further processes before the tests of this process."""

    name = "repeats"

    def __init__(self, session: GpuSession) -> None:
        if in_parts(session.config):
            raise pytest.UsageError(
                "gpumem: --gpumem-processes runs its processes in turn; "
                "leave out -n and --gpumem-isolate"
            )
        self._session = session
        self._count = session.settings.processes

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        runs = not session.config.option.collectonly and not session.testsfailed
        # Our fixtures depend on `request`, and `request.getfixturevalue` gives them.
        if runs and any(uses(item, "request") for item in session.items):
            try:
                self._run_processes()
            except UserError as failed:
                raise pytest.exit.Exception(
                    f"gpumem: {failed}", returncode=pytest.ExitCode.TESTS_FAILED
                ) from None
        yield

    def _run_processes(self) -> None:
        session, config = self._session, self._session.config
        arguments = [str(argument) for argument in config.invocation_params.args]
        total = session.settings.total_budget
        if total is not None:
            arguments.append(f"--gpumem-budget={total / self._count!r} s total")
        folder = config.invocation_params.dir
        side = Side("working tree", "", folder=folder, root=folder, python=sys.executable)
        processes = Processes(
            {HEAD: side},
            arguments,
            {**os.environ, FURTHER_PROCESS: "1"},
            evidence=session.evidence,  # arguments may vary by process
            say=self._say,
        )
        with closing(processes):
            for number in range(2, self._count + 1):
                self._announce()
                name = f"process {number} of {self._count} of --gpumem-processes"
                process = processes.run(HEAD, name=name)
                device, key = process.device, session.facts.key
                if device is not None and device.key != key:
                    raise UserError(f"{name} measured on {device.key}, this one is on {key}")
                session.further.append(process)
        self._announce()

    def _announce(self) -> None:
        ended = len(self._session.further)
        self._say(f"{ended} of {counted(self._count, 'process')} measured")

    def _say(self, sentence: str) -> None:
        """Write a line at once; not under -q."""
        reporter = self._session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None and reporter.verbosity >= 0:
            reporter.ensure_newline()
            reporter.write_line(f"gpumem: {sentence}")


def failures_elsewhere(session: GpuSession) -> bool:
    """Remark on failures of further processes that no test of this process reports; return whether
    there are any."""
    remarks = []
    for process in session.further:
        for nodeid, text in process.texts.items():
            if nodeid not in session.rows.tests:
                remarks.append(f"{process.name}: {nodeid}\n{text}")
        if process.failed_as_a_whole:
            remarks.append(f"{process.name} failed as a whole: {process.failed_as_a_whole}")
        elif session.rows and not (process.rows or process.texts):
            remarks.append(f"{process.name} measured nothing")
    session.remark(*remarks)
    return bool(remarks)
