"""Writes a session's report, GitHub's job summary and annotations. Workers write none."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.conclusion import conclusion_of
from pytest_gpumem.plugin.running import NOTHING
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.github import VARIABLE, place_of, summarise, workflow_commands
from pytest_gpumem.reporting.run import Place
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.settings import ANNOUNCE, switched_off

if TYPE_CHECKING:
    from pytest_gpumem.reporting.run import Run


class ReportFiles:
    """Writes at the session's end, and reports what it wrote.
    Raises `pytest.UsageError`: a file cannot be written; raised before anything is measured.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._locations: dict[
            str, tuple[str, int]
        ] = {}  # file, relative to the root folder, and line of each test
        self._notes: list[str] = []
        self._report: Path | None = None
        if session.settings.report is not None:
            report = Path(session.settings.report).expanduser()
            self._report = self._writable(session.settings.origins["report"], report)
        # Before pytest-benchmark 5.3, which writes it, an open file.
        if isinstance(results := session.config.option.benchmark_json, (str, os.PathLike)):
            self._writable("--benchmark-json", Path(results))

    def _writable(self, flag: str, written: Path) -> Path:
        """A file relative to where pytest was called. Raises `pytest.UsageError`: unwritable."""
        path = Path(self._session.config.invocation_params.dir, written)
        why = unwritable(path)
        if why is not None:
            raise pytest.UsageError(f"gpumem: {flag}: cannot write {path}: {why}")
        return path

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        file, line, _ = report.location
        self._locations[report.nodeid] = file, (line or 0) + 1
        return NOTHING

    def places(self) -> dict[str, Place]:
        """The places where the reported tests are defined, by node id."""
        root = self._session.config.rootpath
        return {
            nodeid: place_of(root, file, line) for nodeid, (file, line) in self._locations.items()
        }

    def write(self) -> bool:
        """Write all of them; False if the report cannot be written."""
        written = self._report is None or self._write_report(self._report)
        if (
            os.environ.get(VARIABLE)
            and (len(self._session.rows) or self._session.missing)
            and self._announces
        ):
            from pytest_gpumem.reporting import markdown

            failed = summarise(markdown.page(self._run()), os.environ)
            if failed is not None:
                self._notes.append(failed)
        return written

    def _write_report(self, path: Path) -> bool:
        if not len(self._session.rows):
            self._notes.append(f"--gpumem-report: nothing was measured, so {path} is not written")
            return True
        from pytest_gpumem.reporting import html

        try:
            write_whole(path, html.page(self._run()))
        except OSError as error:
            self._notes.append(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
            return False
        if ANNOUNCE not in switched_off(os.environ):  # a gate names its own files
            self._notes.append(f"--gpumem-report: wrote {path}")
        return True

    @property
    def _announces(self) -> bool:
        """True if GitHub gets annotations and a summary: not under a profiler, which forbids verdicts, and not in a gate's screen, whose
        verdicts are not final."""
        return ANNOUNCE not in switched_off(os.environ) and not self._session.ranges.tool_attached()

    def _run(self) -> Run:
        from pytest_gpumem.reporting.run import Run

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

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        """Print which files were written, and the annotations."""
        for note in self._notes:
            writer.write_line(printable(note))
        if os.environ.get("GITHUB_ACTIONS") == "true" and self._announces:
            writer.ensure_newline()
            for line in workflow_commands(self._session.rows, self.places()):
                writer.write_line(line)
