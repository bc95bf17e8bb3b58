"""Profiles in a report of Nsight Systems, and profiles with the rows of the same run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.nsight.recording import BadReport, RangePlace, place_of_row
from pytest_gpumem.nsight.tools import NSYS, find
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs import child


def read(report: Path, environment: Mapping[str, str]) -> tuple[TestProfile, ...]:
    """The measurements in a `.nsys-rep`, which nsys exports into a temporary file.
    Raises `BadReport`: one line with the file, its fault and, if there is one, the remedy.
    Raises `ToolMissing`: nsys is not installed.
    """
    nsys = find(NSYS, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "report.sqlite")
        command = [
            str(nsys),
            "export",
            "--type",
            "sqlite",
            "--force-overwrite=true",
            "--output",
            str(file),
            str(report.absolute()),
        ]
        try:
            finished = child.run(command, environment, lambda line: None)
        except OSError as error:
            raise BadReport(f"{command[0]} cannot be started: {error}") from None
        if not file.is_file():
            lines = [line.strip() for line in finished.output.splitlines() if line.strip()]
            why = next(
                (line for line in lines if "error" in line.lower()),
                lines[-1] if lines else "it printed nothing",
            )
            raise BadReport(f"{report}: nsys export wrote nothing ({finished.how}): {why}")
        try:
            with Tables(file) as tables:
                return read_sqlite(tables)
        except BadReport as error:
            raise BadReport(f"{report}: {error}") from None


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


def by_row(profiles: Iterable[TestProfile], rows: Iterable[Row]) -> dict[str, TestProfile]:
    """The profiles of measured launches of the same run, by `Row.key`; the last of several processes."""
    found = with_results(profiles, rows)
    return {
        one.key: one
        for one in found
        if one.nodeid is not None and (one.kernels or one.copies or one.memsets)
    }
