"""The lines that take memory, as text: the largest of them, and what changed against the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.sites import SiteChange, site_changes
from pytest_gpumem.records.footprint import Footprint, Site
from pytest_gpumem.units import short_bytes

SHOWN = 3
"""Lines, and changes, that a failed test's report shows."""
_NO_PYTHON = "a thread without Python code, such as PyTorch's backward pass"


def site_lines(footprint: Footprint, base: Footprint | None = None) -> list[str]:
    """The largest sites at the peak and of what is kept, each list with its changes since the baseline.

    Args:
        footprint: of this run; without sites there are no lines.
        base: of the newest run of the baseline; None if there is none.
    """
    lines: list[str] = []
    for title, name in (("in use at the peak", "at_peak"), ("kept", "kept")):
        sites = sorted((site for site in footprint.sites if getattr(site, name)), key=lambda site: -getattr(site, name))
        if sites:
            lines.append(f"{title}, {_total(sites, name)}:")
            lines += [line for site in sites[:SHOWN] for line in _site(site, name)]
        if sites and base is not None and base.sites:
            lines += _changes(site_changes(base.sites, footprint.sites, lambda site, name=name: int(getattr(site, name))))  # type: ignore[misc]
    if lines and base is not None and not base.sites:
        lines.append("the baseline was saved without --gpumem-footprint=trace: which line grew is not known")
    return lines


def growth_lines(base: Footprint, head: Footprint) -> list[str]:
    """What changed in the memory of a test, and the lines that grew; empty if nothing did."""
    lines = []
    for title, name in (("peak memory", "peak"), ("kept memory", "kept")):
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            lines.append(f"{title} {short_bytes(was)} -> {short_bytes(now)} ({'+' if now > was else ''}{short_bytes(now - was)})")
    if lines and base.sites and head.sites:
        for name in ("at_peak", "kept"):
            lines += _changes(site_changes(base.sites, head.sites, lambda site, name=name: int(getattr(site, name))))[1:]  # type: ignore[misc]
    return lines


def peak_stack(footprint: Footprint) -> list[str]:
    """The lines of the user's code that led to the largest site at the peak, the outermost first."""
    largest = max(footprint.sites, key=lambda site: site.at_peak, default=None)
    return ["the way to the largest:", *(f"  {line}" for line in largest.stack)] if largest is not None and len(largest.stack) > 1 else []


def place(site: Site) -> str:
    """Where a site is, in one line: "model.py:12 in forward: y = a * b"."""
    if not site.file:
        return _NO_PYTHON
    return f"{site.file}:{site.line} in {site.function}" + (f": {site.code}" if site.code else "")


def _total(sites: Sequence[Site], name: str) -> str:
    nbytes, count = (sum(getattr(site, each) for site in sites) for each in (name, f"{name}_count"))
    return f"{short_bytes(nbytes)} in {counted(count, 'allocation')}"


def _site(site: Site, name: str) -> list[str]:
    number = getattr(site, f"{name}_count")
    kind = "" if site.kind == "device" else f" {site.kind}"
    lines = [f"  {short_bytes(getattr(site, name))}  {place(site)}  ({site.library}{kind}, {counted(number, 'allocation')})"]
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
