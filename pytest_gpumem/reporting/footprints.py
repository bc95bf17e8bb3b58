"""Footprints as text: the memory of a test, the lines that take it, and the tests of a run that take and keep most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import attrgetter

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.footprint import Footprint, MemoryUse, Site
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.calls import call_facts, call_totals
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
    if footprint.calls is not None:
        yield from call_facts(footprint.calls)


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
    return [
        *found,
        *call_totals(footprint.calls for _, footprint in watched if footprint.calls is not None),
    ]


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


ALIKE = 0.5  # two lines of one function with at least this similarity (`SequenceMatcher.ratio`) count as one changed line

_Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class SiteChange:
    """One line in both runs."""

    site: Site  # as it is now; as it was where it allocates nothing now
    before: int  # bytes in the baseline
    after: int  # bytes now
    was: str = ""  # text of the line in the baseline, where it was another

    @property
    def growth(self) -> int:
        return self.after - self.before


def site_changes(base: Sequence[Site], head: Sequence[Site], name: str) -> tuple[SiteChange, ...]:
    """The lines whose bytes (`name`: "at_peak" or "kept") changed, the largest growth first. Lines are the same if file, function, text,
    library and kind of memory are: a line that only moved is the same. Two other lines of one function with similar text count as one
    changed line."""
    before, after = _by_line(base), _by_line(head)
    was = {key: key for key in after if key in before}
    gone = [key for key in before if key not in after]
    for key in after:
        if key in was:
            continue
        alike = max(
            (one for one in gone if one[0] == key[0] and one[2:] == key[2:]),
            key=lambda one: _similarity(one, key),
            default=None,
        )
        if alike is not None and _similarity(alike, key) >= ALIKE:
            was[key] = alike
            gone.remove(alike)
    of, found = attrgetter(name), []

    def total(sites: Iterable[Site]) -> int:
        return sum(map(of, sites))

    for key, sites in after.items():
        old = was.get(key)
        text = old[1] if old is not None and old[1] != key[1] else ""
        found.append(
            SiteChange(
                max(sites, key=of), 0 if old is None else total(before[old]), total(sites), text
            )
        )
    found += [SiteChange(max(before[key], key=of), total(before[key]), 0) for key in gone]
    return tuple(sorted((one for one in found if one.growth), key=lambda one: -one.growth))


def _by_line(sites: Iterable[Site]) -> dict[_Key, list[Site]]:
    found: dict[_Key, list[Site]] = {}
    for site in sites:
        # A line whose text cannot be read is told by its number.
        key = (site.file, site.code or str(site.line), site.function, site.library, site.kind)
        found.setdefault(key, []).append(site)
    return found


def _similarity(one: _Key, other: _Key) -> float:
    return SequenceMatcher(None, one[1], other[1], autojunk=False).ratio()


SHOWN = 3
"""Tests that the totals of a run name; lines, and changes, that a failed test's report shows."""
_NO_PYTHON = "a thread without Python code, such as PyTorch's backward pass"


def site_lines(footprint: Footprint, base: Footprint | None = None) -> list[str]:
    """The largest sites at the peak and of what is kept, each list with its changes since the baseline.
    `footprint`: of this run; without sites there are no lines.
    `base`: of the newest run of the baseline; None if there is none.
    """
    lines: list[str] = []
    for title, name in (("in use at the peak", "at_peak"), ("kept", "kept")):
        sites = sorted(
            (site for site in footprint.sites if getattr(site, name)),
            key=lambda site: -getattr(site, name),
        )
        if sites:
            lines.append(f"{title}, {_total(sites, name)}:")
            lines += [line for site in sites[:SHOWN] for line in _site(site, name)]
        if sites and base is not None and base.sites:
            lines += _changes(site_changes(base.sites, footprint.sites, name))
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
    for title, name in (("peak memory", "peak"), ("kept memory", "kept")):
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            lines.append(
                f"{title} {short_bytes(was)} -> {short_bytes(now)} ({'+' if now > was else ''}{short_bytes(now - was)})"
            )
    return lines


def growth_lines(base: Footprint, head: Footprint) -> list[str]:
    """What changed in the memory of a test, and the lines that grew; empty if nothing did."""
    lines = growths(base, head)
    if lines and base.sites and head.sites:
        for name in ("at_peak", "kept"):
            lines += _changes(site_changes(base.sites, head.sites, name))[1:]
    return lines


def memory_reasons(base: Footprint | None, head: Footprint) -> list[str]:
    """Lines of `Row.why`: what grew in the memory of a test and the lines that it comes from; its largest lines where none grew.
    `base`: None if it is unknown.
    """
    lines = growth_lines(base, head) if base is not None and base.sites else []
    if any(line.startswith(" ") for line in lines):
        return lines
    name = "at_peak" if any(site.at_peak for site in head.sites) else "kept"
    largest = sorted(
        (site for site in head.sites if getattr(site, name)), key=lambda site: -getattr(site, name)
    )
    return [_site(site, name)[0] for site in largest[:SHOWN]]


def peak_stack(footprint: Footprint) -> list[str]:
    """The lines of the user's code that led to the largest site at the peak, the outermost first."""
    largest = max(footprint.sites, key=lambda site: site.at_peak, default=None)
    return (
        ["the way to the largest:", *(f"  {line}" for line in largest.stack)]
        if largest is not None and len(largest.stack) > 1
        else []
    )


def place(site: Site) -> str:
    """The place of a site in one line: "model.py:12 in forward: y = a * b"."""
    if not site.file:
        return _NO_PYTHON
    return f"{site.file}:{site.line} in {site.function}" + (f": {site.code}" if site.code else "")


def _total(sites: Sequence[Site], name: str) -> str:
    nbytes, count = (sum(getattr(site, each) for site in sites) for each in (name, f"{name}_count"))
    return f"{short_bytes(nbytes)} in {counted(count, 'allocation')}"


def _site(site: Site, name: str) -> list[str]:
    number = getattr(site, f"{name}_count")
    kind = "" if site.kind == "device" else f" {site.kind}"
    lines = [
        f"  {short_bytes(getattr(site, name))}  {place(site)}  ({site.library}{kind}, {counted(number, 'allocation')})"
    ]
    if name == "kept":
        lines += [f"    kept by {referrer}" for referrer in site.referrers]
    return lines


def _changes(changes: Sequence[SiteChange]) -> list[str]:
    grown = [change for change in changes if change.growth > 0][:SHOWN]
    return ["since the baseline:", *(_change(change) for change in grown)] if grown else []


def _change(change: SiteChange) -> str:
    if not change.before:
        was = "new"
    elif change.was:
        was = f"{short_bytes(change.before)} before, by {change.was}"
    else:
        was = f"{short_bytes(change.before)} before"
    return f"  +{short_bytes(change.growth)}  {place(change.site)}  ({was})"
