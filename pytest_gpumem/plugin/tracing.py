"""`--gpumem-footprint=trace`: the lines of the user's code behind a test's memory, and their text in the report of a failed test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.allocation_sites import sites
from pytest_gpumem.devices.protocol import MemoryWatch
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.footprints import memory_reasons, site_lines


def traced(footprint: Footprint, watch: MemoryWatch, item: pytest.Item, session: GpuSession) -> Footprint:
    """A footprint with the lines that allocated; unchanged unless allocations are traced.
    `footprint`: as just read from `watch`.
    `watch`: of the test or of a part of it.
    """
    if session.settings.footprint != "trace":
        return footprint
    accounts = watch.accounts()
    kept = accounts.kept if footprint.ended and footprint.kept else ()
    if not kept:
        return replace(footprint, sites=sites(accounts.at_peak, (), item.config.rootpath))
    return replace(footprint, sites=sites(accounts.at_peak, kept, item.config.rootpath, session.device.footprints.referrers()))


WATCH = ("--gpumem-footprint=trace",)


def by_memory(row: Row) -> bool:
    """True if a row fails by its memory."""
    return row.footprint is not None and any(one.limit in OF_FOOTPRINT and one.outcome is Outcome.FAIL for one in row.verdict.limits)


def with_lines(row: Row, session: GpuSession) -> Row:
    """A row that fails by its memory, with the lines that took it; unchanged unless allocations were traced."""
    if row.footprint is None or not by_memory(row):
        return row
    past = session.baseline.past_footprints(row.key)
    lines = memory_reasons(past[-1].footprint if past else None, row.footprint)
    return replace(row, why=(*row.why, *(line for line in lines if line not in row.why)))


def memory_texts(rows: Sequence[Row], session: GpuSession) -> list[str]:
    """For each failing row with a limit on memory: its largest lines, and those that grew since the baseline."""
    texts = []
    for row in rows:
        footprint = row.footprint
        if footprint is None or all(getattr(row.limits, name) is None for name in OF_FOOTPRINT):
            continue
        past = session.baseline.past_footprints(row.key)
        lines = site_lines(footprint, past[-1].footprint if past else None)
        if not lines and row.verdict.code is Code.TOO_MUCH_MEMORY:
            lines = ["--gpumem-footprint=trace names the lines that allocated"]
        if lines:
            texts.append("\n".join(printable(lines)))
    return texts
