"""One side of a comparison: files of --benchmark-json, of pytest-benchmark alone, or saved runs."""

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

from pytest_gpumem.baselines.history import (
    UNKNOWN_GPU,
    Baseline,
    RunFile,
    SavedFootprint,
    SavedProcess,
    SavedRow,
    assemble,
)
from pytest_gpumem.baselines.layout import read, refuse_twice, unfit
from pytest_gpumem.judging.judge import comparable, failing_in_themselves
from pytest_gpumem.judging.verdict import UNLIMITED
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Provenance
from pytest_gpumem.records.record import is_time
from pytest_gpumem.records.row import Omission, Row
from pytest_gpumem.result_files import FileError, content, document_in, parsed, revision_of, time_of

STOCK = "pytest-benchmark"
"""`Measurement.mode` of files of pytest-benchmark alone, which knows no state of the cache."""
SHOWN = 3  # most folders that an error names
FAILED = "its test failed"
"""In `ResultFile.left_out`: by an assertion or an error of its own."""


@dataclass(frozen=True)
class ResultFile:
    """One file: the processes of one run."""

    path: Path
    digest: str  # SHA-256 of its bytes: files with the same digest are copies
    content: RunFile  # of the device `UNKNOWN_GPU` if the file names none
    rows: Mapping[str, Row] = field(default_factory=dict)
    """By key: all that it holds, with limits where the file has them."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """By row key: why a row can be no baseline."""
    missing: tuple[Omission, ...] = ()  # what the run itself did not judge
    evidence: bool = True  # the run recorded what it ran
    stock: bool = False  # written by pytest-benchmark alone


@dataclass(frozen=True)
class SideResults:
    """All processes of one side."""

    name: str  # as it was given
    files: tuple[ResultFile, ...]  # oldest first
    baseline: Baseline  # of all files
    left_out: Mapping[str, str]  # by row key: why the row is left out of the baseline

    @property
    def rows(self) -> Mapping[str, tuple[SavedRow, ...]]:
        """By row key: its runs, oldest first."""
        return self.baseline.rows

    @property
    def processes(self) -> int:
        """Number of processes in the files."""
        return self.baseline.processes

    @property
    def devices(self) -> dict[str, DeviceFacts]:
        """The measured devices by key; the last of each key."""
        devices = {}
        for file in self.files:
            devices[file.content.process.device.key] = file.content.process.device
        return devices

    @property
    def newest(self) -> SavedProcess:
        """The process of the newest file."""
        return self.files[-1].content.process

    @property
    def stock(self) -> bool:
        """True if a file is of pytest-benchmark alone."""
        return any(file.stock for file in self.files)

    @property
    def evidence(self) -> bool:
        """As `ResultFile.evidence`, of all files."""
        return all(file.evidence for file in self.files)

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
            if key in self.rows or key in self.baseline.footprints:
                rows[key] = self._merged(row)
        return rows

    def _merged(self, row: Row) -> Row:
        measurement = footprint = None
        runs = self.rows.get(row.key, ())
        if runs:
            measurement = runs[-1].measurement
            repeats = list(measurement.further)
            for run in runs[:-1]:
                if comparable(measurement, run.measurement):
                    repeats += [run.measurement.repeat, *run.measurement.further]
            measurement = replace(measurement, further=tuple(repeats))
        footprints = self.baseline.footprints.get(row.key, ())
        if footprints:
            footprint = footprints[-1].footprint
            others = list(footprint.further)
            for saved in footprints[:-1]:
                others += [saved.footprint.repeat, *saved.footprint.further]
            footprint = replace(footprint, further=tuple(others))
        return replace(row, measurement=measurement, footprint=footprint)


def side(given: str) -> SideResults:
    """Read a file, a folder of files, or a quoted pattern such as "base-*.json".

    Raises `UserError`: no file, a file that cannot be used, a copy, or nothing was measured.
    """
    files = []
    seen: dict[str, Path] = {}
    for path in _paths(given):
        file = _file(path)
        if file.digest in seen:
            raise UserError(f"{path}: the same as {seen[file.digest]}: a copy")
        seen[file.digest] = path
        files.append(file)
    files.sort(key=lambda file: (file.content.process.utc, file.content.process.id))
    baseline = assemble(file.content for file in files)
    left_out = {}
    for file in files:
        for key, why in file.left_out.items():
            if key not in baseline.rows and key not in baseline.footprints:
                left_out[key] = why
    results = SideResults(given, tuple(files), baseline, left_out)
    if not results.processes or not (results.rows or baseline.footprints or left_out):
        raise UserError(f"{given}: nothing was measured")
    return results


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
        value, digest = parsed(text), hashlib.sha256(text).hexdigest()
        if isinstance(value, dict) and "gpumem" in value:
            return _results(path, digest, value)
        if isinstance(value, dict) and isinstance(value.get("benchmarks"), list):
            return _stock(path, digest, value)
        if isinstance(value, dict) and "schema" in value:
            saved = read(text)
            return ResultFile(path, digest, saved, _rows_of(saved))
    except (FileError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    raise UserError(f"{path}: neither a --benchmark-json file nor a baseline's")


def _process(
    path: Path, digest: str, value: Mapping[str, Any], device: DeviceFacts, mode: object = None
) -> SavedProcess:
    utc = time_of(value.get("datetime"), path).astimezone(timezone.utc)
    revision = revision_of(value.get("commit_info"))
    return SavedProcess(digest, utc, revision, device, mode if isinstance(mode, str) else None)


def _results(path: Path, digest: str, value: Mapping[str, Any]) -> ResultFile:
    """Read a `--benchmark-json` file of a session with `--gpumem`."""
    document = document_in(value)
    settings = document.settings
    process = _process(path, digest, value, document.device, settings.get("mode"))
    rows, footprints, left_out = list[SavedRow](), list[SavedFootprint](), dict[str, str]()
    # A test that fails by a limit was timed correctly; an assertion may have ended anything.
    failing = failing_in_themselves(document.rows, bool(settings.get("strict")))
    for row in document.rows:
        measurement, footprint = row.measurement, row.footprint
        why = None if measurement is None else unfit(measurement)
        if row.nodeid in failing or (row.failed and not row.measured_something):
            why = FAILED
        if why is not None:
            left_out[row.key] = why
            continue
        if footprint is not None:
            footprints.append(SavedFootprint(row.nodeid, row.label, footprint, process, row.limits))
        if measurement is not None:
            # Not reduced: the judge needs more of a run than a baseline keeps.
            if measurement.provenance is None:
                provenance = Provenance(process.utc.isoformat(), document.device.uuid)
                measurement = replace(measurement, provenance=provenance)
            rows.append(SavedRow(row.nodeid, measurement, process, row.test_source, row.limits))
    refuse_twice(rows)
    run = RunFile(document.device.key, process, tuple(rows), tuple(footprints))
    by_key = {row.key: row for row in document.rows}
    evidence = not settings.get("no_what_ran")
    return ResultFile(path, digest, run, by_key, left_out, document.missing, evidence)


def _stock(path: Path, digest: str, value: Mapping[str, Any]) -> ResultFile:
    """Read a file of pytest-benchmark alone: by the host's clock, on an unknown device."""
    process = _process(path, digest, value, UNKNOWN_GPU)
    rows = []
    for index, benchmark in enumerate(value["benchmarks"]):
        stats = benchmark.get("stats") if isinstance(benchmark, dict) else None
        name = benchmark.get("fullname") if isinstance(benchmark, dict) else None
        if not isinstance(stats, dict) or not isinstance(name, str):
            raise FileError(
                f"$.benchmarks[{index}]: no fullname and stats, as pytest-benchmark writes them"
            )
        median = stats.get("median")
        # A bool is an int in Python.
        if not isinstance(median, (int, float)) or isinstance(median, bool) or not is_time(median):
            raise FileError(f"$.benchmarks[{index}].stats.median: {median!r} is no time")
        rows.append(SavedRow(name, _host_timed(float(median), stats.get("rounds")), process))
    refuse_twice(rows)
    run = RunFile(UNKNOWN_GPU.key, process, tuple(rows))
    return ResultFile(path, digest, run, _rows_of(run), stock=True)


def _rows_of(run: RunFile) -> dict[str, Row]:
    """Return the rows of a file that has no verdicts."""
    rows = {}
    for saved in run.footprints:
        rows[saved.key] = Row(
            saved.nodeid, saved.limits, UNLIMITED, label=saved.label, footprint=saved.footprint
        )
    for timed in run.rows:
        row = rows.get(timed.key, Row(timed.nodeid, timed.limits, UNLIMITED, label=timed.label))
        rows[timed.key] = replace(row, measurement=timed.measurement, test_source=timed.test_source)
    return rows


def _host_timed(median: float, rounds: object) -> Measurement:
    return Measurement(
        label="",
        target=STOCK,
        mode=STOCK,
        sampler="host",
        sampler_reason="by pytest-benchmark",
        placements=((median,),),
        half_width=None,
        moved_bytes=None,
        footprint=None,
        floor=0.0,
        conditions=(Conditions(), Conditions()),
        notes=(f"median of {rounds} rounds",),
    )
