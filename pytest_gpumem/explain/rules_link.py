"""Rules about the host link: pages of managed memory, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.explain.rule import GAP_SECONDS, Found
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.traffic import size
from pytest_gpumem.records.uses import CopyUse
from pytest_gpumem.units import format_rate

if TYPE_CHECKING:
    from pytest_gpumem.explain.figures import Figures
    from pytest_gpumem.explain.model import Sides


GROUP_SECONDS = 20e-6
"""Seconds that one group of GPU page faults takes at least beside its copies: interrupt, page tables, replay (about 20 us on Pascal and
later; Allen and Ge 2021, "In-depth analyses of unified virtual memory system for GPU accelerated computing")."""
CPU_FAULT_SECONDS = 10e-6
"""Seconds that one page fault of the host takes at least beside its copy."""
LINK_RATE = 25e9
"""Bytes per second over the host link where the device does not say: PCIe Gen4 x16."""
PAGEABLE_RATE = 10e9
"""Bytes per second of a copy of pageable memory, about: 9.3 GB/s to an H200, 17.5 GB/s from it (ci/records/nvidia-h200/host_link.json)."""
LINK_USE = 0.85
"""Share of a link's theoretical rate that copies reach."""
SMALL = 64 * 1024
"""Bytes below which copies and migrations are not worth a word."""
FEW_FAULTS = 8
"""Page faults below which none is worth a word."""
MORE_FAULTS = 0.25
"""Share by which page faults must grow besides."""
LOCKED = ("pinned", "registered")

_WAYS = {"H2D": "from host to device", "D2H": "from device to host", "D2D": "within the device", "P2P": "between devices", "memset": "set"}


def page_faults(sides: Sides, threshold: float) -> Found | None:
    """GPU page faults that were not there."""
    was, now = sides.base.pages, sides.head.pages
    assert was is not None
    assert now is not None
    if now.gpu_faults < was.gpu_faults * (1 + threshold) + FEW_FAULTS:
        return None
    moved = max(0, now.migrated - was.migrated)
    seconds = max(0, now.gpu_groups - was.gpu_groups) * GROUP_SECONDS + moved / link_rate(sides.head)
    before = "where there were none" if was.gpu_faults == 0 else f"where there were {was.gpu_faults}"
    if was.gpu_faults == 0 and sides.base.prefetched and sides.head.prefetched < sides.base.prefetched / 2:
        why = "the prefetch is gone"
    elif now.causes.get("eviction", 0) > was.causes.get("eviction", 0):
        why = "managed memory no longer fits, pages are evicted"
    else:
        why = "pages are not where the kernel runs when it touches them"
    sentence = f"{counted(now.gpu_faults, 'GPU page fault')} {before}: {why}; {size(now.migrated)} move during the launch"
    sentence += f", before {size(was.migrated)}" if was.migrated else ""
    evidence = (
        ("gpu_page_faults", float(was.gpu_faults), float(now.gpu_faults)),
        ("migrated", float(was.migrated), float(now.migrated)),
        ("prefetched_before", float(sides.base.prefetched), float(sides.head.prefetched)),
    )
    return Found(sentence, seconds, evidence, open=True)


def migrations(sides: Sides, threshold: float) -> Found | None:
    """Pages that move during the launch, beyond what more faults bring."""
    was, now = sides.base.pages, sides.head.pages
    assert was is not None
    assert now is not None
    if now.migrated < was.migrated * (1 + threshold) + SMALL or page_faults(sides, MORE_FAULTS) is not None:
        return None
    cause = max(now.causes, key=lambda name: now.causes[name] - was.causes.get(name, 0), default="")
    by = f", by {cause}" if cause else ""
    faults = max(0, now.cpu_faults - was.cpu_faults)
    host = f"; {counted(now.cpu_faults, 'page fault')} of the host, before {was.cpu_faults}" if faults >= FEW_FAULTS else ""
    sentence = f"managed memory that moves during a launch {size(was.migrated)} → {size(now.migrated)}{by}{host}"
    seconds = (now.migrated - was.migrated) / link_rate(sides.head) + faults * CPU_FAULT_SECONDS
    return Found(sentence, seconds, (("migrated", float(was.migrated), float(now.migrated)),), open=True)


def stays_on_host(sides: Sides, threshold: float) -> Found | None:
    """Managed memory that the device reads over the link."""
    was, now = sides.base.pages, sides.head.pages
    if was is None or now is None or was.mapped is None or now.mapped is None or now.mapped < was.mapped * (1 + threshold) + SMALL:
        return None
    if now.migrated > was.migrated + SMALL:
        return None
    sentence = f"{size(now.mapped)} of managed memory are mapped where they lie and read over the link, before {size(was.mapped)}"
    evidence = (("mapped", float(was.mapped), float(now.mapped)),)
    return Found(sentence, (now.mapped - was.mapped) / link_rate(sides.head), evidence, open=True)


def link_rate(figures: Figures) -> float:
    """Bytes per second that copies over the host link reach."""
    return LINK_USE * (figures.facts.link_bandwidth or LINK_RATE)


def _of(copies: Sequence[CopyUse], kind: str, *, pageable: bool | None = None) -> list[CopyUse]:
    found = [copy for copy in copies if copy.kind == kind]
    return found if pageable is None else [copy for copy in found if ("pageable" in (copy.source, copy.destination)) == pageable]


def _bytes(copies: Sequence[CopyUse]) -> int:
    return sum(copy.nbytes for copy in copies)


def _seconds(copies: Sequence[CopyUse]) -> float:
    return sum(copy.nanoseconds for copy in copies) / 1e9


def pageable(sides: Sides, threshold: float) -> Found | None:
    """Copies of pageable memory where it was page-locked."""
    was, now = sides.base.copies, sides.head.copies
    if was is None or now is None:
        return _pageable_by_name(sides)
    for kind in ("H2D", "D2H"):
        before, after = _of(was, kind), _of(now, kind)
        slow, fast = _of(after, kind, pageable=True), _of(before, kind, pageable=False)
        had = _bytes(_of(before, kind, pageable=True))
        if _bytes(slow) < had + max(SMALL, threshold * _bytes(after)) or _bytes(fast) <= _bytes(_of(after, kind, pageable=False)):
            continue
        rates = [_bytes(copies) / seconds if (seconds := _seconds(copies)) else None for copies in (fast, slow)]
        # The same bytes at the rate that they had.
        ideal = _bytes(slow) / rates[0] if rates[0] else _bytes(slow) / link_rate(sides.base)
        estimate = max(0.0, _seconds(slow) - ideal, _bytes(slow) / PAGEABLE_RATE - ideal if not _seconds(slow) else 0.0)
        shown = f", {format_rate(rates[0])} → {format_rate(rates[1])}" if rates[0] and rates[1] else ""
        evidence = (("pageable_bytes", float(had), float(_bytes(slow))), ("copy_seconds", _seconds(before), _seconds(after)))
        return Found(f"pageable instead of pinned: {size(_bytes(slow))} {_WAYS[kind]} in each launch{shown}", estimate, evidence, open=True)
    return _pageable_by_name(sides)


def _pageable_by_name(sides: Sides) -> Found | None:
    """The same by the arguments' kinds, where the copies themselves were not seen."""
    was, now = sides.base.host_memory, sides.head.host_memory
    names = [name for name, kind in now.items() if kind == "pageable" and was.get(name) in LOCKED]
    traffic = sides.head.measurement.traffic
    if not names or traffic is None:
        return None
    seconds = traffic.total / PAGEABLE_RATE - traffic.total / link_rate(sides.base)
    return Found(f"pageable instead of {was[names[0]]}: {', '.join(names)}", max(0.0, seconds), open=True)


def more_copies(sides: Sides, threshold: float) -> Found | None:
    """Copies or memsets in each launch that were not there, or of more bytes."""
    was, now = sides.base.copies, sides.head.copies
    assert was is not None
    assert now is not None
    told, seconds, waits, evidence = [], 0.0, False, list[tuple[str, float | None, float | None]]()
    for kind in dict.fromkeys(copy.kind for copy in now):
        before, after = _of(was, kind), _of(now, kind)
        more, many = _bytes(after) - _bytes(before), sum(c.count for c in after) - sum(c.count for c in before)
        if more < threshold * _bytes(before) + SMALL and many <= 0:
            continue
        grown = 1 - _bytes(before) / _bytes(after) if more > 0 else 0.0
        seconds += _seconds(after) * grown + max(0, many) * GAP_SECONDS
        way, kinds = _WAYS.get(kind, kind), sorted({one for c in after for one in (c.source, c.destination) if one not in ("", "device")})
        noun = "memset" if kind == "memset" else "copy"
        number = sum(c.count for c in after)
        noun = noun if number == 1 else {"copy": "copies", "memset": "memsets"}[noun]
        old = f", before {size(_bytes(before))} in {sum(c.count for c in before)}" if before else ", before none"
        of = f" of {'/'.join(kinds)} memory" if kinds and kind != "memset" else ""
        waits = waits or "pageable" in kinds
        told.append(f"{number} {noun}{of} {way if kind != 'memset' else ''}".rstrip() + f" of {size(_bytes(after))} in each launch{old}")
        evidence.append((f"{kind}_bytes", float(_bytes(before)), float(_bytes(after))))
    # The host waits for a copy of pageable memory, and what it would have launched meanwhile begins late.
    return Found("; ".join(told), seconds, tuple(evidence), open=waits) if told else None
