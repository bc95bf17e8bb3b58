"""The output of a session on the terminal, and its baseline; not in workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pytest_gpumem.baselines.history import Baseline, SavedProcess
from pytest_gpumem.baselines.storage import BaselineError, RemoteStorage
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.plugin import entries, saving
from pytest_gpumem.plugin.adoption import rows_of_table
from pytest_gpumem.plugin.conclusion import conclusion_of
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.reported import exit_code
from pytest_gpumem.plugin.running import RUNNING_PLUGIN, Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import Controller
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.progress import Progress
from pytest_gpumem.reporting.terminal import baseline_line, columns, header, missing_lines
from pytest_gpumem.settings import ANNOUNCE, loosened, switched_off
from pytest_gpumem.units import format_time

EVERY = 60.0  # seconds between two lines where the output is no terminal

# Index goes down one line, scrolls at the last one, and keeps the column: so there is a line below, and the cursor is where pytest left it.
_ROOM = "\x1bD\x1b[A"
_SAVE, _BELOW, _RESTORE = "\x1b7", "\x1b[B\r\x1b[2K", "\x1b8"


class TerminalFeature(Feature):
    """Header, announcements, table, JSON and baseline."""

    def __init__(self, session: GpuSession, workers: Controller) -> None:
        self._session = session
        self._workers = workers
        self._notes: list[str] = []
        self._progress: ProgressFeature | None = None

    def started(self, session: pytest.Session) -> None:
        if (benchmarks := getattr(session.config, "_benchmarksession", None)) is not None:
            benchmarks.handle_saving = partial(self._guarded, session, benchmarks.handle_saving)
        reporter = session.config.pluginmanager.getplugin(
            "terminalreporter"
        )  # not there yet while options are read; None with -p no:
        # A named history means that the run is to be compared with it: printed even if -q leaves out the header.
        if (
            reporter is not None
            and self._session.settings.baseline_of is not None
            and (note := self._session.baseline.note) is not None
        ):
            reporter.write_line(f"gpumem: nothing to compare with: {note}")
        if (
            reporter is not None
            and reporter.verbosity >= 0
            and not session.config.option.collectonly
        ):
            self._progress = ProgressFeature(self._session, reporter)
            session.config.pluginmanager.register(self._progress)
            session.config.pluginmanager.getplugin(RUNNING_PLUGIN).join(self._progress)

    def header(self, config: pytest.Config) -> list[str]:
        """What is measured, and compared with which baseline."""
        session = self._session
        lines = header(
            session.facts,
            session.settings.to_json(),
            self._baseline(),
            fallback_reason=session.chosen.fallback_reason,
            conditions=session.chosen.conditions(),
        )
        shown = list(self._workers.header(config))
        for line in lines:
            shown += wrapped(line, columns(), indent="    ")
        return shown

    def _baseline(self) -> str:
        baseline = self._session.baseline
        place, here = self._session.store.storage, self._session.config.invocation_params.dir
        shown = str(place)
        if not isinstance(place, RemoteStorage) and place.folder.is_relative_to(here):
            shown = str(place.folder.relative_to(here))
        if baseline.note is not None:
            # Baselines of other devices, and processes that do not count, are a reason that a person must see.
            return (
                f"{baseline.note}; --gpumem-save makes one"
                if place.devices()
                else baseline_line(0, shown)
            )
        line = baseline_line(baseline.processes, shown)
        revision = _newest_revision(baseline)
        if revision is not None:
            line += f", the newest of {revision}"
        return line if baseline.left_out is None else f"{line}; {baseline.left_out}"

    def pytest_report_collectionfinish(self, config: pytest.Config) -> list[str]:
        ledger = self._session.ledger
        if ledger is None or not ledger.tests:
            return []
        how = (
            f"by cost in the baseline ({ledger.known} of them known)"
            if ledger.known
            else "equally, the baseline knows no cost"
        )
        line = (
            f"gpumem: budget of {format_time(ledger.total)}{self._of_process} shared out over {counted(ledger.tests, 'test')} {how}, "
            f"at most {format_time(ledger.most())} a measurement to begin with; what one leaves goes to the others"
        )
        return wrapped(line, columns(), indent="    ")

    @property
    def _of_process(self) -> str:
        """For whom a budget is: each process of a run has a part of the total one."""
        processes = self._session.settings.processes
        return f" for each of {processes} processes" if processes > 1 else ""

    def _budget(self) -> str | None:
        """The use of a total budget; workers keep their own accounts."""
        ledger = self._session.ledger
        if ledger is None or not ledger.spent:
            return None
        clock = ", of simulated time" if self._session.facts.simulated else ""
        of = "" if not self._of_process else " by this process"
        spent = f"budget: {format_time(ledger.spent)} of {format_time(ledger.total)} spent on measuring{of}{clock}"
        if ledger.spent <= ledger.total:
            return spent
        return f"{spent}: a measurement ends the samples it has begun, and takes its least ones and its checks however short its share"

    def expect(self, nodeids: Iterable[str]) -> None:
        """Show the progress of tests that other processes collect."""
        if self._progress is not None:
            self._progress.expect(nodeids)

    def end_progress(self) -> None:
        """Show no line of progress any longer."""
        if self._progress is not None:
            self._progress.end()

    def save(self, *, complete: bool) -> bool:
        """Save what is to be saved, and note it for the summary; False if something cannot be saved.
        `complete`: the session ran all that it was asked for.
        """
        gpu, saved = self._session, True
        self._notes += [*missing_lines(gpu.missing), *gpu.remarks]
        if len(gpu.rows) or gpu.missing:
            path, saved = self._tried(partial(entries.write_json, gpu.config))
            if path is not None:
                self._notes.append(
                    f"wrote {path} (pytest-benchmark's own statistics are off or empty)"
                )
        if gpu.settings.save:
            try:
                for line in saving.save(gpu, complete=complete):
                    self._notes.append(f"--gpumem-save: {line}")
            except BaselineError as error:
                self._notes.append(f"--gpumem-save: {error}")
                saved = False
        return saved

    def _tried(self, save: Callable[[], Path | None]) -> tuple[Path | None, bool]:
        """Save the results of pytest-benchmark; False if it cannot, as with a full disk. The summary and other files follow."""
        try:
            return save(), True
        except OSError as error:
            self._notes.append(
                f"pytest-benchmark cannot save its results: {error.strerror or error}"
            )
            return None, False

    def _guarded(self, session: pytest.Session, save: Callable[[], None]) -> None:
        """In place of the method of pytest-benchmark."""
        _, saved = self._tried(save)
        session.exitstatus = exit_code(session.exitstatus, failed=not saved)

    def _results(self, rows: Sequence[Row], writer: pytest.TerminalReporter) -> list[str]:
        """The table; with -v all rows and their notes."""
        from pytest_gpumem.reporting.table import table

        session = self._session
        drawn = table(
            rows,
            session.facts,
            width=columns(),
            colour=writer._tw.hasmarkup,
            every=writer.verbosity > 0,
            saved=session.settings.save or session.in_gate,
            memory=session.settings.footprint in ("on", "trace"),
        )
        return [*drawn.splitlines(), *self._loosened(rows)]

    def _loosened(self, rows: Iterable[Row]) -> Iterator[str]:
        """Lines that name the tests whose own limits are looser than this run's options."""
        tests: dict[str, list[Row]] = {}
        for row in rows:
            if row.measurement is not None:
                for sentence in loosened(row.limits, self._session.settings):
                    tests.setdefault(sentence, []).append(row)
        for sentence, those in tests.items():
            more = f" and {len(those) - 1} more" if len(those) > 1 else ""
            line = f"LOOSENED: {sentence}: {those[0].key}{more}"
            yield from wrapped(printable(line), columns())

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        """Print the results, and the conclusion of a session that fails."""
        from pytest_gpumem.reporting.conclusion import conclusion_lines
        from pytest_gpumem.reporting.terminal import profiled_lines

        session = self._session
        rows = rows_of_table(session)
        if not rows and not self._notes:
            return
        profiled = session.ranges.tool_attached()
        simulated = " (simulated)" if session.facts.simulated else ""
        writer.ensure_newline()  # so that the section's heading has no blank line below
        writer.section(f"gpumem: {printable(session.facts.name)}{simulated}")
        lines: list[str] = []
        if profiled:
            lines += profiled_lines(rows)
        elif rows:
            lines += self._results(rows, writer)
        budget = self._budget()
        if budget is not None:
            lines.append(budget)
        lines += self._notes  # not wrapped: some end with a command to copy
        conclusion = conclusion_of(session)
        # A gate has a conclusion of its own.
        if conclusion is not None and not profiled and ANNOUNCE not in switched_off(os.environ):
            lines += conclusion_lines(conclusion, columns())
        for line in lines:  # pytest escapes all of a text that the output cannot encode
            writer.write_line(printable(line) if "\x1b" not in line else line)


def _newest_revision(baseline: Baseline) -> str | None:
    """The revision of the newest run, shortened; None if it is not known."""
    newest: SavedProcess | None = None
    for runs in baseline.rows.values():
        process = runs[-1].process
        if newest is None or process.utc > newest.utc:
            newest = process
    if newest is None or newest.revision is None:
        return None
    commit, dash, dirty = newest.revision.partition("-")
    return f"{commit[:10]}{dash}{dirty}"


class ProgressFeature(Feature):
    """Shows the progress in the process that owns the terminal; not registered under -q."""

    def __init__(self, session: GpuSession, reporter: pytest.TerminalReporter) -> None:
        self._session, self._reporter = session, reporter
        self._progress = Progress(time.monotonic)
        self._live = on_a_terminal(session.config, reporter)
        self._drawn = False
        self._last = time.monotonic()

    def selected(self, session: pytest.Session) -> None:
        self._progress.expect(
            item.nodeid for item in session.items if uses(item, BENCHMARK_FIXTURE)
        )

    def expect(self, nodeids: Iterable[str]) -> None:
        """Take the tests that are to run, of which ids do not say which measure."""
        self._progress.expect(nodeids)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, object, object]:
        self._clear()
        shown = yield
        self._progress.begin(nodeid)
        self._draw()
        return shown

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        self._clear()
        yield
        if report.when == "teardown":
            measured = (row.measurement for row in self._session.rows.of(report.nodeid))
            self._progress.end(
                report.nodeid, sum(len(one.samples) for one in measured if one is not None)
            )
        self._draw()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logfinish(self) -> Generator[None, object, object]:
        self._clear()
        shown = yield
        self._draw()
        return shown

    def end(self) -> None:
        """Show nothing any longer."""
        self._clear()
        self._live = False  # whatever is reported later is of no test that runs
        self._progress.expect(())

    def interrupted(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._clear()

    def broke(self) -> None:
        self._clear()

    def _draw(self) -> None:
        if not self._progress:
            return
        if self._live:
            # One column stays free: a line that is full wraps on some terminals.
            line = self._progress.line(columns() - 1)
            self._write(f"{_ROOM}{_SAVE}{_BELOW}{line}{_RESTORE}")
            self._drawn = True
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._reporter.ensure_newline()
            self._reporter.write_line(self._progress.line(columns()))

    def _clear(self) -> None:
        if self._drawn:
            self._write(f"{_SAVE}{_BELOW}{_RESTORE}")
            self._drawn = False

    def _write(self, text: str) -> None:
        # Past pytest's writer, which counts the columns of its own line.
        file = self._reporter._tw._file
        file.write(text)
        file.flush()


def on_a_terminal(config: pytest.Config, reporter: pytest.TerminalReporter) -> bool:
    """True if a line below pytest's own can be kept: only pytest writes to the terminal while tests run."""
    # Each of these plugins of pytest may be switched off.
    logs = config.pluginmanager.hasplugin("logging") and (
        config.getini("log_cli") or config.getoption("log_cli_level") is not None
    )
    shared = logs or config.getoption("capture", "no") == "no" or config.getoption("usepdb", False)
    return (
        reporter._tw._file.isatty()
        and os.environ.get("TERM") not in (None, "", "dumb")
        and not shared
    )
