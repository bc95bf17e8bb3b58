"""The results of a session: on the terminal, in files and in the baseline; not in workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
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
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import ROW, TEST, Row
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
from pytest_gpumem.units import format_time

SUMMARY = "GITHUB_STEP_SUMMARY"  # as `reporting.github.VARIABLE`


class Results:
    """Shows and writes the results. Raises `pytest.UsageError` at once if a file is unwritable."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._report: Path | None = None
        if session.settings.report is not None:
            report = Path(session.settings.report).expanduser()
            self._report = self._writable(session.settings.origins["report"], report)
        results = session.config.option.benchmark_json
        if isinstance(results, (str, os.PathLike)):  # before pytest-benchmark 5.3 an open file
            self._writable("--benchmark-json", Path(results))

    def _writable(self, flag: str, written: Path) -> Path:
        path = Path(self._session.config.invocation_params.dir, written)
        why = unwritable(path)
        if why is not None:
            raise pytest.UsageError(f"gpumem: {flag}: cannot write {path}: {why}")
        return path

    # The header

    def header(self) -> list[str]:
        """What is measured, and compared with which baseline."""
        session = self._session
        why, plan = session.chosen.fallback_reason, session.settings.to_json()
        shown = []
        for line in header(session.facts, plan, self._baseline(), fallback_reason=why):
            shown += wrapped(line, columns(), indent="    ")
        return shown

    def _baseline(self) -> str:
        baseline, folder = self._session.baseline, self._session.config.invocation_params.dir
        place = shown = self._session.store.place
        if place.is_relative_to(folder):
            shown = place.relative_to(folder)
        if baseline.note is not None:
            # Baselines of other devices, and processes that do not count, are a reason.
            why = baseline.note if devices(place) else f"none in {shown}"
            saves = self._session.settings.save
            return why if saves else f"{why}; --gpumem-save --gpumem-processes 3 makes one"
        line = f"{counted(baseline.processes, 'process')} in {shown}"
        revision = _newest_revision(baseline)
        if revision is not None:
            line += f", the newest of {revision}"
        if baseline.left_out is not None:
            line += f"; {baseline.left_out}"
        return line

    # The end

    def write(self, *, complete: bool) -> bool:
        """Save and write all files; False if that fails. `complete`: all its tests ran."""
        gpu = self._session
        anything = bool(len(gpu.rows) or gpu.missing)
        written = True
        if anything:
            try:
                path = entries.write_json(gpu.config)
            except OSError as error:
                self.cannot_save(error)
                written = False
            else:
                if path is not None:
                    statistics = "pytest-benchmark's own statistics are off or empty"
                    gpu.remark(f"wrote {path} ({statistics})")
        if gpu.settings.save:
            try:
                for line in _save(gpu, complete=complete):
                    gpu.remark(f"--gpumem-save: {line}")
            except UserError as error:
                gpu.remark(f"--gpumem-save: {error}")
                written = False
        if gpu.config.option.collectonly:
            return written
        if self._report is not None:
            written = self._write_report(self._report) and written
        if os.environ.get(SUMMARY) and anything and self._announces:
            from pytest_gpumem.reporting import github, markdown

            failed = github.summarise(markdown.page(self._run()), os.environ)
            if failed is not None:
                gpu.remark(failed)
        return written

    def cannot_save(self, error: OSError) -> None:
        why = error.strerror or error
        self._session.remark(f"pytest-benchmark cannot save its results: {why}")

    def _write_report(self, path: Path) -> bool:
        gpu = self._session
        if not len(gpu.rows):
            gpu.remark(f"nothing was measured: {path} is not written")
            return True
        from pytest_gpumem.reporting import html

        try:
            write_whole(path, html.page(self._run()))
        except OSError as error:
            gpu.remark(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
            return False
        if gpu.announces:  # a gate names its files
            gpu.remark(f"--gpumem-report: wrote {path}")
        return True

    @property
    def _announces(self) -> bool:
        """True if verdicts are shown elsewhere: not under a profiler, nor in a gate's screen."""
        return self._session.announces and not self._session.ranges.tool_attached()

    def _run(self) -> Run:
        gpu = self._session
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

    # The summary

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        """Print the results, the conclusion of a session that fails, and annotations."""
        session = self._session
        rows = rows_of_table(session)
        lines: list[str] = []
        if rows and session.ranges.tool_attached():
            lines += profiled_lines(rows)
        elif rows:
            from pytest_gpumem.reporting.table import table

            drawn = table(
                rows,
                session.facts,
                width=columns(),
                colour=writer._tw.hasmarkup,
                every=writer.verbosity > 0,
                saved=session.settings.save or session.in_gate,
                memory=session.settings.footprint == "on",
            )
            lines += drawn.splitlines()
        ledger = session.ledger
        if ledger is not None and ledger.spent:  # workers keep accounts
            spent, total = format_time(ledger.spent), format_time(ledger.total)
            lines.append(f"budget: {spent} of {total} spent on measuring")
        # Not wrapped: some end with a command to copy.
        lines += [*missing_lines(session.missing), *session.remarks]
        if self._announces and (len(session.rows) or session.missing):
            conclusion = _conclusion(session)
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

            places = github.places_of(session.config.rootpath, session.rows.places)
            writer.ensure_newline()
            for line in github.workflow_commands(session.rows, places):
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


def _conclusion(session: GpuSession) -> Conclusion | None:
    """The conclusion of a session that fails by its verdicts; None of any other."""
    strict = session.settings.strict
    failing = []
    for row in session.rows:
        if row.measured_something and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, rows_of_table(session)))
    unjudged = open_under_strict(session.missing) if strict else []
    if unjudged:
        of_limits = not any(omission.what in (ROW, TEST) for omission in unjudged)
        thing = "limit" if of_limits else "measurement"
        causes.append(f"{counted(len(unjudged), thing)} not judged (--gpumem-strict)")
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
        steps = advice(_again(failing[0], session), accept, limits=limits)
    code = Exit.NO_VERDICT if session.broken and not failing else Exit.FAILED
    return Conclusion(code, causes, failing, session.missing, advice=steps)


def _again(row: Row, session: GpuSession) -> list[str]:
    config = session.config
    words = ["pytest"]
    for word in config.invocation_params.args:
        if word not in (*config.option.file_or_dir, BY_NAME["save"].flag):
            words.append(str(word))
    return [*words, row.nodeid]


def _save(session: GpuSession, *, complete: bool) -> Iterator[str]:
    """Save the rows of a session; yield lines about it. Raises `UserError`."""
    if not complete:
        yield "the session was interrupted, nothing is stored"
        return
    # Of tests that failed before they measured anything, pytest reports the failure.
    rows = [row for row in session.rows if row.measured_something]
    if not rows:
        yield "nothing was measured, nothing is stored"
        return
    fork = untrusted(os.environ)
    if fork is not None:
        yield f"nothing is stored of code that is not ours: {fork}"
        return
    revision = entries.revision(session.config)
    saved = session.store.save(rows, revision, session.settings.mode, session.baseline)
    if saved.path is not None:
        stored = f"{saved.accepted} of {counted(len(rows), 'row')}"
        yield f"{stored} stored in {session.store.place}"
    elif saved.refused:
        yield "no row is stored"
    else:
        full = counted(saved.full, "row")
        yield f"nothing is stored: the reference of {full} is full, and nothing became faster"
    changed = []
    for row, why in saved.refused:
        yield f"refused {row.key}: {why}"
        # The session's last lines have the command for rows that fail.
        if any(changes_of(row)) and not is_failure(row.verdict, session.settings.strict):
            changed.append(row)
    if changed:
        more = f"; so for {len(changed) - 1} more" if len(changed) > 1 else ""
        yield f"to accept a change on purpose: {command(changed[0])}{more}"
