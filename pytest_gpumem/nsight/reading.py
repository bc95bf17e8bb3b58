"""Profiles with the rows of the same run."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from pytest_gpumem.nsight.recording import RangePlace, place_of_row
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row


def with_results(profiles: Iterable[TestProfile], rows: Iterable[Row]) -> tuple[TestProfile, ...]:
    """Add node ids, exact labels, numbers of launches and windows from the results of the same run.
    `profiles`: of one run.
    `rows`: of the same run. A profile without the row of its `range_name` and label stays as it is.
    """
    by_place = {place_of_row(row): row for row in rows}
    joined = []
    for one in profiles:
        row = by_place.get(RangePlace(one.name, one.label, True))
        if row is None or row.measurement is None or not one.kernels:
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
    return {one.key: one for one in found if one.nodeid is not None and one.kernels}
