"""Rules about the host link: pages of managed memory, and copies."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.model import GAP_SECONDS, BaseAndHead, Estimate, Need, Pair, Rule
from pytest_gpumem.records.uses import CopyUse

GROUP_SECONDS = 20e-6
"""Least seconds of one group of GPU page faults besides its copies: interrupt, page tables, replay (about 20 us on Pascal and later;
Allen and Ge 2021, "In-depth analyses of unified virtual memory system for GPU accelerated computing")."""
CPU_FAULT_SECONDS = 10e-6  # least seconds of one page fault of the host besides its copy
LINK_RATE = 25e9
"""Bytes per second over the host link where the device does not report it: PCIe Gen4 x16."""
PAGEABLE_RATE = 10e9
"""Bytes per second of a copy of pageable memory: 6.5 GB/s to an H200, 13.6 GB/s from it (ci/records/nvidia-h200/suite.json)."""
LINK_USE = 0.85  # share of a link's theoretical rate that copies reach
SMALL = 64 * 1024  # bytes below which copies and migrations are ignored
FEW_FAULTS = 8  # page faults below which they are ignored
MORE_FAULTS = 0.25  # least growth of page faults
LOCKED = ("pinned", "registered")


def page_faults(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More GPU page faults."""
    was, now = sides.base.pages, sides.head.pages
    assert was is not None
    assert now is not None
    if now.gpu_faults < was.gpu_faults * (1 + threshold) + FEW_FAULTS:
        return None
    moved = max(0, now.migrated - was.migrated)
    seconds = max(0, now.gpu_groups - was.gpu_groups) * GROUP_SECONDS + moved / link_rate(
        sides.head
    )
    if (
        was.gpu_faults == 0
        and sides.base.prefetched
        and sides.head.prefetched < sides.base.prefetched / 2
    ):
        why = "prefetch gone"
    elif now.causes.get("eviction", 0) > was.causes.get("eviction", 0):
        why = "evicted"
    else:
        why = "elsewhere"
    figures: dict[str, Pair] = {
        "gpu_page_faults": (was.gpu_faults, now.gpu_faults),
        "migrated": (was.migrated, now.migrated),
        "prefetched_before": (sides.base.prefetched, sides.head.prefetched),
    }
    return Estimate(seconds, figures, {"why": why}, open=True)


def migrations(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More managed memory that moves during the launch, without more GPU page faults."""
    was, now = sides.base.pages, sides.head.pages
    assert was is not None
    assert now is not None
    if (
        now.migrated < was.migrated * (1 + threshold) + SMALL
        or page_faults(sides, MORE_FAULTS) is not None
    ):
        return None
    cause = max(now.causes, key=lambda name: now.causes[name] - was.causes.get(name, 0), default="")
    figures: dict[str, Pair] = {"migrated": (was.migrated, now.migrated)}
    faults = max(0, now.cpu_faults - was.cpu_faults)
    if faults >= FEW_FAULTS:
        figures["cpu_page_faults"] = was.cpu_faults, now.cpu_faults
    seconds = (now.migrated - was.migrated) / link_rate(sides.head) + faults * CPU_FAULT_SECONDS
    return Estimate(seconds, figures, {"why": cause}, open=True)


def stays_on_host(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More managed memory that the device reads over the link."""
    was, now = sides.base.pages, sides.head.pages
    if (
        was is None
        or now is None
        or was.mapped is None
        or now.mapped is None
        or now.mapped < was.mapped * (1 + threshold) + SMALL
    ):
        return None
    if now.migrated > was.migrated + SMALL:
        return None
    return Estimate(
        (now.mapped - was.mapped) / link_rate(sides.head),
        {"mapped": (was.mapped, now.mapped)},
        open=True,
    )


def link_rate(side: SideFigures) -> float:
    """Bytes per second that copies over the host link reach."""
    return LINK_USE * (side.facts.link_bandwidth or LINK_RATE)


def _of(copies: Sequence[CopyUse], kind: str, *, pageable: bool | None = None) -> list[CopyUse]:
    found = [copy for copy in copies if copy.kind == kind]
    return (
        found
        if pageable is None
        else [copy for copy in found if ("pageable" in (copy.source, copy.destination)) == pageable]
    )


def _bytes(copies: Sequence[CopyUse]) -> int:
    return sum(copy.nbytes for copy in copies)


def _seconds(copies: Sequence[CopyUse]) -> float:
    return sum(copy.nanoseconds for copy in copies) / 1e9


def _count(copies: Sequence[CopyUse]) -> int:
    return sum(copy.count for copy in copies)


def pageable(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Copies of pageable memory that were copies of page-locked memory."""
    was, now = sides.base.copies, sides.head.copies
    if was is None or now is None:
        return _pageable_arguments(sides)
    for kind in ("H2D", "D2H"):
        before, after = _of(was, kind), _of(now, kind)
        slow, fast = _of(after, kind, pageable=True), _of(before, kind, pageable=False)
        had, has = _bytes(_of(before, kind, pageable=True)), _bytes(slow)
        if has < had + max(SMALL, threshold * _bytes(after)) or _bytes(fast) <= _bytes(
            _of(after, kind, pageable=False)
        ):
            continue
        rates = [
            _bytes(copies) / seconds if (seconds := _seconds(copies)) else None
            for copies in (fast, slow)
        ]
        ideal = has / (rates[0] or link_rate(sides.base))
        seconds = _seconds(slow) or has / PAGEABLE_RATE
        figures: dict[str, Pair] = {
            "pageable_bytes": (had, has),
            "copy_seconds": (_seconds(before), _seconds(after)),
            "copy_rate": (rates[0], rates[1]),
        }
        return Estimate(max(0.0, seconds - ideal), figures, {"way": kind}, open=True)
    return _pageable_arguments(sides)


def _pageable_arguments(sides: BaseAndHead) -> Estimate | None:
    """The same by the kinds of the arguments, where no copies were recorded."""
    was, now = sides.base.host_memory, sides.head.host_memory
    names = [name for name, kind in now.items() if kind == "pageable" and was.get(name) in LOCKED]
    traffic = sides.head.measurement.moved_bytes
    if not names or traffic is None:
        return None
    seconds = traffic.total / PAGEABLE_RATE - traffic.total / link_rate(sides.base)
    return Estimate(
        max(0.0, seconds), {}, {"arguments": ", ".join(names), "was": was[names[0]]}, open=True
    )


def more_copies(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More copies or memsets in a launch, or larger ones."""
    was, now = sides.base.copies, sides.head.copies
    assert was is not None
    assert now is not None
    seconds, figures, details = 0.0, dict[str, Pair](), dict[str, str]()
    for kind in dict.fromkeys(copy.kind for copy in now):
        before, after = _of(was, kind), _of(now, kind)
        more, many = _bytes(after) - _bytes(before), _count(after) - _count(before)
        if more < threshold * _bytes(before) + SMALL and many <= 0:
            continue
        grown = 1 - _bytes(before) / _bytes(after) if more > 0 else 0.0
        seconds += _seconds(after) * grown + max(0, many) * GAP_SECONDS
        figures[f"{kind}_bytes"], figures[f"{kind}_count"] = (
            (_bytes(before), _bytes(after)),
            (_count(before), _count(after)),
        )
        kinds = {one for copy in after for one in (copy.source, copy.destination)} - {"", "device"}
        details[f"{kind}_memory"] = "/".join(sorted(kinds))
    # The host waits for a copy of pageable memory, so its next launch starts late.
    waits = any("pageable" in kinds for kinds in details.values())
    return Estimate(seconds, figures, details, open=waits) if figures else None


COPIES = Need(
    "needs a record of CUPTI or of nsys on both sides",
    lambda s: s.base.copies is not None and s.head.copies is not None,
)
KINDS = Need(
    "needs a record of CUPTI on both sides",
    lambda s: (
        (s.base.copies is not None and s.head.copies is not None)
        or bool(s.base.host_memory and s.head.host_memory)
    ),
)
PAGES = Need(
    "needs page counts (CUPTI) on both sides",
    lambda s: s.base.pages is not None and s.head.pages is not None,
)

_FAULTS = f"groups × {GROUP_SECONDS * 1e6:g} us + migrated bytes over the link's rate; open above"
_OVER_LINK = "bytes over the link's rate; open above"
_SLOWER_COPY = "time of the copies less their time at the rate that they had; open above"
ITS_TIME = f"their running time + {GAP_SECONDS * 1e6:g} us for each"

RULES = (
    Rule(
        "page faults",
        "GPU page faults in a launch",
        MORE_FAULTS,
        f"more, and {FEW_FAULTS} besides",
        _FAULTS,
        (PAGES,),
        page_faults,
    ),
    Rule(
        "migrations",
        "managed memory that moves in a launch",
        0.1,
        "more bytes",
        _OVER_LINK,
        (PAGES,),
        migrations,
    ),
    Rule(
        "stays on the host",
        "managed memory read over the link",
        0.1,
        "more bytes",
        _OVER_LINK,
        (PAGES,),
        stays_on_host,
    ),
    Rule(
        "pageable",
        "kind of host memory that copies use",
        0.05,
        "of the copied bytes",
        _SLOWER_COPY,
        (KINDS,),
        pageable,
    ),
    Rule(
        "more copies",
        "copies and memsets in a launch",
        0.05,
        "more bytes, or one more",
        ITS_TIME,
        (COPIES,),
        more_copies,
    ),
)
