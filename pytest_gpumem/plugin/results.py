"""The results of a session: on the terminal, in files and in the baseline; not in workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.store import BaselineError, devices
from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import rows_of_table
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.terminal import columns, header, missing_lines
from pytest_gpumem.settings import ANNOUNCE, switched_off
from pytest_gpumem.units import format_time

if TYPE_CHECKING:
    from pytest_gpumem.reporting.conclusion import Run

SUMMARY = "GITHUB_STEP_SUMMARY"  # as `reporting.github.VARIABLE`


class Results:
    """Shows and writes the results.
    Raises `pytest.UsageError`: a file cannot be written; raised before anything is measured.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._notes: list[str] = []
        self._locations: dict[str, tuple[str, int]] = {}
        """By node id of each reported test: its file, relative to the root folder, and line."""
        self._report: Path | None = None
        if session.settings.report is not None:
            report = Path(session.settings.report).expanduser()
            self._report = self._writable(session.settings.origins["report"], report)
        results = session.config.option.benchmark_json
        if isinstance(results, (str, os.PathLike)):  # before pytest-benchmark 5.3 an open file
            self._writable("--benchmark-json", Path(results))

    def _writable(self, flag: str, written: Path) -> Path:
        """A file relative to where pytest was called. Raises `pytest.UsageError`: unwritable."""
        path = Path(self._session.config.invocation_params.dir, written)
        why = unwritable(path)
        if why is not None:
            raise pytest.UsageError(f"gpumem: {flag}: cannot write {path}: {why}")
        return path

    def reported(self, report: pytest.TestReport) -> None:
        """Remember where a test is defined."""
        file, line, _ = report.location
        self._locations[report.nodeid] = file, (line or 0) + 1

    def note(self, line: str) -> None:
        """Add a line to the summary, below the rows."""
        self._notes.append(line)

    # The header

    def header(self) -> list[str]:
        """What is measured, and compared with which baseline."""
        session = self._session
        lines = header(
            session.facts,
            session.settings.to_json(),
            self._baseline(),
            fallback_reason=session.chosen.fallback_reason,
        )
        shown = []
        for line in lines:
            shown += wrapped(line, columns(), indent="    ")
        return shown

    def _baseline(self) -> str:
        baseline, folder = self._session.baseline, self._session.config.invocation_params.dir
        store = self._session.store
        shown = store.place
        if shown.is_relative_to(folder):
            shown = shown.relative_to(folder)
        if baseline.note is not None:
            # Baselines of other devices, and processes that do not count, are a reason.
            why = baseline.note if devices(store.place) else f"none in {shown}"
            saves = self._session.settings.save
            return why if saves else f"{why}; --gpumem-save makes a baseline"
        line = f"{counted(baseline.processes, 'process')} in {shown}"
        revision = _newest_revision(baseline)
        if revision is not None:
            line += f", the newest of {revision}"
        if baseline.left_out is not None:
            line += f"; {baseline.left_out}"
        return line

    # The end

    def write(self, *, complete: bool) -> bool:
        """Save what is to be saved, write the files, and note it for the summary; False if
        something cannot be written. `complete`: the session ran all that it was asked for.
        """
        gpu = self._session
        self._notes += [*missing_lines(gpu.missing), *gpu.remarks]
        written = True
        if len(gpu.rows) or gpu.missing:
            try:
                path = entries.write_json(gpu.config)
            except OSError as error:
                self.cannot_save(error)
                written = False
            else:
                if path is not None:
                    self.note(f"wrote {path} (pytest-benchmark's own statistics are off or empty)")
        if gpu.settings.save:
            from pytest_gpumem.plugin.conclusion import save

            try:
                for line in save(gpu, complete=complete):
                    self.note(f"--gpumem-save: {line}")
            except BaselineError as error:
                self.note(f"--gpumem-save: {error}")
                written = False
        if gpu.config.option.collectonly:
            return written
        if self._report is not None:
            written = self._write_report(self._report) and written
        if os.environ.get(SUMMARY) and (len(gpu.rows) or gpu.missing) and self._announces:
            from pytest_gpumem.reporting import github, markdown

            failed = github.summarise(markdown.page(self._run()), os.environ)
            if failed is not None:
                self.note(failed)
        return written

    def cannot_save(self, error: OSError) -> None:
        """Note that pytest-benchmark's results cannot be saved, as with a full disk."""
        self.note(f"pytest-benchmark cannot save its results: {error.strerror or error}")

    def _write_report(self, path: Path) -> bool:
        if not len(self._session.rows):
            self.note(f"--gpumem-report: nothing was measured, so {path} is not written")
            return True
        from pytest_gpumem.reporting import html

        try:
            write_whole(path, html.page(self._run()))
        except OSError as error:
            self.note(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
            return False
        if ANNOUNCE not in switched_off(os.environ):  # a gate names its files
            self.note(f"--gpumem-report: wrote {path}")
        return True

    @property
    def _announces(self) -> bool:
        """True if verdicts are shown elsewhere: not under a profiler, which forbids them, and not
        in a gate's screen, where they are not final.
        """
        return ANNOUNCE not in switched_off(os.environ) and not self._session.ranges.tool_attached()

    def _run(self) -> Run:
        from pytest_gpumem.plugin.conclusion import conclusion_of
        from pytest_gpumem.reporting.conclusion import Run

        gpu = self._session
        return Run(
            rows=list(gpu.rows),
            facts=gpu.facts,
            settings=gpu.settings.to_json(),
            utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            revision=entries.revision(gpu.config),
            past={row.key: gpu.baseline.past(row) for row in gpu.rows},
            remarks=missing_lines(gpu.missing),
            conclusion=conclusion_of(gpu),
        )

    # The summary

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        """Print the results, the conclusion of a session that fails, and annotations."""
        session = self._session
        rows = rows_of_table(session)
        lines: list[str] = []
        if rows and session.ranges.tool_attached():
            from pytest_gpumem.reporting.terminal import profiled_lines

            lines += profiled_lines(rows)
        elif rows:
            lines += self._table(rows, writer)
        ledger = session.ledger
        if ledger is not None and ledger.spent:  # workers keep accounts
            spent, total = format_time(ledger.spent), format_time(ledger.total)
            lines.append(f"budget: {spent} of {total} spent on measuring")
        lines += self._notes  # not wrapped: some end with a command to copy
        if self._announces and (len(session.rows) or session.missing):
            from pytest_gpumem.plugin.conclusion import conclusion_of
            from pytest_gpumem.reporting.conclusion import conclusion_lines

            conclusion = conclusion_of(session)
            if conclusion is not None:
                lines += conclusion_lines(conclusion, columns())
        if lines:
            simulated = " (simulated)" if session.facts.simulated else ""
            writer.ensure_newline()  # so that the section's heading has no blank line below
            writer.section(f"gpumem: {printable(session.facts.name)}{simulated}")
        for line in lines:  # pytest escapes all of a text that the output cannot encode
            writer.write_line(printable(line) if "\x1b" not in line else line)
        if os.environ.get("GITHUB_ACTIONS") == "true" and self._announces:
            from pytest_gpumem.reporting import github

            places = {}
            for nodeid, (file, number) in self._locations.items():
                places[nodeid] = github.place_of(session.config.rootpath, file, number)
            writer.ensure_newline()
            for line in github.workflow_commands(session.rows, places):
                writer.write_line(line)

    def _table(self, rows: Sequence[Row], writer: pytest.TerminalReporter) -> Iterator[str]:
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
            memory=session.settings.footprint == "on",
        )
        yield from drawn.splitlines()


def _newest_revision(baseline: Baseline) -> str | None:
    """The revision of the newest run, shortened; None if it is not known."""
    newest = max(
        (runs[-1].process for runs in baseline.rows.values()),
        key=lambda process: process.utc,
        default=None,
    )
    if newest is None or newest.revision is None:
        return None
    commit, dash, dirty = newest.revision.partition("-")
    return f"{commit[:10]}{dash}{dirty}"
