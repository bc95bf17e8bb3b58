"""What a session puts out: ranges for profilers, terminal, files, baseline, exit code."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import pytest

from pytest_gpumem.baselines.acceptances import absolute_limits, changes_of, command
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.store import devices, untrusted
from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.options import BY_NAME
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import rows_of_table
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import phase
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.conclusion import (
    Conclusion,
    Run,
    advice,
    conclusion_lines,
    failing_text,
)
from pytest_gpumem.reporting.row import worst_first
from pytest_gpumem.reporting.terminal import columns, header, missing_lines, profiled_lines
from pytest_gpumem.revisions import DIRTY, trouble
from pytest_gpumem.units import comparison_text, format_time

_FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class OutputFeature(Feature):
    """Names tests for profilers, and ends the session."""

    name = "outputs"

    def __init__(
        self,
        gpu: GpuSession,
        expectations: ExpectationFeature,
        verdicts: VerdictFeature,
        workers: Workers,
    ) -> None:
        self._gpu = gpu
        self._expectations, self._verdicts, self._workers = expectations, verdicts, workers
        if not gpu.is_part:  # a worker shows nothing, and writes no file
            _check_files(gpu)
        gpu.config.add_cleanup(self._silence_tracebacks)  # after pytest has put back its hook

    # Around tests

    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> AbstractContextManager[None]:
        return self._gpu.ranges.test(self._gpu.names.unique(item.nodeid), item.nodeid)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "setup")

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._range(item, "teardown")

    def _range(self, item: pytest.Item, name: str) -> AbstractContextManager[None]:
        return self._gpu.ranges.range(phase(self._gpu.names.unique(item.nodeid), name))

    # The end

    # Runs outside of pytest-benchmark's hook, so before it writes files.
    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        self._silence_tracebacks()
        if self._must_exit_at_once:
            atexit.register(_exit_at_once, session)
        failed = self._judge_the_end(session)
        if self._gpu.is_part:
            self._workers.send()
        else:
            self._finish(session, failed=failed)
        return (yield)

    def _judge_the_end(self, session: pytest.Session) -> bool:
        """Judge what waits for the end; return whether the session fails by it."""
        config = session.config
        try:
            return self._verdicts.end()
        except Exception as error:
            config.notify_exception(pytest.ExceptionInfo.from_exception(error), config.option)
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        return False

    def _finish(self, session: pytest.Session, *, failed: bool) -> None:
        """Find what is missing, write all files, and set the exit code."""
        gpu = self._gpu
        complete = session.exitstatus in (*_FINE, pytest.ExitCode.TESTS_FAILED)
        self._expectations.write_selection()
        # A profiler forbids verdicts.
        if not session.config.option.collectonly and not gpu.ranges.tool_attached():
            gpu.missing.extend(self._expectations.discharged(complete=complete))
        for name, why in gpu.broken.items():
            gpu.remark(f"{name} raised by mistake, and what it was to judge is UNDECIDED: {why}")
        if gpu.in_gate or gpu.settings.save:
            why_no_git = trouble(gpu.config.rootpath)
            if why_no_git is not None:
                gpu.remark(f"warning: {why_no_git}")
        tests_failed = session.exitstatus == pytest.ExitCode.TESTS_FAILED
        strict = gpu.settings.strict
        if not _write(gpu, complete=complete):
            failed = True
        if strict:
            open_ = open_under_strict(gpu.missing)
            failed = failed or bool(open_)
        if failed:
            _fail(session)
        if gpu.broken and (strict or gpu.in_gate) and complete and not tests_failed:
            session.exitstatus = Exit.NO_VERDICT
        benchmarks = getattr(session.config, "_benchmarksession", None)
        if benchmarks is not None:
            save = partial(_save_benchmarks, session, benchmarks.handle_saving, gpu)
            benchmarks.handle_saving = save

    @property
    def _must_exit_at_once(self) -> bool:
        """True if the process ends at once: objects of CuPy that outlive the context crash it."""
        gpu = self._gpu
        gone = gpu.lost_in is not None or gpu.destroyed
        if not gone or gpu.facts.simulated:
            return False
        program = Path(sys.argv[0])
        is_module = program.parts[-2:] == ("pytest", "__main__.py")
        return gpu.is_part or is_module or program.stem in ("pytest", "py.test")

    def _silence_tracebacks(self) -> None:
        """Have libraries print no traceback for each piece of lost memory, by Cython's hooks."""
        if self._must_exit_at_once:
            sys.excepthook = sys.unraisablehook = _print_nothing

    # The terminal

    def header(self, lines: Iterable[object]) -> Iterator[object]:
        """The session's lines in place of pytest-benchmark's, whose defaults hold for no GPU."""
        # pytest prints them from the last one on.
        if not self._gpu.is_part:
            yield [*self._workers.header(), *_header_lines(self._gpu)]
        for line in lines:
            is_benchmarks = str(line).startswith("benchmark: ")
            if not is_benchmarks or self._gpu.config.get_verbosity() > 0:
                yield line

    # Outside of pytest-benchmark's table and pytest's short summary: what to do comes last.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, object, object]:
        profiled = self._gpu.ranges.tool_attached()
        try:
            with entries.without_table(self._gpu.config, always=profiled):
                return (yield)
        finally:  # also if pytest-benchmark's comparison ends in an error
            if not self._gpu.is_part:
                _summarise(self._gpu, terminalreporter)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)


def _fail(session: pytest.Session) -> None:
    """Have the session end as with failed tests, unless it ends with another error."""
    if session.exitstatus in _FINE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _save_benchmarks(session: pytest.Session, save: Callable[[], None], gpu: GpuSession) -> None:
    """In place of the method of pytest-benchmark: the summary and other files follow."""
    try:
        save()
    except OSError as error:
        _cannot_save(gpu, error)
        _fail(session)


def _print_nothing(*_: object) -> None:
    pass


def _exit_at_once(session: pytest.Session) -> None:
    """End the process before libraries print a traceback for each piece of lost memory."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))


# The results


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


def _report_of(gpu: GpuSession) -> Path | None:
    report = gpu.settings.report
    if report is None:
        return None
    return Path(gpu.config.invocation_params.dir, Path(report).expanduser())


def _header_lines(gpu: GpuSession) -> list[str]:
    why, plan = gpu.chosen.fallback_reason, gpu.settings.to_json()
    shown = []
    for line in header(gpu.facts, plan, _baseline(gpu), fallback_reason=why):
        shown += wrapped(line, columns(), indent="    ")
    return shown


def _baseline(gpu: GpuSession) -> str:
    baseline, folder = gpu.baseline, gpu.config.invocation_params.dir
    place = shown = gpu.store.place
    if place.is_relative_to(folder):
        shown = place.relative_to(folder)
    if baseline.note is not None:
        # Baselines of other devices, and processes that do not count, are a reason.
        why = baseline.note if devices(place) else f"none in {shown}"
        if not gpu.settings.save:
            why += "; --gpumem-save --gpumem-processes 3 makes one"
        return why
    line = f"{counted(baseline.processes, 'process')} in {shown}"
    revision = _newest_revision(baseline)
    if revision is not None:
        line += f", the newest of {revision}"
    if baseline.left_out is not None:
        line += f"; {baseline.left_out}"
    return line


def _write(gpu: GpuSession, *, complete: bool) -> bool:
    """Save and write all files; False if that fails. `complete`: all its tests ran."""
    anything = bool(len(gpu.rows) or gpu.missing)
    written = True
    if anything:
        try:
            entries.write_json(gpu.config)
        except OSError as error:
            _cannot_save(gpu, error)
            written = False
    if gpu.settings.save:
        try:
            for line in _save(gpu, complete=complete):
                gpu.remark(f"--gpumem-save: {line}")
        except UserError as error:
            gpu.remark(f"--gpumem-save: {error}")
            written = False
    if gpu.config.option.collectonly:
        return written
    report = _report_of(gpu)
    if report is not None and not _write_report(gpu, report):
        written = False
    if os.environ.get("GITHUB_STEP_SUMMARY") and anything and _announces(gpu):
        from pytest_gpumem.reporting import github, markdown

        failed = github.summarise(markdown.page(_run(gpu)), os.environ)
        if failed is not None:
            gpu.remark(failed)
    return written


def _cannot_save(gpu: GpuSession, error: OSError) -> None:
    why = error.strerror or error
    gpu.remark(f"pytest-benchmark cannot save its results: {why}")


def _write_report(gpu: GpuSession, path: Path) -> bool:
    if not len(gpu.rows):
        gpu.remark(f"nothing was measured: {path} is not written")
        return True
    from pytest_gpumem.reporting import html

    try:
        write_whole(path, html.page(_run(gpu)))
    except OSError as error:
        gpu.remark(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
        return False
    if gpu.announces:  # a gate names its files
        gpu.remark(f"--gpumem-report: wrote {path}")
    return True


def _announces(gpu: GpuSession) -> bool:
    """True if verdicts are shown elsewhere: not under a profiler, nor in a gate's screen."""
    return gpu.announces and not gpu.ranges.tool_attached()


def _run(gpu: GpuSession) -> Run:
    return Run(
        rows=list(gpu.rows),
        facts=gpu.facts,
        settings=gpu.settings.to_json(),
        utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        revision=entries.revision(gpu.config),
        past={row.key: gpu.baseline.past(row) for row in gpu.rows},
        remarks=missing_lines(gpu.missing),
        conclusion=_conclusion(gpu),
    )


def _summarise(gpu: GpuSession, writer: pytest.TerminalReporter) -> None:
    """Print the results, the conclusion of a session that fails, and annotations."""
    rows = rows_of_table(gpu)
    lines: list[str] = []
    if rows and gpu.ranges.tool_attached():
        lines += profiled_lines(rows)
    elif rows:
        from pytest_gpumem.reporting.table import table

        drawn = table(
            rows,
            gpu.facts,
            width=columns(),
            colour=writer._tw.hasmarkup,
            every=writer.verbosity > 0,
            saved=gpu.settings.save or gpu.in_gate,
            memory=gpu.settings.footprint == "on",
        )
        lines += drawn.splitlines()
    ledger = gpu.ledger
    if ledger is not None and ledger.spent:  # workers keep accounts
        spent, total = format_time(ledger.spent), format_time(ledger.total)
        lines.append(f"budget: {spent} of {total} spent on measuring")
    # Not wrapped: some end with a command to copy.
    lines += [*missing_lines(gpu.missing), *gpu.remarks]
    conclusion = _conclusion(gpu) if _announces(gpu) else None
    if conclusion is not None:
        lines += conclusion_lines(conclusion, columns())
    if lines:
        simulated = " (simulated)" if gpu.facts.simulated else ""
        writer.ensure_newline()  # so that the section's heading has no blank line below
        writer.section(f"gpumem: {printable(gpu.facts.name)}{simulated}")
    for line in lines:  # pytest escapes all of a text that the output cannot encode
        writer.write_line(printable(line) if "\x1b" not in line else line)
    if os.environ.get("GITHUB_ACTIONS") == "true" and _announces(gpu):
        from pytest_gpumem.reporting import github

        places = github.places_of(gpu.config.rootpath, gpu.rows.places)
        writer.ensure_newline()
        for line in github.workflow_commands(gpu.rows, places):
            writer.write_line(line)


def _newest_revision(baseline: Baseline) -> str | None:
    newest = max(
        (runs[-1].process for runs in baseline.rows.values()),
        key=lambda process: process.utc,
        default=None,
    )
    if newest is None or newest.revision is None:
        return None
    commit, dash, dirty = newest.revision.partition("-")
    return f"{commit[:10]}{dash}{dirty}"


def _conclusion(gpu: GpuSession) -> Conclusion | None:
    """The conclusion of a session that fails by its verdicts; None of any other."""
    strict = gpu.settings.strict
    failing = []
    for row in gpu.rows:
        if row.measured_something and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, rows_of_table(gpu)))
    unjudged = open_under_strict(gpu.missing) if strict else []
    if unjudged:
        causes.append(f"{len(unjudged)} not judged (--gpumem-strict)")
    if not causes:
        return None
    steps: list[tuple[str, str]] = []
    failing = worst_first(failing)
    if failing:
        accept, limits = list[str](), list[str]()
        for row in failing:
            limits += absolute_limits(row)
            if any(changes_of(row)) and not accept:
                accept.append(command(row))
        steps = advice(_again(failing[0], gpu), accept, limits=limits)
    code = Exit.NO_VERDICT if gpu.broken and not failing else Exit.FAILED
    return Conclusion(code, causes, failing, gpu.missing, advice=steps)


def _again(row: Row, gpu: GpuSession) -> list[str]:
    config = gpu.config
    words = ["pytest"]
    for word in config.invocation_params.args:
        if word not in (*config.option.file_or_dir, BY_NAME["save"].flag):
            words.append(str(word))
    return [*words, row.nodeid]


def _save(gpu: GpuSession, *, complete: bool) -> Iterator[str]:
    """Save the rows of a session; yield lines about it. Raises `UserError`."""
    if not complete:
        yield "the session was interrupted, nothing is stored"
        return
    # Of tests that failed before they measured anything, pytest reports the failure.
    rows = [row for row in gpu.rows if row.measured_something]
    if not rows:
        yield "nothing was measured, nothing is stored"
        return
    fork = untrusted(os.environ)
    if fork is not None:
        yield f"nothing is stored of code that is not ours: {fork}"
        return
    revision = entries.revision(gpu.config)
    saved = gpu.store.save(rows, revision, gpu.settings.mode, gpu.baseline)
    if saved.path is not None:
        line = f"{saved.accepted} of {counted(len(rows), 'row')}"
        line += f" stored in {gpu.store.place}"
        if str(revision).endswith(DIRTY):
            line += " with uncommitted changes: no gate uses it"
        yield line
    elif saved.refused:
        yield "no row is stored"
    else:
        full = counted(saved.full, "row")
        yield f"nothing is stored: the reference of {full} is full, and nothing became faster"
    for row, why in saved.refused:
        yield f"refused {row.key}: {why}"
