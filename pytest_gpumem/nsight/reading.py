"""Reading a report of Nsight Systems or Nsight Compute, whatever kind of file it is."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from pytest_gpumem.nsight import ncu, ncu_report
from pytest_gpumem.nsight.recording import Place, Recording, place_of_row
from pytest_gpumem.nsight.sqlite import read_sqlite
from pytest_gpumem.nsight.sqlite_tables import BadReport, Tables
from pytest_gpumem.nsight.tools import ToolMissing, find_ncu, find_nsys
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.result_file import FileError, content
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs import child

ACCEPTED = ".nsys-rep, .sqlite of `nsys export`, .ncu-rep, or what `ncu --csv --page raw` wrote"


def read(path: Path, environment: Mapping[str, str]) -> Recording:
    """What a report tells of each measurement.

    A `.nsys-rep` is exported by nsys into a temporary file. A `.ncu-rep` is read by the module `ncu_report` of Nsight Compute, or where
    that cannot be imported by ncu itself.

    Args:
        path: a report; its kind is told by its name and its content.
        environment: all environment variables; they say where the tools are.

    Raises:
        BadReport: one line that names the file, what is wrong with it, and where there is one the remedy.
        ToolMissing: the tool is needed and not installed.
    """
    try:
        if path.suffix in (".nsys-rep", ".qdrep"):
            return _exported(path, environment)
        if path.suffix == ".qdstrm":
            raise BadReport(
                "what nsys recorded was not imported into a report: a library that the importer needs is missing (often libdw); "
                "install it and record again, or open the file in the application"
            )
        if path.suffix == ".ncu-rep":
            return _counted(path, environment)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadReport("a device or a pipe; accepted is a file")
        with path.open("rb") as file:
            begin = file.read(16)
        if begin.startswith(b"SQLite format 3") or path.suffix == ".sqlite" or not begin:
            with Tables(path) as tables:
                return read_sqlite(tables)
        text = content(path).decode("utf-8", "replace")
        if '"ID"' not in text:
            raise BadReport(ncu.trouble(text) or f"no report of Nsight Systems or Nsight Compute; accepted are {ACCEPTED}")
        return ncu_report.read_csv(text)
    except OSError as error:
        raise BadReport(f"{path} cannot be read: {error.strerror or error}") from None
    except (BadReport, FileError, ncu.BadOutput) as error:
        raise BadReport(f"{path}: {error}") from None


def _exported(path: Path, environment: Mapping[str, str]) -> Recording:
    if not path.is_file():
        raise BadReport("there is no such file")
    try:
        nsys = find_nsys(environment)
    except ToolMissing as error:
        raise ToolMissing(f"{path}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "report.sqlite")
        command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite=true", "--output", str(file), str(path.absolute())]
        try:
            finished = child.run(command, environment, lambda line: None)
        except (OSError, subprocess.SubprocessError) as error:
            raise BadReport(f"{nsys} cannot be started: {error}") from None
        if not file.is_file():
            said = [line.strip() for line in finished.output.splitlines() if line.strip()]
            why = next((line for line in said if "error" in line.lower()), said[-1] if said else "it said nothing")
            raise BadReport(f"nsys export wrote nothing ({finished.how}): {why}")
        with Tables(file) as tables:
            return read_sqlite(tables)


def _counted(path: Path, environment: Mapping[str, str]) -> Recording:
    if not path.is_file():
        raise BadReport("there is no such file")
    try:
        program = find_ncu(environment)
    except ToolMissing:
        program = None
    if program is None:
        # The module is a native library, made for one Python, and takes this process with it where it fails: ncu comes first.
        module = ncu_report.module(None)
        if module is not None:
            return ncu_report.read_report(module, path)
        raise ToolMissing(
            f"{path}: neither ncu nor its module ncu_report was found: install Nsight Compute, give its path in GPUMEM_NCU, or read what "
            "`ncu --import FILE --csv --page raw` prints elsewhere"
        )
    command = [str(program), "--import", str(path.absolute()), "--csv", "--page", "raw", "--print-units", "base"]
    try:
        finished = child.run(command, environment, lambda line: None)
    except (OSError, subprocess.SubprocessError) as error:
        raise BadReport(f"{program} cannot be started: {error}") from None
    if '"ID"' not in finished.output:
        raise BadReport(ncu.trouble(finished.output) or f"ncu --import printed no page ({finished.how})")
    return ncu_report.read_csv(finished.output)


def with_results(profiles: Iterable[TestProfile], rows: Iterable[Row]) -> tuple[TestProfile, ...]:
    """Profiles with what only the results of the same run know: node id, label as it was written, number of launches, window.

    Args:
        profiles: of one run.
        rows: its rows, by whose `range_name` and label a profile is found; a profile without one stays as it is.
    """
    by_place = {place_of_row(row): row for row in rows}
    joined = []
    for one in profiles:
        row = by_place.get(Place(one.name, one.label, True))
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
