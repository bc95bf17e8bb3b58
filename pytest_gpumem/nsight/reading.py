"""A report of Nsight Systems or Nsight Compute as a recording, whatever kind of file it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.nsight.recording import BadReport, RangePlace, Recording, place_of_row
from pytest_gpumem.nsight.tools import NCU, NSYS, ToolMissing, find, ncu_error
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.result_files import FileError, content
from pytest_gpumem.runs import child

ACCEPTED = ".nsys-rep, .sqlite of `nsys export`, .ncu-rep, or what `ncu --csv --page raw` wrote"


def read(path: Path, environment: Mapping[str, str]) -> Recording:
    """The measurements in a report.

    nsys exports a `.nsys-rep` into a temporary file. ncu prints a `.ncu-rep`; without ncu, the package `ncu_report` reads it.
    `path`: a report; its name and its content tell its kind.
    Raises `BadReport`: one line with the file, its fault and, if there is one, the remedy.
    Raises `ToolMissing`: a needed tool is not installed.
    """
    try:
        if path.suffix in (".nsys-rep", ".qdrep"):
            return _exported(path, environment)
        if path.suffix == ".qdstrm":
            raise BadReport(
                "this recording was not imported into a report: a library that the importer of nsys needs is missing (often libdw); "
                "install it and record again, or open the file in the application"
            )
        if path.suffix == ".ncu-rep":
            return _printed(path, environment)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadReport("a device or a pipe; accepted is a file")
        with path.open("rb") as file:
            begin = file.read(16)
        if begin.startswith(b"SQLite format 3") or path.suffix == ".sqlite" or not begin:
            with Tables(path) as tables:
                return read_sqlite(tables)
        text = content(path).decode("utf-8", "replace")
        if '"ID"' not in text:
            raise BadReport(ncu_error(text) or f"no report of Nsight Systems or Nsight Compute; accepted are {ACCEPTED}")
        return ncu.read_csv(text)
    except OSError as error:
        raise BadReport(f"{path} cannot be read: {error.strerror or error}") from None
    except (BadReport, FileError) as error:
        raise BadReport(f"{path}: {error}") from None


def _exported(path: Path, environment: Mapping[str, str]) -> Recording:
    if not path.is_file():
        raise BadReport("there is no such file")
    try:
        nsys = find(NSYS, environment)
    except ToolMissing as error:
        raise ToolMissing(f"{path}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "report.sqlite")
        command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite=true", "--output", str(file), str(path.absolute())]
        finished = _run(command, environment)
        if not file.is_file():
            lines = [line.strip() for line in finished.output.splitlines() if line.strip()]
            why = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it printed nothing")
            raise BadReport(f"nsys export wrote nothing ({finished.how}): {why}")
        with Tables(file) as tables:
            return read_sqlite(tables)


def _printed(path: Path, environment: Mapping[str, str]) -> Recording:
    if not path.is_file():
        raise BadReport("there is no such file")
    try:
        program = find(NCU, environment)
    except ToolMissing:
        # The package is a native library, and a crash in it ends this process, so ncu is preferred.
        if (module := ncu.module()) is not None:
            return ncu.read_report(module, path)
        raise ToolMissing(
            f"{path}: neither ncu nor the package ncu_report was found: install Nsight Compute or pytest-gpumem[ncu], give its path in "
            "GPUMEM_NCU, or read what `ncu --import FILE --csv --page raw` prints elsewhere"
        ) from None
    finished = _run([str(program), "--import", str(path.absolute()), "--csv", "--page", "raw", "--print-units", "base"], environment)
    if '"ID"' not in finished.output:
        raise BadReport(ncu_error(finished.output) or f"ncu --import printed no page ({finished.how})")
    return ncu.read_csv(finished.output)


def _run(command: list[str], environment: Mapping[str, str]) -> child.Finished:
    try:
        return child.run(command, environment, lambda line: None)
    except OSError as error:
        raise BadReport(f"{command[0]} cannot be started: {error}") from None


def with_results(profiles: Iterable[TestProfile], rows: Iterable[Row]) -> tuple[TestProfile, ...]:
    """Add node ids, exact labels, numbers of launches and windows from the results of the same run.
    `profiles`: of one run.
    `rows`: of the same run. A profile without the row of its `range_name` and label stays as it is.
    """
    by_place = {place_of_row(row): row for row in rows}
    joined = []
    for one in profiles:
        row = by_place.get(RangePlace(one.name, one.label, True))
        if row is None or row.measurement is None or not (one.kernels or one.copies or one.memsets):
            joined.append(one)
            continue
        window = row.measurement.window
        joined.append(
            replace(
                one,
                nodeid=row.nodeid,
                label=row.label,
                launches=one.launches or len(row.measurement.samples),
                window=window,
                set_aside=one.set_aside if window is None else window.set_aside,
            )
        )
    return tuple(joined)


def by_row(recording: Recording, rows: Iterable[Row]) -> dict[str, TestProfile]:
    """The profiles of measured launches of the same run, by `Row.key`; the last of several processes."""
    found = with_results(recording.profiles, rows)
    return {one.key: one for one in found if one.nodeid is not None and (one.kernels or one.copies or one.memsets)}
