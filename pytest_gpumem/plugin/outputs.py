"""Writes a session's outputs: the files of `reporting.outputs`, GitHub's job summary and annotations.

In the xdist controller, not in its workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.plugin import replay
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.concerns import VARIABLE, Place, concerns, summarise, workflow_commands
from pytest_gpumem.reporting.outputs import OUTPUTS, Run, job_summary
from pytest_gpumem.reporting.plots.samples import Past
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.settings import ANNOUNCE, switched_off

CHECKOUTS = ("GITHUB_WORKSPACE", "CI_PROJECT_DIR")
"""Variables with the folder of the checked-out repository, to which paths of GitHub and GitLab are relative."""


class OutputHooks:
    """Writes at the session's end, and reports what it wrote.

    Raises:
        pytest.UsageError: a file cannot be written; raised before anything is measured.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._places: dict[str, Place] = {}
        self._notes: list[str] = []
        self._files: dict[str, Path] = {}
        for name in OUTPUTS:
            if (written := getattr(session.settings, name)) is not None:
                path = self._files[name] = Path(session.config.invocation_params.dir, Path(written).expanduser())
                if (why := unwritable(path)) is not None:
                    raise pytest.UsageError(f"gpumem: {session.settings.origins[name]}: cannot write {path}: {why}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, line, _ = report.location
        self._places[report.nodeid] = Place(self._within_checkout(file), (line or 0) + 1)

    def _within_checkout(self, file: str) -> str:
        """A path relative to the root folder as one that is relative to the repository, where a CI says which folder that is."""
        whole = Path(os.path.normpath(self._session.config.rootpath / file))
        for variable in CHECKOUTS:
            if (checkout := os.environ.get(variable)) and whole.is_relative_to(checkout):
                return whole.relative_to(checkout).as_posix()
        return Path(file).as_posix()

    @pytest.hookimpl(trylast=True)  # after the last report of every test
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if session.config.option.collectonly:
            return
        announced = os.environ.get(VARIABLE) and (len(self._session.rows) or self._session.missing) and self._announces
        if not self._files and not announced:
            return
        run = self._run()
        for name, path in self._files.items():
            self._write(session, f"--gpumem-{name.replace('_', '-')}", path, OUTPUTS[name](run))
        if announced and (note := summarise(job_summary(run), os.environ)) is not None:
            self._notes.append(note)

    @property
    def _announces(self) -> bool:
        """True if GitHub gets annotations and a summary: not under a profiler, which forbids verdicts, and not in a gate's screen, whose
        verdicts are not final."""
        return ANNOUNCE not in switched_off(os.environ) and not self._session.ranges.tool_attached()

    def _run(self) -> Run:
        gpu = self._session
        past: dict[str, list[Past]] = {}
        for row in gpu.rows:
            for one in gpu.baseline.rows.get(row.key, ()):
                then = one.measurement
                if row.measurement is not None and then.mode == row.measurement.mode:
                    past.setdefault(row.key, []).append(Past(one.process.utc, then.latency, then.half_width, one.process.revision))
        return Run(
            rows=list(gpu.rows),
            facts=gpu.facts,
            settings=gpu.settings.to_json(),
            utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            revision=replay.revision(gpu.config),
            past=past,
            sweeps=gpu.sweeps,
            places=self._places,
            remarks=missing_lines(gpu.missing),
        )

    def _write(self, session: pytest.Session, option: str, path: Path, text: str | None) -> None:
        if text is None:
            self._notes.append(f"{option}: nothing was measured, so {path} is not written")
            return
        try:
            write_whole(path, text)
        except OSError as error:
            self._notes.append(f"{option}: cannot write {path}: {error.strerror or error}")
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self._notes.append(f"{option}: wrote {path}")

    @pytest.hookimpl(wrapper=True, trylast=True)  # as the table of rows
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        try:
            yield
        finally:
            self._summary(terminalreporter)

    def _summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for note in self._notes:
            terminalreporter.write_line(printable(note))
        if os.environ.get("GITHUB_ACTIONS") == "true" and self._announces:
            terminalreporter.ensure_newline()
            for line in workflow_commands(concerns(self._session.rows), self._places):
                terminalreporter.write_line(line)


def correct_junit(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Give each test one entry, with the last verdicts of its rows. pytest writes a second entry for a test that is reported again.

    Args:
        path: of the file; nothing happens where pytest wrote none.
        rows: the JUnit properties of each row that was judged again.
    """
    if not path.is_file():
        return
    tree = ElementTree.parse(path)
    for suite in tree.getroot().iter("testsuite"):
        first: dict[tuple[str | None, str | None], ElementTree.Element] = {}
        for case in suite.findall("testcase"):
            known = first.setdefault((case.get("classname"), case.get("name")), case)
            if known is not case and known.find("failure") is None and (failures := case.findall("failure")):
                known.extend(failures)
                suite.remove(case)
                suite.set("tests", str(int(suite.get("tests", "1")) - 1))
    # The first property is the summary as JSON, whose range is the test's own.
    summaries = (next(iter(row.items())) for row in rows)
    again = {(name, json.loads(str(summary))["range"]): row for (name, summary), row in zip(summaries, rows, strict=True)}
    names = {name for name, _ in again}
    for case in tree.getroot().iter("testcase"):
        shown = {one.get("name", ""): one for one in case.iter("property")}
        for summary in names & shown.keys():
            row = again.get((summary, json.loads(shown[summary].get("value", "{}"))["range"]), {})
            for name in row.keys() & shown.keys():
                shown[name].set("value", str(row[name]))
    text = BytesIO()
    tree.write(text, encoding="utf-8", xml_declaration=True)
    write_whole(path, text.getvalue().decode())
