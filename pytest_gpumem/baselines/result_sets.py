"""One side of a comparison: result files of this plugin, of stock pytest-benchmark, and of baselines."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import fields, replace

from pytest_gpumem.baselines.history import (
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
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Provenance
from pytest_gpumem.records.record import is_time
from pytest_gpumem.records.row import Omission, Row
from pytest_gpumem.result_files import FileError, content, document_in, parsed, revision_of, time_of

STOCK = "pytest-benchmark"  # `Measurement.mode` of files of stock pytest-benchmark, which knows no cache state
_UNKNOWN: dict[Any, Any] = {str: "unknown GPU", bool: False, int: 0, float: 0.0}
UNKNOWN_GPU = DeviceFacts(
    **{one.name: _UNKNOWN.get(one.type, (0, 0)) for one in fields(DeviceFacts) if one.required}
)
"""The device of a file that names none."""
SHOWN = 3  # most folders that an error names


FAILED = "its test failed"  # in `ResultFile.left_out`: by an assertion or an error of its own


@dataclass(frozen=True)
class ResultFile:
    """One file: the processes of one run, or an acceptance in a baseline's folder."""

    path: Path
    digest: str  # SHA-256 of its bytes: files with the same digest are copies
    content: RunFile  # of the device `UNKNOWN_GPU` if the file names none
    rows: Mapping[str, Row] = field(
        default_factory=dict
    )  # by key: all that it holds, with limits where the file has them
    left_out: Mapping[str, str] = field(
        default_factory=dict
    )  # by row key: why a row can be no baseline
    missing: tuple[Omission, ...] = ()  # what the run itself did not judge
    evidence: bool = True  # the run let the same machine code settle doubts
    stock: bool = False  # written by stock pytest-benchmark


@dataclass(frozen=True)
class SideResults:
    """All processes of one side."""

    name: str  # as it was given
    files: tuple[ResultFile, ...]  # oldest first
    baseline: Baseline  # of all files, those of a baseline as a session reads them
    left_out: Mapping[str, str]  # by row key: why the row is left out of the baseline

    @property
    def rows(self) -> Mapping[str, tuple[SavedRow, ...]]:
        """By row key: one a run, oldest first."""
        return self.baseline.rows

    @property
    def processes(self) -> int:
        """Number of processes in the files; a run with --gpumem-processes stores all of its processes in one file."""
        return self.baseline.processes

    @property
    def devices(self) -> dict[str, DeviceFacts]:
        """The measured devices by key; the last one of each key."""
        return {process.device.key: process.device for process in self._processes}

    @property
    def newest(self) -> SavedProcess:
        """The newest process."""
        return self._processes[-1]

    @property
    def _processes(self) -> list[SavedProcess]:
        return [file.content.process for file in self.files]

    @property
    def stock(self) -> bool:
        """True if a file is of stock pytest-benchmark."""
        return any(file.stock for file in self.files)

    @property
    def evidence(self) -> bool:
        """As `ResultFile.evidence`, of all files."""
        return all(file.evidence for file in self.files)

    @property
    def missing(self) -> dict[tuple[str, str], Omission]:
        """What the runs themselves did not judge, by key and by what it is."""
        return {(one.key, one.what): one for file in self.files for one in file.missing}

    @property
    def judged(self) -> dict[str, Row]:
        """The rows that are to be judged, by key: each of its newest run that can be compared, else of its newest one, with the processes
        of the other runs."""
        keys = dict.fromkeys(key for file in self.files for key in file.rows)
        return {key: self._judged(key) for key in keys}

    def _judged(self, key: str) -> Row:
        having = [file for file in self.files if key in file.rows]
        fit = [file for file in having if key not in file.left_out]
        row = (fit or having)[-1].rows[key]
        if not fit:
            return row
        runs, footprints = self.rows.get(key, ()), self.baseline.footprints.get(key, ())
        footprint = footprints[-1].footprint if footprints else None
        if footprint is not None:
            others = (one.footprint for one in footprints[:-1])
            footprint = replace(
                footprint,
                further=(
                    *footprint.further,
                    *(each for one in others for each in (one.repeat, *one.further)),
                ),
            )
        return replace(row, measurement=merged(runs) if runs else None, footprint=footprint)


def _files(given: str) -> list[ResultFile]:
    seen: dict[str, Path] = {}
    files = []
    for path in _paths(given):
        file = _file(path)
        if file.digest in seen:
            raise UserError(f"{path}: the same as {seen[file.digest]}: a copy")
        seen[file.digest] = path
        files.append(file)
    return files


def side(given: str) -> SideResults:
    """Read a file, a folder of files, or a quoted pattern such as "base-*.json".
    Raises `UserError`: no file, a file that cannot be used, a copy, or nothing was measured.
    """
    files = _files(given)
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


def merged(rows: Sequence[SavedRow]) -> Measurement:
    """Merge the processes of one row: the newest measurement, with all that are comparable with it as its further processes."""
    newest = rows[-1].measurement
    others = [one.measurement for one in rows[:-1] if comparable(newest, one.measurement)]
    further = [repeat for other in others for repeat in (other.repeat, *other.further)]
    return replace(newest, further=(*newest.further, *further))


def _paths(given: str) -> list[Path]:
    path = Path(os.path.expanduser(given))  # unchanged where there is no such user
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix == ".json")
        if not found:
            # Such as `.benchmarks`, which has a folder for each GPU.
            below = sorted({file.parent for file in path.rglob("*.json")})
            hint = (
                f"; there are some in {', '.join(str(one) for one in below[:SHOWN])}"
                if below
                else ""
            )
            raise UserError(f"{given}: a folder without a .json file{hint}")
        return found
    if path.exists():
        return [path]
    found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
    if not found:
        raise UserError(f"{given}: no such file, folder or pattern")
    return found


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


def _results(path: Path, digest: str, value: Mapping[str, Any]) -> ResultFile:
    """A `--benchmark-json` file of a session with `--gpumem`."""
    found = document_in(value)
    settings = found.settings
    mode = settings.get("mode")
    process = SavedProcess(
        digest,
        time_of(value.get("datetime"), path),
        revision_of(value.get("commit_info")),
        found.device,
        mode=mode if isinstance(mode, str) else None,
    )
    rows, footprints, left_out = list[SavedRow](), list[SavedFootprint](), dict[str, str]()
    # A test that fails by a limit was timed correctly; one that fails by an assertion may have timed anything.
    failing = failing_in_themselves(found.rows, bool(settings.get("strict")))
    for row in found.rows:
        why = (
            FAILED if row.nodeid in failing or (row.failed and not row.measured_something) else None
        )
        if why is None and row.measurement is not None:
            why = unfit(row.measurement)
        elif why is None and row.footprint is None:
            continue
        if why is not None:
            left_out[row.key] = why
            continue
        if row.footprint is not None:
            footprints.append(
                SavedFootprint(row.nodeid, row.label, row.footprint, process, row.limits)
            )
        if row.measurement is not None:
            # Not reduced: the judge needs more of a run than a baseline keeps.
            measurement = replace(
                row.measurement,
                provenance=row.measurement.provenance
                or Provenance(process.utc.isoformat(), found.device.uuid),
            )
            rows.append(SavedRow(row.nodeid, measurement, process, row.test_source, row.limits))
    refuse_twice(rows)
    return ResultFile(
        path,
        digest,
        _of_results(process, rows, footprints),
        {row.key: row for row in found.rows},
        left_out,
        found.missing,
        not settings.get("no_what_ran"),
    )


def _stock(path: Path, digest: str, value: Mapping[str, Any]) -> ResultFile:
    """A file of stock pytest-benchmark: one process, timed by the host's clock, on an unknown device."""
    process = SavedProcess(
        digest,
        time_of(value.get("datetime"), path),
        revision_of(value.get("commit_info")),
        UNKNOWN_GPU,
    )
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
    content = _of_results(process, rows)
    return ResultFile(path, digest, content, _rows_of(content), stock=True)


def _rows_of(content: RunFile) -> dict[str, Row]:
    """The rows of a file that has no limits and no verdicts."""
    found = {
        one.key: Row(one.nodeid, Limits(), UNLIMITED, label=one.label, footprint=one.footprint)
        for one in content.footprints
    }
    for row in content.rows:
        of_test = found.get(row.key, Row(row.nodeid, Limits(), UNLIMITED, label=row.label))
        found[row.key] = replace(of_test, measurement=row.measurement, test_source=row.test_source)
    return found


def _of_results(
    process: SavedProcess, rows: Sequence[SavedRow], footprints: Sequence[SavedFootprint] = ()
) -> RunFile:
    return RunFile(process.device.key, process, tuple(rows), tuple(footprints))


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
