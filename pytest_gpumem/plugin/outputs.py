"""What a session puts out: ranges for profilers, terminal, files, baseline, exit code."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.isolation import LeftoverFeature
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.results import Results
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.ranges import phase
from pytest_gpumem.records.row import LOST, UNJUDGED, Omission
from pytest_gpumem.revisions import trouble
from pytest_gpumem.units import comparison_text

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
_FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class OutputFeature(Feature):
    """Names tests for profilers, and ends the session."""

    name = "outputs"

    def __init__(
        self,
        session: GpuSession,
        expectations: ExpectationFeature,
        verdicts: VerdictFeature,
        leftovers: LeftoverFeature,
        workers: Workers,
    ) -> None:
        self._session = session
        self._expectations, self._verdicts = expectations, verdicts
        self._leftovers, self._workers = leftovers, workers
        # A worker shows nothing, and writes no file.
        self._results = None if session.is_part else Results(session)
        self._other_gpu = ""  # of a saved run that pytest-benchmark compares with
        self._left_out: set[str] = set()  # names of its entries
        session.config.add_cleanup(self._hush)  # after pytest has put back its hook

    # Around tests

    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> AbstractContextManager[None]:
        return self._session.ranges.test(self._session.names.unique(item.nodeid), item.nodeid)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "setup")

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "teardown")

    def _range(self, item: pytest.Item, name: str) -> AbstractContextManager[None]:
        return self._session.ranges.range(phase(self._session.names.unique(item.nodeid), name))

    def selected(self, session: pytest.Session) -> None:
        key = self._session.facts.key
        for item in session.items if self._other_gpu else ():
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
        self._hush()
        if self._leaves:
            atexit.register(_leave, session)
        failed = self._judge_the_end(session)
        if self._results is None:
            self._workers.send()
        else:
            self._finish(session, self._results, failed=failed)
        return (yield)

    def _judge_the_end(self, session: pytest.Session) -> bool:
        """Judge what waits for the end; return whether the session fails by it."""
        config = session.config
        try:
            self._leftovers.end(session)
            return self._verdicts.end()
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            information = pytest.ExceptionInfo.from_exception(error)
            config.hook.pytest_keyboard_interrupt(excinfo=information)
            session.exitstatus = getattr(error, "returncode", None) or pytest.ExitCode.INTERRUPTED
        except Exception as error:
            config.notify_exception(pytest.ExceptionInfo.from_exception(error), config.option)
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        return False

    def _finish(self, session: pytest.Session, results: Results, *, failed: bool) -> None:
        """Find what is missing, write all files, and set the exit code."""
        gpu = self._session
        complete = session.exitstatus in (*_FINE, pytest.ExitCode.TESTS_FAILED)
        self._expectations.write_selection()
        # A profiler forbids verdicts.
        if not session.config.option.collectonly and not gpu.ranges.tool_attached():
            missing = self._expectations.discharged(complete=complete)
            gpu.missing.extend(self._undecided(missing))
        for name, why in gpu.broken.items():
            gpu.remark(f"{name} raised by mistake, and what it was to judge is UNDECIDED: {why}")
        if gpu.in_gate or gpu.settings.save:
            why_no_git = trouble(gpu.config.rootpath)
            if why_no_git is not None:
                gpu.remark(f"warning: {why_no_git}")
        tests_failed = session.exitstatus == Exit.FAILED
        strict = gpu.settings.strict
        open_ = open_under_strict(gpu.missing)
        written = results.write(complete=complete)
        if failed or (strict and open_) or not written:
            _fail(session)
        if gpu.broken and (strict or gpu.in_gate) and complete and not tests_failed:
            session.exitstatus = Exit.NO_VERDICT
        benchmarks = getattr(session.config, "_benchmarksession", None)
        if benchmarks is not None:
            benchmarks.handle_saving = partial(_save, session, benchmarks.handle_saving, results)

    def _undecided(self, missing: Iterable[Omission]) -> Iterator[Omission]:
        """What was not judged. Where a feature raised by mistake, no test is to blame."""
        broken = ", ".join(self._session.broken)
        for omission in missing:
            test = self._session.rows.tests.get(omission.nodeid)
            ran = test is not None and test.end is not None
            by_feature = broken and (ran or VerdictFeature.name in broken)
            if by_feature and omission.status in (LOST, UNJUDGED):
                why = f"UNDECIDED: {broken} raised by mistake"
                yield replace(omission, status=UNJUDGED, reason=why)
            else:
                yield omission

    @property
    def _leaves(self) -> bool:
        """True if the process ends at once: objects of CuPy that outlive the context crash it."""
        gpu = self._session
        gone = gpu.lost_in is not None or gpu.destroyed
        if not gone or gpu.facts.simulated:
            return False
        program = Path(sys.argv[0])
        is_module = program.parts[-2:] == ("pytest", "__main__.py")
        return gpu.is_part or is_module or program.stem in ("pytest", "py.test")

    def _hush(self) -> None:
        """Have libraries print no traceback for each piece of lost memory, by Cython's hooks."""
        if self._leaves:
            sys.excepthook = sys.unraisablehook = _print_nothing

    # The terminal

    def header(self, lines: Iterable[object]) -> Iterator[object]:
        """The session's lines in place of pytest-benchmark's, whose defaults hold for no GPU."""
        # pytest prints them from the last one on.
        if self._results is not None:
            yield [*self._workers.header(), *self._results.header()]
        for line in lines:
            is_benchmarks = str(line).startswith("benchmark: ")
            if not is_benchmarks or self._session.config.get_verbosity() > 0:
                yield line

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
            if self._results is not None:
                self._results.summarise(terminalreporter)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)

    # pytest-benchmark

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: dict[str, Any]) -> None:
        names = entries.leave_out(compared_benchmark, self._session.facts.key)
        if names:
            self._other_gpu = str(compared_benchmark["gpu"].get("key", "an unnamed GPU"))
            self._left_out.update(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        from pytest_gpumem.records.schema import device_to_json, document
        from pytest_gpumem.reporting.exports import figures

        session = self._session
        if len(session.rows) and "machine_info" in output_json:
            facts = device_to_json(session.facts)
            output_json["machine_info"]["gpu"] = {name: facts[name] for name in GPU_IDENTITY}
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


def _fail(session: pytest.Session) -> None:
    """Have the session end as with failed tests, unless it ends with another error."""
    if session.exitstatus in _FINE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _save(session: pytest.Session, save: Callable[[], None], results: Results) -> None:
    """In place of the method of pytest-benchmark: the summary and other files follow."""
    try:
        save()
    except OSError as error:
        results.cannot_save(error)
        _fail(session)


def _print_nothing(*_: object) -> None:
    pass


def _leave(session: pytest.Session) -> None:
    """End the process before libraries print a traceback for each piece of lost memory."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))
