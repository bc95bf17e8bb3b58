"""What a session prints and stores at its start and end; in the xdist controller, not in its workers."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_gpumem.plugin import replay
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.reporting.table import table
from pytest_gpumem.reporting.terminal import baseline_line, header
from pytest_gpumem.units import format_time
from pytest_gpumem.verdicts.judge import is_failure


class TerminalHooks:
    """Header, announcements, table, JSON and baseline."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._notes: list[str] = []

    def pytest_report_header(self) -> list[str]:
        session = self._session
        reason = session.chosen.fallback_reason
        return header(session.facts, session.settings.to_json(), self._baseline(), fallback_reason=reason)

    def _baseline(self) -> str:
        session = self._session
        processes = session.baseline.processes
        line = baseline_line(processes, None, str(session.store.folder))
        return f"{line}; {session.baseline.note}" if session.baseline.note else line

    def pytest_report_collectionfinish(self) -> list[str]:
        session = self._session
        total = session.settings.total_budget
        if total is None or not session.to_measure:
            return []
        tests = f"{session.to_measure} tests that measure"
        return [f"gpumem: budget of {format_time(total)} shared out over {tests}, {format_time(session.share())} each to begin with"]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        session = self._session
        if not len(session.rows):
            if session.settings.save:
                self._notes.append("--gpumem-save: nothing was measured, nothing is stored")
            return
        path = replay.write_json(session.config)
        if path is not None:
            self._notes.append(f"wrote {path} (pytest-benchmark's own statistics are off or empty)")
        if session.settings.save:
            self._notes += self._save(exitstatus)

    def _save(self, exitstatus: int) -> list[str]:
        session = self._session
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return ["--gpumem-save: the session was interrupted, nothing is stored"]
        saved = session.store.save(list(session.rows), replay.revision(session.config))
        return [f"--gpumem-save: {line}" for line in saved.lines()]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        session, writer = self._session, terminalreporter
        rows = list(session.rows)
        if not rows and not self._notes:
            return
        title = f"gpumem: {session.facts.name}" + (" (simulated)" if session.facts.simulated else "")
        writer.section(title)
        # -q shows what needs attention only.
        shown = rows if writer.verbosity >= 0 else [row for row in rows if row.failed or is_failure(row.verdict, True)]
        if shown:
            writer.write_line(table(shown, session.facts, width=writer._tw.fullwidth, colour=writer._tw.hasmarkup))
        if rows:
            counts = Counter(row.verdict.outcome.value for row in rows)
            writer.write_line(f"{len(rows)} measured: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
        for note in self._notes:
            writer.write_line(note)
