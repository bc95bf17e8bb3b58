"""Rules about kernels: persisting windows, access patterns, bytes, misses in L2, shapes and clocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.model import (
    GAP_SECONDS,
    AccessChange,
    BaseAndHead,
    Estimate,
    Need,
    Pair,
    Rule,
)
from pytest_gpumem.explain.pairing import KernelGroup, base_names
from pytest_gpumem.explain.rules_link import ITS_TIME
from pytest_gpumem.records.measurement import Conditions, Window
from pytest_gpumem.units import MiB

# Persisting windows

THRASHES = 0.01  # share by which a window must exceed its set-aside to thrash


def _persisting(side: SideFigures) -> Window | None:
    window = side.window
    return (
        window
        if window is not None
        and window.hit == "persisting"
        and window.set_aside > 0
        and window.nbytes > 0
        else None
    )


def _wanted(window: Window) -> float:
    """Bytes of a window that its hit ratio selects."""
    return window.nbytes * window.hit_ratio


def _kept(window: Window) -> float:
    """Bytes of a window that its set-aside keeps in L2."""
    wanted = _wanted(window)
    # A cyclic sweep over too many bytes evicts each line before its next use: every byte above the set-aside loses one below it.
    return wanted if wanted <= window.set_aside else max(0.0, 2 * window.set_aside - wanted)


def _thrashes(window: Window | None, beyond: float) -> bool:
    return window is not None and _wanted(window) > window.set_aside * (1 + beyond)


def _window_estimate(sides: BaseAndHead, **further: Pair) -> Estimate:
    """The misses of L2, and the figures of both sides' windows."""
    was, now = sides.kernels.base, sides.kernels.head
    figures: dict[str, Pair] = {"set_aside": (sides.base.set_aside, sides.head.set_aside)}
    if sides.counted:
        figures["dram_read"] = was.dram_read, now.dram_read
    if sides.counted or None not in (was.hit_rate, now.hit_rate):
        figures["l2_hit_rate"] = was.hit_rate, now.hit_rate
    before, after = (_persisting(side) for side in (sides.base, sides.head))
    if before is not None or after is not None:
        figures["window"] = before.nbytes if before else None, after.nbytes if after else None
        figures["hit_ratio"] = (
            before.hit_ratio if before else None,
            after.hit_ratio if after else None,
        )
    return Estimate(sides.seconds_of(sides.misses), {**figures, **further}, open=True)


def window_gone(sides: BaseAndHead, _threshold: float) -> Estimate | None:
    """Base has a persisting window, head has none."""
    if _persisting(sides.base) is None or _persisting(sides.head) is not None:
        return None
    return _window_estimate(sides)


def thrashing(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Head's window selects more bytes than its set-aside holds."""
    was, now = _persisting(sides.base), _persisting(sides.head)
    return (
        _window_estimate(sides)
        if _thrashes(now, threshold) and not _thrashes(was, threshold)
        else None
    )


def keeps_less(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Head's window keeps fewer bytes in L2: smaller set-aside, hit ratio or window."""
    was, now = _persisting(sides.base), _persisting(sides.head)
    if (
        was is None
        or now is None
        or _thrashes(now, THRASHES)
        or _kept(now) >= _kept(was) * (1 - threshold)
    ):
        return None
    return _window_estimate(sides, kept=(_kept(was), _kept(now)))


def set_aside_too_large(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Head sets more of L2 aside, and its window keeps no more bytes."""
    before, after = sides.base.set_aside, sides.head.set_aside
    if (
        before is None
        or after is None
        or after < before + max(threshold * sides.head.facts.l2_bytes, 1)
    ):
        return None
    was, now = _persisting(sides.base), _persisting(sides.head)
    if now is not None and (
        was is None or _kept(now) > _kept(was) * 1.01 or _thrashes(now, THRASHES)
    ):
        return None
    return _window_estimate(sides, l2=(sides.base.facts.l2_bytes, sides.head.facts.l2_bytes))


_MISSES = "DRAM bytes that L2 no longer saves, at what the average byte costs; open above"

WINDOW_RULES = (
    Rule("window gone", "persisting window", 0.0, "any", _MISSES, (), window_gone),
    Rule(
        "thrashing",
        "hit ratio × window over the set-aside",
        THRASHES,
        "more than fits",
        _MISSES,
        (),
        thrashing,
    ),
    Rule(
        "keeps less",
        "bytes that a window keeps in L2",
        0.05,
        "fewer bytes",
        _MISSES,
        (),
        keeps_less,
    ),
    Rule(
        "set-aside too large",
        "set-aside that no window needs",
        1 / 32,
        "more of L2",
        _MISSES,
        (),
        set_aside_too_large,
    ),
)


# Kernels and their shapes


def more_kernels(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More kernels in a launch."""
    added, gone = sides.kernels.added, sides.kernels.replaced
    many = added.count - gone.count
    if many < threshold:
        return None
    details = {
        name: base_names(kernels.names)
        for name, kernels in (("added", added), ("replaced", gone))
        if kernels.parts
    }
    counts = sides.base.kernels.count, sides.head.kernels.count
    figures: dict[str, Pair] = {
        "kernels": counts,
        "replaced_seconds": (gone.seconds, added.seconds),
    }
    return Estimate(max(0.0, added.seconds - gone.seconds) + many * GAP_SECONDS, figures, details)


def fewer_threads(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """The grid of head's longest kernel fills a smaller share of the device."""
    rooms = [
        side.facts.sm_count * side.facts.max_threads_per_sm for side in (sides.base, sides.head)
    ]
    if not sides.kernels.alike or not all(rooms):
        return None
    before, after = max(sides.kernels.alike, key=lambda one: one[1].seconds)
    was, now = (
        min(1.0, math.prod(kernel.threads) / room)
        for kernel, room in zip((before, after), rooms, strict=True)
    )
    if now > was * (1 - threshold):
        return None
    figures: dict[str, Pair] = {"resident_share": (was, now)} | _shapes(before, after)
    return Estimate(_seconds(sides, after) * (1 - now / was), figures, _kernel(sides, after))


LIVES_ON_MEMORY = 0.3  # share of the DRAM peak above which base's kernel is bound by memory


def occupancy(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Lower occupancy of a kernel that is bound by memory."""
    peak = sides.base.facts.dram_peak or math.inf
    fewer = [
        (before, after)
        for before, after in sides.kernels.alike
        if before.occupancy
        and after.occupancy
        and after.occupancy <= before.occupancy * (1 - threshold)
        if before.dram and before.seconds and before.dram / before.seconds > LIVES_ON_MEMORY * peak
    ]
    if not fewer:
        return None
    before, after = max(fewer, key=lambda one: one[1].seconds)
    was, now = before.occupancy or 0.0, after.occupancy or 0.0
    figures = {
        "occupancy": (was, now),
        "registers": (before.longest.registers, after.longest.registers),
        **_shapes(before, after),
    }
    return Estimate(
        0.0, figures, _kernel(sides, after), reserve=_seconds(sides, after) * (1 - now / was)
    )


def _shapes(before: KernelGroup, after: KernelGroup) -> dict[str, Pair]:
    (blocks, threads), (blocks_now, threads_now) = before.threads, after.threads
    return {"blocks": (blocks, blocks_now), "threads_per_block": (threads, threads_now)}


def _kernel(sides: BaseAndHead, kernel: KernelGroup) -> dict[str, str]:
    """The name of a kernel, if a launch has several."""
    return {"kernel": base_names(kernel.names)} if len(sides.kernels.pairs) > 1 else {}


def _seconds(sides: BaseAndHead, kernel: KernelGroup) -> float:
    """Seconds of head's launch that one of its kernels takes."""
    whole = sides.kernels.head.seconds
    return sides.kernel_seconds * (kernel.seconds / whole if whole else 1.0)


# Clocks


def sm_clock(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """A lower SM clock."""
    return _clock(
        sides,
        threshold,
        "sm_clock",
        lambda conditions: conditions.sm_clock_hz,
        1 - sides.memory_share,
    )


def memory_clock(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """A lower memory clock."""
    return _clock(
        sides,
        threshold,
        "memory_clock",
        lambda conditions: conditions.memory_clock_hz,
        sides.memory_share,
    )


def _clock(
    sides: BaseAndHead,
    threshold: float,
    name: str,
    of: Callable[[Conditions], float | None],
    share: float,
) -> Estimate | None:
    was, now = sides.base.clock(of), sides.head.clock(of)
    if not was or not now or now >= was * (1 - threshold):
        return None
    during = sides.head.measurement.during
    return Estimate(
        sides.base.latency * (was / now - 1) * share,
        {name: (was, now)},
        {"throttle_reasons": ", ".join(during.throttle_reasons)}
        if during and during.throttle_reasons
        else {},
    )


# Access patterns, bytes and misses

NOTABLE = 0.1
"""Share of the kernels' time or of the further bytes below which one kernel is ignored."""
SHIFT = (0.75, 1.25)  # further sectors of a request that is shifted against them: about one
SHIFTS_AT_MOST = 1.55
"""Largest growth of sectors by a shift: three in place of the two of 2-byte elements."""
SCATTERED = 31.5  # sectors of a request from which each of a warp's 32 threads touches its own
FILLED = 1.1
"""Bytes that DRAM reads over those that the SMs read, above which stores cause reads too."""
SAME = 0.03  # growth of needed bytes that counts as none, the threshold of `more bytes`


def access_pattern(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More sectors for the same bytes."""
    if not sides.knows_accesses:
        return _recorded_pattern(sides, threshold)
    least = NOTABLE * sides.kernels.head.seconds
    worse = [one for one in sides.accesses if one.ratio >= 1 + threshold and one.seconds >= least]
    if not worse:
        return None
    one = max(worse, key=lambda access: (access.wasted, access.ratio))
    noun = "load" if one.load else "store"
    named = (
        ("sectors_per_request" if one.load else "sectors_per_store", one.sectors),
        (f"used_of_{noun}", one.used),
        ("asked_of_l2", one.l2),
    )
    figures: dict[str, Pair] = {name: pair for name, pair in named if pair is not None}
    figures["sectors_growth"] = 1.0, one.ratio
    # Next to more bytes, that cause has the growth of DRAM bytes.
    if sides.dram is not None and sides.dram > 1.02 and sides.asked <= 1 + SAME:
        figures["dram"] = sides.kernels.base.dram, sides.kernels.head.dram
    details = {"of": noun, "pattern": _pattern(one.ratio, one.sectors)}
    if len(sides.kernels.pairs) > 1:
        details["kernel"] = one.kernel
    if one.absorbed:
        details["kept_by_l1"] = _kept_by_l1(one, sides.same_work)
    seconds = sides.seconds_of(sides.pattern)
    whole = sides.kernel_seconds * one.seconds / (sides.kernels.head.seconds or one.seconds or 1.0)
    return Estimate(
        seconds, figures, details, reserve=max(0.0, whole * (1 - 1 / one.ratio) - seconds)
    )


def _recorded_pattern(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """The same from the record of a kernel of the catalogue."""
    sectors = sides.base.measurement.sectors_per_request, sides.head.measurement.sectors_per_request
    if sectors[0] is None or sectors[1] is None or sides.touched < 1 + threshold:
        return None
    details = {"of": "request", "pattern": _pattern(sides.touched, (sectors[0], sectors[1]))}
    return Estimate(
        sides.seconds_of(sides.pattern),
        {"sectors_per_request": sectors, "sectors_growth": (1.0, sides.touched)},
        details,
    )


def _kept_by_l1(one: AccessChange, same_work: bool) -> str:
    if one.wasted <= 0:
        return "all"
    # More data in a pattern whose sectors stay in L1 until all of them is used looks the same to L2.
    return "part" if one.wanted is not None or same_work else "part, or more data"


def _pattern(ratio: float, sectors: tuple[float, float] | None) -> str:
    whole = round(ratio)
    if (
        ratio <= SHIFTS_AT_MOST
        and sectors is not None
        and SHIFT[0] <= sectors[1] - sectors[0] <= SHIFT[1]
    ):
        return "misaligned"
    if whole >= 2 and abs(ratio / whole - 1) < 0.05:
        return "scattered" if sectors is not None and sectors[1] >= SCATTERED else "stride"
    return "less coalesced"


def more_bytes(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More bytes to move, as declared or as the SMs request them."""
    if sides.asked < 1 + threshold:
        return None
    figures: dict[str, Pair] = {"bytes_growth": (1.0, sides.asked)}
    was, now = sides.base.compulsory, sides.head.compulsory
    if was and now and now > was * (1 + threshold):
        figures["declared"] = was, now
    if sides.counted:
        base, head = sides.kernels.base, sides.kernels.head
        if sides.dram is not None:
            figures["dram"], figures["l2_hit_rate"] = (
                (base.dram, head.dram),
                (base.hit_rate, head.hit_rate),
            )
        if base.asked and head.asked:
            figures["asked_of_l2"] = base.asked, head.asked
            figures |= _by_kernel(sides)
    details = (
        {"besides": "access pattern"} if sides.counted and sides.pattern >= 1 + threshold else {}
    )
    return Estimate(sides.seconds_of(sides.asked), figures, details | _wider(sides))


def _by_kernel(sides: BaseAndHead) -> dict[str, Pair]:
    """The loads and stores that most of the further bytes are of, where a launch has several kernels."""
    if len(sides.kernels.pairs) < 2:
        return {}
    found = sorted((one for one in sides.accesses if one.further > 0), key=lambda one: -one.further)
    least = NOTABLE * sum(one.further for one in found)
    return {
        f"{one.kernel} {'reads' if one.load else 'writes'}": (0.0, one.further)
        for one in found
        if one.further >= least
    }


def _wider(sides: BaseAndHead) -> dict[str, str]:
    """A wider type in the names of head's kernels."""
    words = [
        {word for name in side.kernels.names for word in re.findall(r"\w+", name)}
        for side in (sides.base, sides.head)
    ]
    for wide, narrow in (
        ("double", "float"),
        ("float64", "float32"),
        ("int64", "int32"),
        ("long", "int"),
        ("float", "__half"),
    ):
        if wide in words[1] and wide not in words[0] and narrow in words[0]:
            return {"type": wide, "type_was": narrow}
    return {}


def l2_misses(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """More DRAM bytes for the same requests to L2, without a change of the window."""
    if sides.misses < 1 + threshold or any(
        rule.find(sides, rule.threshold) is not None for rule in WINDOW_RULES
    ):
        return None
    base, head = sides.kernels.base, sides.kernels.head
    if (head.dram or 0) - (base.dram or 0) < MiB:
        return None
    figures: dict[str, Pair] = {
        "dram": (base.dram, head.dram),
        "l2_hit_rate": (base.hit_rate, head.hit_rate),
        "bytes_growth": (1.0, sides.asked if abs(sides.asked - 1) > SAME else 1.0),
    }
    over = [
        total.dram_read / read if total.dram_read and (read := total.l2(0)) else 1.0
        for total in (base, head)
    ]
    stored = base.used(1), head.used(1)
    partial = over[1] > FILLED >= over[0] and stored[0] and stored[1] and stored[1] < stored[0]
    if partial:
        figures["dram_over_l2_reads"] = over[0], over[1]
    return Estimate(
        sides.seconds_of(sides.misses),
        figures,
        {"why": "partial stores" if partial else "working set"},
    )


NCU = Need("needs counters of ncu on both sides", lambda sides: sides.counted)
WATCHED = Need(
    "needs a record of CUPTI or a profile on both sides",
    lambda s: s.base.knows_kernels and s.head.knows_kernels,
)
PATTERN = Need(
    "needs counters of ncu on both sides",
    lambda s: (
        s.counted
        or bool(s.base.measurement.sectors_per_request and s.head.measurement.sectors_per_request)
    ),
)
BYTES = Need(
    "needs declared traffic or counters of ncu on both sides",
    lambda s: s.counted or bool(s.base.compulsory and s.head.compulsory),
)

_FACTOR = "kernel time × (1 − 1/ratio), by its part of all such factors"
_ASKED = "kernel time × (1 − 1/growth of what L2 is asked), by its part of all such factors; above that waiting for L1, after all others"
_WAITING = "kernel time × (1 − ratio), after all others"

RULES = (
    Rule("more kernels", "kernels in a launch", 0.5, "more", ITS_TIME, (WATCHED,), more_kernels),
    Rule(
        "access pattern",
        "sectors for the bytes that threads use",
        0.1,
        "more sectors",
        _ASKED,
        (PATTERN,),
        access_pattern,
    ),
    Rule("more bytes", "bytes to move", SAME, "more bytes", _FACTOR, (BYTES,), more_bytes),
    Rule(
        "L2 misses",
        "DRAM bytes for what is asked of L2",
        0.06,
        "more bytes, and 1 MiB",
        _FACTOR,
        (NCU,),
        l2_misses,
    ),
    Rule(
        "fewer threads",
        "share of the device's threads in the grid",
        0.2,
        "less",
        "kernel time × (1 − ratio)",
        (WATCHED,),
        fewer_threads,
    ),
    Rule(
        "occupancy",
        "achieved occupancy of a kernel that DRAM bounds",
        0.15,
        "less",
        _WAITING,
        (NCU,),
        occupancy,
    ),
    Rule(
        "SM clock",
        "SM clock while sampling",
        0.02,
        "lower",
        "base × (ratio − 1) × what DRAM does not bound",
        (),
        sm_clock,
    ),
    Rule(
        "memory clock",
        "memory clock while sampling",
        0.02,
        "lower",
        "base × (ratio − 1) × what DRAM bounds",
        (),
        memory_clock,
    ),
)
