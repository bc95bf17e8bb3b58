"""The end of a session: terminal, files of `reporting`, exit code; and ranges for profilers."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest

from pytest_gpumem.files import unwritable
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.running import Feature, Wrapper
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.ranges import phase
from pytest_gpumem.reporting.terminal import columns, header, wrapped
from pytest_gpumem.revisions import trouble
from pytest_gpumem.units import comparison_text, counted

_FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class OutputFeature(Feature):
    """Names tests for profilers, and ends the session."""

    name = "outputs"

    def __init__(self, gpu: GpuSession, expectations: ExpectationFeature, workers: Workers) -> None:
        self._gpu, self._expectations, self._workers = gpu, expectations, workers
        if not gpu.is_part:  # a worker shows nothing, and writes no file
            _check_files(gpu)
        gpu.config.add_cleanup(self._silence_tracebacks)  # after pytest has put back its hook

    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> AbstractContextManager[None]:
        return self._gpu.ranges.test(self._gpu.names.unique(item.nodeid), item.nodeid)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "setup")

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "teardown")

    def _range(self, item: pytest.Item, name: str) -> AbstractContextManager[None]:
        return self._gpu.ranges.range(phase(self._gpu.names.unique(item.nodeid), name))

    # Runs outside of pytest-benchmark's hook, so before it writes files.
    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Wrapper:
        self._silence_tracebacks()
        if self._must_exit_at_once:
            atexit.register(_exit_at_once, session)
        if self._gpu.is_part:
            self._workers.send()
        else:
            self._finish(session)
        return (yield)

    def _finish(self, session: pytest.Session) -> None:
        gpu, expectations, failed = self._gpu, self._expectations, False
        if gpu.rows or gpu.further:
            from pytest_gpumem.plugin.rows import judge_waiting

            try:
                failed = judge_waiting(gpu)
            except Exception as error:
                info = pytest.ExceptionInfo.from_exception(error)
                gpu.config.notify_exception(info, gpu.config.option)
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        complete = session.exitstatus in (*_FINE, pytest.ExitCode.TESTS_FAILED)
        for name, why in gpu.broken.items():
            gpu.remark(f"{name} raised by mistake, and what it was to judge is UNDECIDED: {why}")
        if gpu.in_gate or gpu.settings.save:
            why_no_git = trouble(gpu.config.rootpath)
            if why_no_git is not None:
                gpu.remark(f"warning: {why_no_git}")
        is_red = failed or session.exitstatus == pytest.ExitCode.TESTS_FAILED
        report = _report_of(gpu)
        if gpu.rows or expectations.exist or gpu.settings.save or report is not None:
            from pytest_gpumem.plugin.results import finish

            failed = finish(gpu, expectations, report, complete=complete) or failed
        if failed:
            _fail(session)
        if gpu.broken and (gpu.settings.strict or gpu.in_gate) and complete and not is_red:
            session.exitstatus = Exit.NO_VERDICT
        benchmarks = getattr(session.config, "_benchmarksession", None)
        if benchmarks is not None:
            save = partial(_save_benchmarks, session, benchmarks.handle_saving, gpu)
            benchmarks.handle_saving = save

    @property
    def _must_exit_at_once(self) -> bool:
        """Objects of CuPy that outlive the context would crash the process."""
        gpu = self._gpu
        gone = gpu.lost_in is not None or gpu.destroyed
        if not gone or gpu.facts.simulated:
            return False
        program = Path(sys.argv[0])
        is_module = program.parts[-2:] == ("pytest", "__main__.py")
        return gpu.is_part or is_module or program.stem == "pytest"

    def _silence_tracebacks(self) -> None:
        """Have libraries print no traceback for each piece of lost memory, by Cython's hooks."""
        if self._must_exit_at_once:
            sys.excepthook = sys.unraisablehook = _print_nothing

    # The terminal

    def header(self, lines: Iterable[object]) -> Iterator[object]:
        """The session's lines in place of pytest-benchmark's, whose defaults hold for no GPU."""
        gpu = self._gpu
        if not gpu.is_part:
            why, plan = gpu.chosen.fallback_reason, gpu.settings.to_json()
            shown = self._workers.header()
            for text in header(gpu.facts, plan, _baseline(gpu), fallback_reason=why):
                shown += wrapped(text, columns(), indent="    ")
            yield shown  # pytest prints from the last one on
        for line in lines:
            is_benchmarks = str(line).startswith("benchmark: ")
            if not is_benchmarks or gpu.config.get_verbosity() > 0:
                yield line

    # Outside of pytest-benchmark's table and pytest's short summary: what to do comes last.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Wrapper:
        gpu = self._gpu
        profiled = gpu.ranges.tool_attached()
        try:
            with entries.without_table(gpu.config, always=profiled):
                return (yield)
        finally:  # also if pytest-benchmark's comparison ends in an error
            if not gpu.is_part and (gpu.rows or gpu.missing or gpu.remarks):
                from pytest_gpumem.plugin.results import summarise

                summarise(gpu, terminalreporter)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)


def _fail(session: pytest.Session) -> None:
    if session.exitstatus in _FINE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _save_benchmarks(session: pytest.Session, save: Callable[[], None], gpu: GpuSession) -> None:
    """In place of the method of pytest-benchmark: the summary and other files follow."""
    try:
        save()
        if gpu.rows or gpu.missing:
            entries.write_json(gpu.config)
    except OSError as error:
        gpu.remark(f"pytest-benchmark cannot save its results: {error}")
        _fail(session)


def _print_nothing(*_: object) -> None:
    pass


def _exit_at_once(session: pytest.Session) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))


def _check_files(gpu: GpuSession) -> None:
    """Raise `pytest.UsageError` if a file of the results cannot be written."""
    files = {gpu.settings.origins.get("report"): _report_of(gpu)}
    results = gpu.config.option.benchmark_json
    if isinstance(results, (str, os.PathLike)):  # before pytest-benchmark 5.3 an open file
        files["--benchmark-json"] = Path(gpu.config.invocation_params.dir, results)
    for flag, path in files.items():
        why = None if path is None else unwritable(path)
        if why is not None:
            raise pytest.UsageError(f"gpumem: {flag}: cannot write {path}: {why}")
    if gpu.settings.save and not gpu.config.option.collectonly:
        from pytest_gpumem.baselines.store import Store

        why = Store(gpu.place, gpu.facts).unwritable()
        if why is not None:
            raise pytest.UsageError(f"gpumem: {gpu.settings.origins['save']}: {why}")


def _report_of(gpu: GpuSession) -> Path | None:
    report = gpu.settings.report
    if report is None:
        return None
    return Path(gpu.config.invocation_params.dir, Path(report).expanduser())


def _baseline(gpu: GpuSession) -> str:
    folder, shown = gpu.config.invocation_params.dir, gpu.place
    if shown.is_relative_to(folder):
        shown = shown.relative_to(folder)
    if not gpu.has_past or gpu.baseline.note is not None:
        why = f"none in {shown}"
        if gpu.has_past:
            from pytest_gpumem.baselines.store import devices

            # Such as: its runs are of other devices.
            why = str(gpu.baseline.note) if devices(gpu.place) else why
        if not gpu.settings.save:
            why += "; --gpumem-save --gpumem-processes 3 makes one"
        return why
    baseline = gpu.baseline
    newest = max((runs[-1].file for runs in baseline.rows.values()), key=lambda run: run.utc)
    commit, dash, dirty = (newest.revision or "unknown").partition("-")
    line = f"{counted(baseline.processes, 'process')} in {shown}, the newest of {commit[:10]}"
    line += dash + dirty
    if baseline.left_out is not None:
        line += f"; {baseline.left_out}"
    return line
