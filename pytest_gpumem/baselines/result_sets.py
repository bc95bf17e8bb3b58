"""One side of a comparison: files of --benchmark-json, or saved runs."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.baselines.history import Baseline, SavedRow, SavedRun, assemble
from pytest_gpumem.baselines.layout import read, unfit
from pytest_gpumem.judging.judge import comparable, failing_in_themselves
from pytest_gpumem.judging.verdict import UNLIMITED
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Provenance
from pytest_gpumem.records.row import Omission, Row
from pytest_gpumem.result_files import FileError, content, document_in, parsed, revision_of, time_of

SHOWN = 3  # most folders that an error names
FAILED = "its test failed"
"""In `ResultFile.left_out`: by an assertion or an error of its own."""


@dataclass(frozen=True)
class ResultFile:
    """One file: the processes of one run."""

    path: Path
    run: SavedRun  # files with the same id are copies
    rows: Mapping[str, Row] = field(default_factory=dict)
    """By key: all that it holds, with limits where the file has them."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By row key: why a row can be no baseline."""
    missing: tuple[Omission, ...] = ()  # what the run itself did not judge


@dataclass(frozen=True)
class SideResults:
    """All processes of one side."""

    name: str  # as it was given
    files: tuple[ResultFile, ...]  # oldest first
    baseline: Baseline  # of all files
    left_out: Mapping[str, str]  # by row key: why the row is left out of the baseline

    @property
    def devices(self) -> dict[str, DeviceFacts]:
        """The measured devices by key; the last of each key."""
        return {file.run.device.key: file.run.device for file in self.files}

    @property
    def newest(self) -> SavedRun:
        """The newest run."""
        return self.files[-1].run

    @property
    def missing(self) -> dict[tuple[str, str], Omission]:
        """What the runs themselves did not judge, by key and by what it is."""
        missing = {}
        for file in self.files:
            for omission in file.missing:
                missing[omission.key, omission.what] = omission
        return missing

    @property
    def judged(self) -> dict[str, Row]:
        """The rows to judge, by key.

        Each is of the newest run that can be compared, with the processes of the other runs.
        """
        rows: dict[str, Row] = {}
        for file in self.files:
            for key, row in file.rows.items():
                if key not in rows or key not in file.left_out:
                    rows[key] = row
        for key, row in rows.items():
            if key in self.baseline.rows:
                rows[key] = _merged(row, self.baseline.rows[key])
        return rows


def _merged(row: Row, runs: tuple[SavedRow, ...]) -> Row:
    """Return a row with the figures of its newest run, and those of the other runs as further."""
    measurement = footprint = None
    for run in reversed(runs):
        times, memory = run.measurement, run.footprint
        if measurement is None:
            measurement = times
        elif times is not None and comparable(measurement, times):
            further = (*measurement.further, times.repeat, *times.further)
            measurement = replace(measurement, further=further)
        if footprint is None:
            footprint = memory
        elif memory is not None:
            repeats = (*footprint.further, memory.repeat, *memory.further)
            footprint = replace(footprint, further=repeats)
    return replace(row, measurement=measurement, footprint=footprint)


def side(given: str) -> SideResults:
    """Read a file, a folder of files, or a quoted pattern such as "base-*.json".

    Raises `UserError`: no file, a file that cannot be used, a copy, or nothing was measured.
    """
    files = []
    seen: dict[str, Path] = {}
    for path in _paths(given):
        file = _file(path)
        if file.run.id in seen:
            raise UserError(f"{path}: the same as {seen[file.run.id]}: a copy")
        seen[file.run.id] = path
        files.append(file)
    files.sort(key=lambda file: (file.run.utc, file.run.id))
    baseline = assemble(file.run for file in files)
    left_out = {}
    for file in files:
        for key, why in file.left_out.items():
            if key not in baseline.rows:
                left_out[key] = why
    if not (baseline.rows or left_out):
        raise UserError(f"{given}: nothing was measured")
    return SideResults(given, tuple(files), baseline, left_out)


def _paths(given: str) -> list[Path]:
    path = Path(os.path.expanduser(given))  # unchanged where there is no such user
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if files:
            return files
        # Such as `.benchmarks`, which has a folder for each GPU.
        below = sorted({str(file.parent) for file in path.rglob("*.json")})
        hint = f"; there are some in {', '.join(below[:SHOWN])}" if below else ""
        raise UserError(f"{given}: a folder without a .json file{hint}")
    if path.exists():
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not files:
        raise UserError(f"{given}: no such file, folder or pattern")
    return files


def _file(path: Path) -> ResultFile:
    try:
        text = content(path)
        value = parsed(text)
        if isinstance(value, dict) and "gpumem" in value:
            return _results(path, hashlib.sha256(text).hexdigest(), value)
        if isinstance(value, dict) and "schema" in value:
            return _saved(path, read(text))
    except (FileError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    raise UserError(
        f"{path}: neither a --benchmark-json file of a session with --gpumem nor a saved run"
    )


def _results(path: Path, digest: str, value: Mapping[str, Any]) -> ResultFile:
    """Read a `--benchmark-json` file of a session with `--gpumem`. `digest`: of its bytes."""
    document = document_in(value)
    settings = document.settings
    mode = settings.get("mode")
    utc = time_of(value.get("datetime"), path).astimezone(timezone.utc)
    rows, left_out = list[SavedRow](), dict[str, str]()
    # A test that fails by a limit was timed correctly; an assertion may have ended anything.
    failing = failing_in_themselves(document.rows, bool(settings.get("strict")))
    by_key: dict[str, Row] = {}
    for row in document.rows:
        times, memory = row.measurement, row.footprint
        why = None if times is None else unfit(times)
        if row.nodeid in failing or (row.failed and not row.measured_something):
            why = FAILED
        if why is not None:
            left_out[row.key] = why
        elif row.measured_something:
            if row.key in by_key:
                raise FileError(f"holds {row.key} twice")
            # Not reduced: the judge needs more of a run than a baseline keeps.
            if times is not None and times.provenance is None:
                times = replace(times, provenance=Provenance(utc.isoformat(), document.device.uuid))
            rows.append(SavedRow(row.nodeid, row.label, times, memory, row.limits, row.test_source))
        by_key[row.key] = row
    run = SavedRun(
        id=digest,
        utc=utc,
        device=document.device,
        revision=revision_of(value.get("commit_info")),
        mode=mode if isinstance(mode, str) else None,
        rows=tuple(rows),
    )
    return ResultFile(path, run, by_key, left_out, document.missing)


def _saved(path: Path, run: SavedRun) -> ResultFile:
    """Read a saved run, whose rows have no verdicts."""
    rows = {}
    for saved in run.rows:
        rows[saved.key] = Row(
            saved.nodeid,
            saved.limits,
            UNLIMITED,
            saved.measurement,
            saved.label,
            test_source=saved.test_source,
            footprint=saved.footprint,
        )
    return ResultFile(path, run, rows)
