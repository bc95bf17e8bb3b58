"""Writes a session's outputs: the files of `OUTPUTS`, GitHub's job summary and annotations. Workers write none."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin import replay
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.concerns import VARIABLE, summarise, workflow_commands
from pytest_gpumem.reporting.outputs import OUTPUTS
from pytest_gpumem.reporting.run import Place
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.settings import ANNOUNCE, OptionRole, of_role, switched_off

if TYPE_CHECKING:
    from pytest_gpumem.reporting.run import Run


CHECKOUTS = ("GITHUB_WORKSPACE", "CI_PROJECT_DIR")
"""Variables with the folder of the checked-out repository, to which paths of GitHub and GitLab are relative."""


class OutputFeature(Feature):
    """Writes at the session's end, and reports what it wrote.
    Raises `pytest.UsageError`: a file cannot be written; raised before anything is measured.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._locations: dict[
            str, tuple[str, int]
        ] = {}  # file, relative to the root folder, and line of each test
        self._notes: list[str] = []
        files = {option: session.output(option.name) for option in of_role(OptionRole.OUTPUT)}
        self._files = {option: path for option, path in files.items() if path is not None}
        # Before pytest-benchmark 5.3, which writes it, an open file.
        if isinstance(results := session.config.option.benchmark_json, (str, os.PathLike)):
            session.writable("--benchmark-json", Path(results))

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        file, line, _ = report.location
        self._locations[report.nodeid] = file, (line or 0) + 1
        return NOTHING

    def places(self) -> dict[str, Place]:
        """The places where the reported tests are defined, by node id."""
        return {
            nodeid: Place(self._within_checkout(file), line)
            for nodeid, (file, line) in self._locations.items()
        }

    def _within_checkout(self, file: str) -> str:
        """A path relative to the root folder as one that is relative to the repository, where a CI says which folder that is."""
        whole = Path(os.path.normpath(self._session.config.rootpath / file))
        for variable in CHECKOUTS:
            if (checkout := os.environ.get(variable)) and whole.is_relative_to(checkout):
                return whole.relative_to(checkout).as_posix()
        return Path(file).as_posix()

    def write(self) -> bool:
        """Write all of them; False if one cannot be written."""
        announced = (
            os.environ.get(VARIABLE)
            and (len(self._session.rows) or self._session.missing)
            and self._announces
        )
        if not self._files and not announced:
            return True
        run, written = self._run(), True
        for option, path in self._files.items():
            text = OUTPUTS[option.name](run)
            try:
                if text is None:
                    self._notes.append(
                        f"{option.flag}: nothing was measured, so {path} is not written"
                    )
                    continue
                write_whole(path, text)
                if ANNOUNCE not in switched_off(os.environ):  # a gate names its own files
                    self._notes.append(f"{option.flag}: wrote {path}")
            except OSError as error:
                self._notes.append(f"{option.flag}: cannot write {path}: {error.strerror or error}")
                written = False
        if (
            announced
            and (failed := summarise(str(OUTPUTS["markdown"](run)), os.environ)) is not None
        ):
            self._notes.append(failed)
        return written

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
            revision=replay.revision(gpu.config),
            past={row.key: gpu.baseline.past(row) for row in gpu.rows},
            footprints=gpu.baseline.newest_footprints,
            places=self.places(),
            duet_follows=gpu.duet_follows or gpu.in_gate,
            remarks=missing_lines(gpu.missing),
        )

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        """Print which files were written, and the annotations."""
        for note in self._notes:
            writer.write_line(printable(note))
        if os.environ.get("GITHUB_ACTIONS") == "true" and self._announces:
            writer.ensure_newline()
            for line in workflow_commands(self._session.rows, self.places()):
                writer.write_line(line)
