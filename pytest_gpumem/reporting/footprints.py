"""Footprints as text: the memory of a test, the lines that take it, and the tests of a run that take and keep most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gpumem.judging.differences import bytes_of, grown_lines
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.difference import KEPT, PEAK, Difference
from pytest_gpumem.records.footprint import Footprint, MemoryUse, Site
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import short_bytes


def footprint_facts(footprint: Footprint) -> Iterator[tuple[str, str]]:
    """Terms and texts: peak, kept, reserved, allocations, and what was not seen."""
    if footprint.watched:
        yield "peak memory", _of_uses(footprint.peak, footprint, "peak", "device")
        if (footprint.driver_peak or 0) > footprint.peak:
            yield (
                "from the driver",
                f"{short_bytes(footprint.needed)} at most: pools hold more than is in use",
            )
        for name, peak in (("managed", footprint.managed_peak), ("pinned", footprint.pinned_peak)):
            if peak:
                yield f"peak, {name}", _of_uses(peak, footprint, "peak", name)
        if footprint.ended:
            yield "kept", _of_uses(footprint.kept, footprint, "kept")
        if footprint.ended and footprint.reserved:
            yield (
                "reserved",
                f"{_of_uses(footprint.reserved, footprint, 'reserved')}; pools hold it and nobody uses it",
            )
        if footprint.allocations:
            yield (
                "allocations",
                f"{footprint.allocations}, the largest {short_bytes(footprint.largest)}",
            )
    if footprint.bound:
        yield (
            "not told apart",
            f"up to {short_bytes(footprint.bound)} more were taken, by the free memory of the GPU",
        )
    for reason in footprint.not_watched:
        yield "not watched", reason
    if footprint.waits is not None:
        yield "waits", footprint.waits.not_read or footprint.waits.text or "none"


def totals(rows: Sequence[Row]) -> list[str]:
    """Sentences on the tests that take most and keep most, and on the free memory that they need; none where no memory was taken."""
    watched = [(row, row.footprint) for row in rows if row.footprint is not None and not row.label]
    found = []
    for word, name in (("most memory", "peak"), ("kept", "kept")):
        taking = sorted(
            (
                (getattr(footprint, name), row.nodeid)
                for row, footprint in watched
                if getattr(footprint, name) > 0
            ),
            reverse=True,
        )
        if taking:
            shown = ", ".join(
                f"{short_bytes(nbytes)} by {nodeid}" for nbytes, nodeid in taking[:SHOWN]
            )
            of = f" ({counted(len(taking), 'test')} of {len(watched)})" if name == "kept" else ""
            found.append(f"{word}{of}: {shown}")
    if needed := max(
        (footprint.needed for _, footprint in watched if footprint.driver_peak is not None),
        default=0,
    ):
        found.append(
            f"free memory that the tests need: {short_bytes(needed)}, and the context (gpumem doctor prints what is free)"
        )
    return found


def wait_totals(rows: Sequence[Row]) -> list[str]:
    """A sentence on the lines at which the host waits most; none where it does not wait."""
    lines: Counter[str] = Counter()
    tests = 0
    for row in rows:
        waits = row.footprint.waits if row.footprint is not None else None
        if waits is not None and waits.lines:
            tests += 1
            for line in waits.lines:
                lines[line.place] += line.count
    if not lines:
        return []
    most = ", ".join(f"{place} {count} x" for place, count in lines.most_common(SHOWN))
    times, places = counted(lines.total(), "time"), counted(len(lines), "line")
    return [f"the host waits {times} in {counted(tests, 'test')}, at {places}: {most}"]


def _of_uses(total: int, footprint: Footprint, name: str, kind: str | None = None) -> str:
    """A total, and the libraries that it is made of; with the part of each where there are several."""
    uses = [use for use in footprint.uses if getattr(use, name) > 0 and kind in (None, use.kind)]
    if len(uses) == 1:
        return f"{short_bytes(total)} ({_library(uses[0])})"
    parts = ", ".join(
        f"{_library(use)} {short_bytes(getattr(use, name))}"
        for use in sorted(uses, key=lambda use: -getattr(use, name))
    )
    return short_bytes(total) + (f" ({parts})" if parts else "")


def _library(use: MemoryUse) -> str:
    return use.library if use.kind == "device" else f"{use.library} {use.kind}"


SHOWN = 3
"""Tests that the totals of a run name; lines, and changes, that a failed test's report shows."""
_NO_PYTHON = "a thread without Python code, such as PyTorch's backward pass"


def site_lines(footprint: Footprint, base: Footprint | None = None) -> list[str]:
    """The largest sites at the peak and of what is kept, each list with its changes since the baseline.
    `footprint`: of this run; without sites there are no lines.
    `base`: of the newest run of the baseline; None if there is none.
    """
    lines: list[str] = []
    for title, kind in (("in use at the peak", PEAK), ("kept", KEPT)):
        sites = [site for site in footprint.sites if bytes_of(site, kind)]
        sites.sort(key=lambda site: -bytes_of(site, kind))
        if not sites:
            continue
        number = sum(_count(site, kind) for site in sites)
        lines.append(
            f"{title}, {short_bytes(sum(bytes_of(site, kind) for site in sites))} in {counted(number, 'allocation')}:"
        )
        for site in sites[:SHOWN]:
            lines.append(
                f"  {short_bytes(bytes_of(site, kind))}  {place(site)}  ({allocations_of(site, kind)})"
            )
        grown = (
            [] if base is None or not base.sites else grown_lines(base.sites, footprint.sites, kind)
        )
        if grown:
            lines.append("since the baseline:")
            lines += [_grown(difference) for difference in grown]
    if (
        lines
        and base is not None
        and not base.sites
        and (footprint.peak > base.peak or footprint.kept > base.kept)
    ):
        lines.append(
            "the baseline was saved without --gpumem-footprint=trace: which line grew is not known"
        )
    return lines


def growths(base: Footprint, head: Footprint) -> list[str]:
    """Peak and kept memory of a test, as far as they changed."""
    lines = []
    for title, was, now in (
        ("peak memory", base.peak, head.peak),
        ("kept memory", base.kept, head.kept),
    ):
        if was != now:
            lines.append(
                f"{title} {short_bytes(was)} -> {short_bytes(now)} ({'+' if now > was else ''}{short_bytes(now - was)})"
            )
    return lines


def place(site: Site) -> str:
    """The place of a site in one line: "model.py:12 in forward: y = a * b"."""
    if not site.file:
        return _NO_PYTHON
    return f"{site.file}:{site.line} in {site.function}" + (f": {site.code}" if site.code else "")


def allocations_of(site: Site, kind: str) -> str:
    """The library of a site and the number of its allocations: "PyTorch, 3 allocations". `kind`: `PEAK` or `KEPT`."""
    memory = "" if site.kind == "device" else f" {site.kind}"
    return f"{site.library}{memory}, {counted(_count(site, kind), 'allocation')}"


def before_text(difference: Difference) -> str:
    """What a line that grew took before: "64 MiB before", with its text where that was another."""
    assert isinstance(difference.was, int)
    if not difference.was:
        return "new"
    before = f"{short_bytes(difference.was)} before"
    return f"{before}, by {difference.name}" if difference.name else before


def _grown(difference: Difference) -> str:
    assert difference.site is not None
    assert isinstance(difference.was, int)
    assert isinstance(difference.now, int)
    return f"  +{short_bytes(difference.now - difference.was)}  {place(difference.site)}  ({before_text(difference)})"


def _count(site: Site, kind: str) -> int:
    return site.at_peak_count if kind == PEAK else site.kept_count
