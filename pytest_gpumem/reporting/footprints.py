"""Footprints as text: the memory of one test, and which tests of a run take and keep most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import short_bytes

SHOWN = 3
"""Tests that the totals of a run name."""


def footprint_facts(footprint: Footprint) -> Iterator[tuple[str, str]]:
    """Terms and texts: peak, kept, reserved, allocations, and what was not seen."""
    if footprint.watched:
        yield "peak memory", _of_uses(footprint.peak, footprint, "peak", "device")
        if (footprint.driver_peak or 0) > footprint.peak:
            yield "from the driver", f"{short_bytes(_needed(footprint))} at most: pools hold more than is in use"
        for name, peak in (("managed", footprint.managed_peak), ("pinned", footprint.pinned_peak)):
            if peak:
                yield f"peak, {name}", _of_uses(peak, footprint, "peak", name)
        if footprint.ended:
            yield "kept", _of_uses(footprint.kept, footprint, "kept")
        if footprint.ended and footprint.reserved:
            yield "reserved", f"{_of_uses(footprint.reserved, footprint, 'reserved')}; pools hold it and nobody uses it"
        if footprint.allocations:
            yield "allocations", f"{footprint.allocations}, the largest {short_bytes(footprint.largest)}"
    if footprint.bound:
        yield "not told apart", f"up to {short_bytes(footprint.bound)} more were taken, by the free memory of the GPU"
    for reason in footprint.not_watched:
        yield "not watched", reason


def totals(rows: Sequence[Row]) -> list[str]:
    """Sentences on the tests that take most and keep most, and on the free memory that they need; none where no memory was taken."""
    watched = [(row, row.footprint) for row in rows if row.footprint is not None and not row.label]
    found = []
    for word, name in (("most memory", "peak"), ("kept", "kept")):
        taking = sorted(
            ((getattr(footprint, name), row.nodeid) for row, footprint in watched if getattr(footprint, name) > 0), reverse=True
        )
        if taking:
            shown = ", ".join(f"{short_bytes(nbytes)} by {nodeid}" for nbytes, nodeid in taking[:SHOWN])
            of = f" ({counted(len(taking), 'test')} of {len(watched)})" if name == "kept" else ""
            found.append(f"{word}{of}: {shown}")
    if needed := max((_needed(footprint) for _, footprint in watched if footprint.driver_peak is not None), default=0):
        found.append(f"free memory that the tests need: {short_bytes(needed)}, and the context (gpumem doctor prints what is free)")
    return found


def _needed(footprint: Footprint) -> int:
    """Bytes that must be free for a test that starts with empty pools: in an earlier test's pools it finds some."""
    return max(footprint.peak, footprint.driver_peak or 0)


def _of_uses(total: int, footprint: Footprint, name: str, kind: str | None = None) -> str:
    """A total, and the libraries that it is made of where there are several or one of another kind."""
    uses = [use for use in footprint.uses if getattr(use, name) > 0 and kind in (None, use.kind)]
    parts = ", ".join(f"{_library(use)} {short_bytes(getattr(use, name))}" for use in sorted(uses, key=lambda use: -getattr(use, name)))
    return short_bytes(total) + (f" ({parts})" if parts else "")


def _library(use: MemoryUse) -> str:
    return use.library if use.kind == "device" else f"{use.library} {use.kind}"
