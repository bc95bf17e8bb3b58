"""What a session puts out: ranges for profilers, terminal, files, baseline, exit code."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.leftovers import LeftoverFeature
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.reported import COMPLETE, exit_code
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.plugin.workers import Channel, Controller
from pytest_gpumem.quantity import comparison_text
from pytest_gpumem.ranges import phase
from pytest_gpumem.records.row import LOST, UNJUDGED, Omission
from pytest_gpumem.revisions import trouble

if TYPE_CHECKING:
    from pytest_gpumem.plugin.report_files import ReportFiles
    from pytest_gpumem.plugin.terminal import TerminalFeature

GPU_IDENTITY = (
    "key",
    "name",
    "simulated",
    "compute_capability",
    "memory_bytes",
    "ecc",
    "mig_profile",
    "driver",
    "cuda",
)
"""Facts in pytest-benchmark's `machine_info`: others would make every two runs differ."""


class OutputFeature(Feature):
    """Names tests for profilers, and ends the session."""

    name = "outputs"

    def __init__(
        self,
        session: GpuSession,
        expectations: ExpectationFeature,
        verdicts: VerdictFeature,
        leftovers: LeftoverFeature,
        channel: Channel,
    ) -> None:
        self._session = session
        self._expectations, self._verdicts = expectations, verdicts
        self._leftovers, self._channel = leftovers, channel
        self._terminal: TerminalFeature | None = None
        self._files: ReportFiles | None = None
        self._other_gpu: str | None = None
        """The GPU of a saved run that pytest-benchmark compares with, if it is another one."""
        self._left_out: set[str] = set()  # names of its entries
        session.config.add_cleanup(self._hush)  # after pytest has put back its hook

    def show(self, workers: Controller) -> None:
        """Show and write the results: another process has none.
        Raises `pytest.UsageError`: a file cannot be written.
        """
        from pytest_gpumem.plugin.report_files import ReportFiles
        from pytest_gpumem.plugin.terminal import TerminalFeature

        self._terminal = TerminalFeature(self._session, workers)
        self._files = ReportFiles(self._session)
        self._channel.collect(self._terminal.expect)
        for part in (workers, self._terminal):
            self._session.config.pluginmanager.register(part)

    # Around tests

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        with self._session.ranges.test(self._session.names.unique(item.nodeid), item.nodeid):
            yield

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "setup")

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "teardown")

    def _range(self, item: pytest.Item, name: str) -> AbstractContextManager[None]:
        return self._session.ranges.range(phase(self._session.names.unique(item.nodeid), name))

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        return NOTHING if self._files is None else self._files.logged(report)

    def started(self, session: pytest.Session) -> None:
        if self._terminal is not None:
            self._terminal.started(session)

    def selected(self, session: pytest.Session) -> None:
        if self._other_gpu is None:
            return
        key = self._session.facts.key
        for item in session.items:
            if uses(item, BENCHMARK_FIXTURE) or f"{item.nodeid}[gpu]" in self._left_out:
                raise pytest.UsageError(
                    f"--benchmark-compare: the saved run is of {self._other_gpu}, this session's "
                    f"device is {key}; results of different devices are not comparable. Give each "
                    f"GPU a storage of its own, such as --benchmark-storage=file://.benchmarks/{key}"
                )

    # The end

    # Around that of pytest-benchmark, which was registered before: no file is written yet.
    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        self._finish(session)
        return (yield)

    def _finish(self, session: pytest.Session) -> None:
        """Write nothing before the last verdict is known."""
        gpu = self._session
        self._hush()
        if self._leaves:
            atexit.register(_leave, session)
        failed = False
        with _stoppable(session):
            self._leftovers.end(session)
            failed = self._verdicts.end()
        if self._terminal is None or self._files is None:
            self._channel.send()
            return
        only_collects = session.config.option.collectonly
        complete = session.exitstatus in COMPLETE
        self._terminal.end_progress()
        self._expectations.write_selection()
        if not only_collects and not gpu.ranges.tool_attached():  # a profiler forbids verdicts
            gpu.missing.extend(self._undecided(self._expectations.discharged(complete=complete)))
        for name, why in gpu.broken.items():
            gpu.remark(f"{name} raised by mistake, and what it was to judge is UNDECIDED: {why}")
        if gpu.in_gate or len(gpu.rows):
            gpu.remark(*_git_warning(gpu))
        tests_failed = session.exitstatus == Exit.FAILED
        strict = gpu.settings.strict
        open_ = open_under_strict(gpu.missing)
        saved = self._terminal.save(complete=complete)
        written = only_collects or self._files.write()
        failed = failed or bool(strict and open_) or not saved or not written
        session.exitstatus = exit_code(session.exitstatus, failed=failed)
        has_no_verdict = bool(gpu.broken) and (strict or gpu.in_gate) and complete
        if has_no_verdict and not tests_failed:
            session.exitstatus = Exit.NO_VERDICT

    def _undecided(self, missing: Iterable[Omission]) -> Iterator[Omission]:
        """What was not judged. Where a feature raised by mistake, no test is to blame."""
        broken = ", ".join(self._session.broken)
        why = f"UNDECIDED: {broken} raised by mistake"
        for omission in missing:
            ran = self._session.rows.end(omission.nodeid) is not None
            if (
                broken
                and (ran or VerdictFeature.name in broken)
                and omission.status in (LOST, UNJUDGED)
            ):
                yield replace(omission, status=UNJUDGED, reason=why)
            else:
                yield omission

    @property
    def _leaves(self) -> bool:
        """True if the context was lost, and the process ends with the session."""
        gpu = self._session
        if gpu.lost_in is None or gpu.facts.simulated:
            return False
        program = Path(sys.argv[0])
        is_pytest = program.stem in ("pytest", "py.test") or (
            program.parts[-2:] == ("pytest", "__main__.py")
        )
        return gpu.is_part or is_pytest

    def _hush(self) -> None:
        """Have libraries print no traceback for each piece of lost memory, by Cython's two hooks."""
        if self._leaves:
            sys.excepthook = sys.unraisablehook = _print_nothing

    # The terminal

    @pytest.hookimpl(wrapper=True)
    def pytest_report_header(
        self, config: pytest.Config
    ) -> Generator[None, list[object], list[object]]:
        """The session's lines in place of pytest-benchmark's, whose defaults hold for no GPU."""
        lines = yield
        # pytest prints them from the last one on.
        shown: list[object] = []
        if self._terminal is not None:
            shown.append(self._terminal.header(config))
        for line in lines:
            if str(line).startswith("benchmark: ") and config.get_verbosity() <= 0:
                continue
            shown.append(line)
        return shown

    # Around pytest-benchmark's table, and pytest's short summary: what to do comes last.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, object, object]:
        profiled = self._session.ranges.tool_attached()
        try:
            with entries.without_table(self._session.config, always=profiled):
                return (yield)
        finally:  # also if pytest-benchmark's comparison ends in an error
            if self._terminal is not None and self._files is not None:
                self._terminal.summarise(terminalreporter)
                self._files.summarise(terminalreporter)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)

    # pytest-benchmark

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        if not len(self._session.rows):
            return  # no GPU took part in it, as while it is compared before the first test
        from pytest_gpumem.records.schema import device_to_json

        facts = device_to_json(self._session.facts)
        machine_info["gpu"] = {name: facts[name] for name in GPU_IDENTITY}

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: dict[str, Any]) -> None:
        names = entries.leave_out(compared_benchmark, self._session.facts.key)
        if names:
            self._other_gpu = str(compared_benchmark["gpu"].get("key", "an unnamed GPU"))
            self._left_out.update(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        from pytest_gpumem.records.schema import document
        from pytest_gpumem.reporting.exports import figures

        session = self._session
        by_name = {(row.range_name, row.label): row for row in session.rows}
        for entry in output_json.get("benchmarks", ()):  # a project may write its own JSON
            gpumem = entry.get("extra_info", {}).get("gpumem")
            if gpumem is None:
                continue
            # Since then the row may have been judged again.
            row = by_name.get((gpumem["range"], gpumem.get("label", "")))
            if row is not None:
                gpumem.update(figures(row, session.facts))
        output_json["gpumem"] = document(
            session.facts, list(session.rows), session.settings.to_json(), session.missing
        )


def _git_warning(session: GpuSession) -> Iterator[str]:
    """A warning if git knows no history of this project, where one is needed."""
    compares = session.in_gate or session.settings.baseline_of is not None
    if compares or session.settings.save:
        why = trouble(session.config.rootpath)
        if why is not None:
            yield f"warning: {why}"


def _print_nothing(*_: object) -> None:
    pass


def _leave(session: pytest.Session) -> None:
    """End the process before libraries print a traceback for each piece of lost memory."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))


@contextmanager
def _stoppable(session: pytest.Session) -> Iterator[None]:
    """Have an interrupt or an error end the session, whose results are written all the same."""
    config = session.config
    try:
        yield
    except (KeyboardInterrupt, pytest.exit.Exception) as error:
        information = pytest.ExceptionInfo.from_exception(error)
        config.hook.pytest_keyboard_interrupt(excinfo=information)
        session.exitstatus = getattr(error, "returncode", None) or pytest.ExitCode.INTERRUPTED
    except Exception as error:
        config.notify_exception(pytest.ExceptionInfo.from_exception(error), config.option)
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
