"""`--gpumem-footprint=trace`: the lines of the user's code behind a test's memory, and their text in the report of a failed test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from pytest_gpumem.devices.allocation_sites import is_allowed, sites
from pytest_gpumem.devices.memory_events import Series
from pytest_gpumem.devices.protocol import MemoryWatch
from pytest_gpumem.judging.differences import fails_by_memory, memory_differences
from pytest_gpumem.outcomes import Code
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Row


def traced(
    footprint: Footprint, watch: MemoryWatch, allowed: Sequence[str], root: Path
) -> Footprint:
    """Return a footprint with the lines that allocated, where allocations are traced.

    `footprint`: as just read from `watch`, which is of the test or of a part of it.
    `allowed`: the lines that `allow_kept` names, whose kept memory is left out.
    """
    accounts = watch.accounts()
    kept = []
    if footprint.ended and footprint.kept:
        for event in accounts.kept:
            if not is_allowed(event, allowed, root):
                kept.append(event)
    return replace(footprint, sites=sites(accounts.at_peak, kept, root))


def without_allowed(
    footprint: Footprint, watch: MemoryWatch, patterns: Sequence[str], root: Path
) -> Footprint:
    """A footprint whose kept memory leaves out what was allocated by lines that `allow_kept` names. Memory of an unknown line counts. A
    free that the log missed counts as a free of memory from a named line.
    `footprint`: as just read from `watch`.
    """
    if not patterns or not footprint.ended or not footprint.kept:
        return footprint
    named, others = Counter[Series](), Counter[Series]()
    for one in watch.accounts().kept:
        (named if is_allowed(one, patterns, root) else others)[one.series] += one.nbytes
    uses = []
    for use in footprint.uses:
        series = use.library, use.kind
        counting = max(use.kept - named[series], min(use.kept, others[series]))
        uses.append(
            replace(use, kept=counting, allowed=use.kept - counting) if use.kept > 0 else use
        )
    return replace(footprint, uses=tuple(uses))


def with_lines(row: Row, session: GpuSession) -> Row:
    """A row that fails by its memory, with the lines that took it; unchanged unless allocations were traced."""
    if row.footprint is None or not fails_by_memory(row):
        return row
    past = session.baseline.reference_runs(row, "memory")
    lines = memory_differences(past[-1].footprint if past else None, row.footprint)
    return replace(
        row,
        differences=(
            *lines,
            *(difference for difference in row.differences if difference.site is None),
        ),
    )


def memory_texts(rows: Sequence[Row], session: GpuSession) -> list[str]:
    """How to find the lines of a row that takes too much memory, if nothing traced them."""
    traced = session.settings.footprint == "trace"
    if not traced and any(row.verdict.code is Code.TOO_MUCH_MEMORY for row in rows):
        return ["--gpumem-footprint=trace names the lines that allocated"]
    return []
