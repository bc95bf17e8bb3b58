"""Rules about what kernels do: access patterns, bytes, misses in L2, persisting windows, shapes and clocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.explain.pairing import base_name, base_names
from pytest_gpumem.explain.rule import GAP_SECONDS, Found, Pairs
from pytest_gpumem.judging.traffic import size
from pytest_gpumem.records.measurement import Conditions, Window
from pytest_gpumem.units import MB, format_bytes, format_share, format_time

if TYPE_CHECKING:
    from pytest_gpumem.explain.figures import Figures
    from pytest_gpumem.explain.model import Access, Sides, Two
    from pytest_gpumem.explain.pairing import OneKernel


THRASHES = 0.01
"""Share by which a window asks for more than its set-aside before it counts as thrashing."""

RATE_VARIES = 0.01
"""Points by which an L2 hit rate moves without a meaning."""


def _persisting(figures: Figures) -> Window | None:
    window = figures.window
    return window if window is not None and window.hit == "persisting" and window.set_aside > 0 and window.nbytes > 0 else None


def _kept(window: Window) -> float:
    """Bytes of a window that its set-aside holds."""
    wanted = window.nbytes * window.hit_ratio
    return wanted if wanted <= window.set_aside else _thrashing_keeps(window)


def _thrashing_keeps(window: Window) -> float:
    # A cyclic sweep over more than fits evicts each line before it comes round: of what is above, as much below is lost.
    return max(0.0, 2 * window.set_aside - window.nbytes * window.hit_ratio)


def _thrashes(window: Window | None, beyond: float) -> bool:
    return window is not None and window.nbytes * window.hit_ratio > window.set_aside * (1 + beyond)


def _reads(sides: Sides) -> str:
    """ "DRAM reads +34 % (L2 hit rate 71 → 52 %): ", where it was counted and rose; empty else."""
    was, now = sides.kernels.base, sides.kernels.head
    if not sides.counted or not was.dram_read or not now.dram_read or now.dram_read <= was.dram_read:
        return ""
    share = now.dram_read / was.dram_read - 1
    grown = format_share(share, sign=True) if share < 10 else f"{size(was.dram_read)} → {size(now.dram_read)}"
    return f"DRAM reads {grown}{rates(sides)}: "


def rates(sides: Sides) -> str:
    """ " (L2 hit rate 71 → 52 %)", where it was counted and moved; empty else."""
    was, now = sides.kernels.base.hit_rate, sides.kernels.head.hit_rate
    if was is None or now is None or abs(now - was) < RATE_VARIES:
        return ""
    return f" (L2 hit rate {100 * was:.0f} → {100 * now:.0f} %)"


def _l2_evidence(sides: Sides) -> Pairs:
    was, now = sides.kernels.base, sides.kernels.head
    aside = ("set_aside", sides.base.set_aside, sides.head.set_aside)
    if not sides.counted:
        return (aside,)
    return (aside, ("dram_read", was.dram_read, now.dram_read), ("l2_hit_rate", was.hit_rate, now.hit_rate))


def window_gone(sides: Sides, _threshold: float) -> Found | None:
    """A persisting window that base had and head has not."""
    was, now = _persisting(sides.base), _persisting(sides.head)
    if was is None or now is not None:
        return None
    aside = sides.head.set_aside
    set_aside = f"; set-aside {format_bytes(was.set_aside)} → {format_bytes(aside)}" if aside is not None else ""
    sentence = f"{_reads(sides)}{format_bytes(was.nbytes)} no longer stay in L2, their persisting window is gone{set_aside}"
    return Found(sentence, sides.seconds_of(sides.misses), _l2_evidence(sides), open=True)


def thrashing(sides: Sides, threshold: float) -> Found | None:
    """A window whose hit ratio x bytes are more than the set-aside, where base's fitted."""
    was, now = _persisting(sides.base), _persisting(sides.head)
    if now is None or not _thrashes(now, threshold) or _thrashes(was, threshold):
        return None
    wanted = format_bytes(round(now.nbytes * now.hit_ratio))
    before = f"{was.hit_ratio:.3g} → " if was is not None else ""
    sentence = (
        f"{_reads(sides)}the window thrashes: hit ratio {before}{now.hit_ratio:.3g} of {format_bytes(now.nbytes)} asks for {wanted} in a "
        f"set-aside of {format_bytes(now.set_aside)}, so its lines evict each other"
    )
    return Found(sentence, sides.seconds_of(sides.misses), _l2_evidence(sides), open=True)


def keeps_less(sides: Sides, threshold: float) -> Found | None:
    """A window that keeps fewer bytes in L2: a smaller set-aside, hit ratio or window."""
    was, now = _persisting(sides.base), _persisting(sides.head)
    if was is None or now is None or _thrashes(now, THRASHES) or _kept(now) >= _kept(was) * (1 - threshold):
        return None
    moved = []
    if now.set_aside < was.set_aside:
        moved.append(f"set-aside {format_bytes(was.set_aside)} → {format_bytes(now.set_aside)}")
    if now.hit_ratio < was.hit_ratio:
        moved.append(f"hit ratio {was.hit_ratio:.3g} → {now.hit_ratio:.3g}")
    if now.nbytes < was.nbytes:
        moved.append(f"window {format_bytes(was.nbytes)} → {format_bytes(now.nbytes)}")
    sentence = f"{_reads(sides)}the window keeps {size(_kept(now))} of its bytes in L2 where it kept {size(_kept(was))}: {', '.join(moved)}"
    return Found(sentence, sides.seconds_of(sides.misses), _l2_evidence(sides), open=True)


def set_aside_too_large(sides: Sides, threshold: float) -> Found | None:
    """More of L2 set aside than before, without the window keeping more."""
    before, after = sides.base.set_aside, sides.head.set_aside
    if before is None or after is None or after < before + max(threshold * sides.head.facts.l2_bytes, 1):
        return None
    was, now = _persisting(sides.base), _persisting(sides.head)
    if now is not None and (was is None or _kept(now) > _kept(was) * 1.01 or _thrashes(now, THRASHES)):
        return None
    l2 = sides.head.facts.l2_bytes
    need = f"the window needs {format_bytes(round(now.nbytes * now.hit_ratio))} of it" if now is not None else "no window uses it"
    rest = f"; everything else has {format_bytes(max(0, l2 - after))} of L2 where it had {format_bytes(max(0, l2 - before))}" if l2 else ""
    sentence = f"set-aside {format_bytes(before)} → {format_bytes(after)}: {need}{rest}{rates(sides)}"
    return Found(sentence, sides.seconds_of(sides.misses), _l2_evidence(sides), open=True)


def claim_misses(sides: Sides) -> bool:
    """Whether a rule about windows accounts for misses in L2."""
    return any(find(sides, threshold) is not None for find, threshold in WINDOW_RULES.items())


WINDOW_RULES: Mapping[Callable[[Sides, float], Found | None], float] = MappingProxyType(
    {window_gone: 0.0, thrashing: THRASHES, keeps_less: 0.05, set_aside_too_large: 1 / 32}
)
"""The rules with their thresholds: any, a share of what fits, a share of the bytes kept, a share of L2."""


def more_kernels(sides: Sides, threshold: float) -> Found | None:
    """Kernels in each launch that base has no counterpart for."""
    added, gone = sides.kernels.added, sides.kernels.replaced
    many = sum(kernel.count for kernel in added) - sum(kernel.count for kernel in gone)
    if many < threshold:
        return None
    took = sum(kernel.seconds for kernel in added) - sum(kernel.seconds for kernel in gone)
    before = sum(kernel.count for kernel in sides.base.kernels)
    after = sum(kernel.count for kernel in sides.head.kernels)
    instead = f" in place of {_names(gone)}" if gone else ""
    sentence = f"{after:.3g} kernels in each launch where it was {before:.3g}: {_names(added)}{instead}"
    sentence += f", {format_time(max(took, 0.0))} more" if took > 0 else ""
    return Found(sentence, max(0.0, took) + many * GAP_SECONDS, (("kernels", before, after),))


def _names(kernels: Sequence[OneKernel]) -> str:
    return base_names(kernel.name for kernel in kernels)


def fewer_threads(sides: Sides, threshold: float) -> Found | None:
    """The longest kernel's grid no longer fills the device."""
    rooms = [figures.facts.sm_count * figures.facts.max_threads_per_sm for figures in (sides.base, sides.head)]
    if not sides.kernels.alike or not all(rooms):
        return None
    before, after = max(sides.kernels.alike, key=lambda one: one[1].seconds)
    was, now = (min(1.0, kernel.blocks * kernel.threads / room) for kernel, room in zip((before, after), rooms, strict=True))
    if now > was * (1 - threshold):
        return None
    sentence = (
        f"{_whose(sides, after)}grid {before.blocks} × {before.threads} → {after.blocks} × {after.threads}: the launch fills "
        f"{100 * now:.3g} % of the device's threads where it was {100 * was:.3g} %"
    )
    return Found(sentence, _seconds(sides, after) * (1 - now / was), (("resident_share", was, now),))


def occupancy(sides: Sides, threshold: float) -> Found | None:
    """Fewer warps at once on an SM, for a kernel that lives on memory."""
    peak = sides.base.facts.peak_bandwidth or math.inf
    fewer = [
        (before, after)
        for before, after in sides.kernels.alike
        if before.occupancy and after.occupancy and after.occupancy <= before.occupancy * (1 - threshold)
        if before.dram and before.seconds and before.dram / before.seconds > LIVES_ON_MEMORY * peak
    ]
    if not fewer:
        return None
    before, after = max(fewer, key=lambda one: one[1].seconds)
    was, now = before.occupancy or 0.0, after.occupancy or 0.0
    moved = (("registers", before.registers, after.registers), ("threads of a block", before.threads, after.threads))
    why = ", ".join(f"{name} {one} → {other}" for name, one, other in moved if None not in (one, other) and one != other)
    sentence = f"{_whose(sides, after)}occupancy {100 * was:.0f} → {100 * now:.0f} %{f' ({why})' if why else ''}: fewer loads in flight"
    return Found(sentence, 0.0, (("occupancy", was, now),), reserve=_seconds(sides, after) * (1 - now / was))


LIVES_ON_MEMORY = 0.3
"""Share of the DRAM peak that a kernel reached in base, from which on its time is that of memory."""


def _whose(sides: Sides, kernel: OneKernel) -> str:
    """ "triad: ", where a launch has several kernels."""
    return f"{base_name(kernel.name)}: " if len(sides.kernels.pairs) > 1 else ""


def _seconds(sides: Sides, kernel: OneKernel) -> float:
    """Seconds of head's launch that one of its kernels takes."""
    whole = sides.kernels.head.seconds
    return sides.kernel_seconds * (kernel.seconds / whole if whole else 1.0)


def _sm(conditions: Conditions) -> float | None:
    return conditions.sm_clock_hz


def _memory(conditions: Conditions) -> float | None:
    return conditions.memory_clock_hz


def sm_clock(sides: Sides, threshold: float) -> Found | None:
    """A lower SM clock."""
    return _clock(sides, threshold, "SM", _sm, 1 - sides.memory_share)


def memory_clock(sides: Sides, threshold: float) -> Found | None:
    """A lower memory clock."""
    return _clock(sides, threshold, "memory", _memory, sides.memory_share)


def _clock(sides: Sides, threshold: float, name: str, of: Callable[[Conditions], float | None], share: float) -> Found | None:
    was, now = sides.base.clock(of), sides.head.clock(of)
    if not was or not now or now >= was * (1 - threshold):
        return None
    reasons = sides.head.measurement.during.throttle_reasons if sides.head.measurement.during else ()
    why = f" ({', '.join(reasons)})" if reasons else ""
    sentence = f"{name} clock {was / 1e6:.0f} → {now / 1e6:.0f} MHz{why}: not the code"
    return Found(sentence, sides.base.latency * (was / now - 1) * share, ((f"{name.lower()}_clock", was, now),))


NOTABLE = 0.1
"""Share of the kernels' time below which the accesses of one of them are not worth a word."""
SHIFT = (0.75, 1.25)
"""Sectors more for each request that a shift against the sectors makes, about: one."""
SHIFTS_AT_MOST = 1.55
"""Times the sectors that a shift makes at most: three in place of the two of 2-byte elements."""
SCATTERED = 31.5
"""Sectors of a request from which on each of a warp's 32 threads touches its own."""
FILLED = 1.1
"""What DRAM reads over what the SMs read, from which on something else than a load reads it."""
SAME = 0.03
"""Change of what is asked of L2 up to which it is told as none, the threshold of `more bytes`."""


def access_pattern(sides: Sides, threshold: float) -> Found | None:
    """Sectors that are touched for the same bytes."""
    if not sides.knows_accesses:
        return _pattern_of_record(sides, threshold)
    least = NOTABLE * sides.kernels.head.seconds
    worse = [one for one in sides.accesses if one.ratio >= 1 + threshold and one.seconds >= least]
    if not worse:
        return None
    one = max(worse, key=lambda access: (access.wasted, access.ratio))
    noun = "load" if one.load else "store"
    told = f"sectors per {noun} {one.sectors[0]:.3g} → {one.sectors[1]:.3g}: " if one.sectors is not None else ""
    told += _pattern(one.ratio, one.sectors, one.used)
    if len(sides.kernels.pairs) > 1:
        told = f"{one.kernel}: {told}"
    told += _kept_by_l1(one, sides.same_work)
    # With more bytes beside it, what DRAM moves more stands there.
    if (dram := sides.dram) is not None and dram > 1.02 and sides.asked <= 1 + SAME:
        told += f"; DRAM bytes {format_share(dram - 1, sign=True)}"
    figures = (
        ("sectors_per_request" if one.load else "sectors_per_store", one.sectors),
        (f"used_of_{noun}", one.used),
        ("asked_of_l2", one.l2),
    )
    evidence = [(name, *two) for name, two in figures if two is not None]
    seconds = sides.seconds_of(sides.pattern)
    whole = sides.kernel_seconds * one.seconds / (sides.kernels.head.seconds or one.seconds or 1.0)
    return Found(told, seconds, tuple(evidence), reserve=max(0.0, whole * (1 - 1 / one.ratio) - seconds))


def _kept_by_l1(one: Access, same_work: bool) -> str:
    if not one.absorbed:
        return ""
    if one.wasted <= 0:
        return "; L1 keeps that from L2"
    # L2 is asked for as much where more data is loaded in a pattern whose sectors stay in L1 until all of them is used.
    unknown = "" if one.wanted is not None or same_work else ", and whether that is more data was not counted"
    return f"; L1 keeps a part from L2, which is asked for {format_share(one.grown - 1)} more{unknown}"


def _pattern_of_record(sides: Sides, threshold: float) -> Found | None:
    was, now = sides.base.measurement.sectors_per_request, sides.head.measurement.sectors_per_request
    if was is None or now is None or sides.touched < 1 + threshold:
        return None
    sentence = f"sectors per request {was:.3g} → {now:.3g}: {_pattern(sides.touched, (was, now), None)}"
    return Found(sentence, sides.seconds_of(sides.pattern), (("sectors_per_request", was, now),))


def _pattern(ratio: float, sectors: Two | None, used: Two | None) -> str:
    whole = round(ratio)
    if ratio <= SHIFTS_AT_MOST and sectors is not None and SHIFT[0] <= sectors[1] - sectors[0] <= SHIFT[1]:
        return "misaligned, each warp touches a sector more"
    if whole >= 2 and abs(ratio / whole - 1) < 0.05:
        if sectors is not None and sectors[1] >= SCATTERED:
            return f"stride {whole} or more, or scattered: each element has a sector of its own"
        return f"stride {whole}"
    shares = f", threads use {100 * used[0]:.0f} → {100 * used[1]:.0f} % of their bytes" if used is not None else ""
    return f"{ratio:.3g} times the sectors for the same bytes, accesses are less coalesced{shares}"


def more_bytes(sides: Sides, threshold: float) -> Found | None:
    """More bytes to be moved, by the declaration or as the SMs ask for them."""
    if sides.asked < 1 + threshold:
        return None
    was, now = sides.base.compulsory, sides.head.compulsory
    told, evidence = [], list[tuple[str, float | None, float | None]]()
    if was and now and now > was * (1 + threshold):
        told.append(f"declared {format_bytes(was)} → {format_bytes(now)}")
        evidence.append(("declared", float(was), float(now)))
    if sides.counted:
        base, head = sides.kernels.base, sides.kernels.head
        if sides.dram is not None and base.dram and head.dram:
            told.append(f"DRAM {size(base.dram)} → {size(head.dram)}{rates(sides)}")
            evidence.append(("dram", base.dram, head.dram))
        if base.asked and head.asked:
            told.append(f"asked of L2 {size(base.asked)} → {size(head.asked)}{_by_kernel(sides)}")
            evidence.append(("asked_of_l2", base.asked, head.asked))
    besides = " besides sectors used in part" if sides.counted and sides.pattern >= 1 + threshold else ""
    sentence = f"{format_share(sides.asked - 1, sign=True)} bytes to move{_wider(sides)}{besides}: {', '.join(told)}"
    return Found(sentence, sides.seconds_of(sides.asked), tuple(evidence))


def _by_kernel(sides: Sides) -> str:
    """The accesses that most of the further bytes are of, where there are several kernels."""
    if len(sides.kernels.pairs) < 2:
        return ""
    found = sorted((one for one in sides.accesses if one.further > 0), key=lambda one: -one.further)
    whole = sum(one.further for one in found)
    told = [f"{one.kernel} {'reads' if one.load else 'writes'} {size(one.further)} more" for one in found if one.further >= NOTABLE * whole]
    return f"; {', '.join(told)}" if told else ""


def _wider(sides: Sides) -> str:
    words = [{word for kernel in side.kernels for word in re.findall(r"\w+", kernel.name)} for side in (sides.base, sides.head)]
    for wide, narrow in (("double", "float"), ("float64", "float32"), ("int64", "int32"), ("long", "int"), ("float", "__half")):
        if wide in words[1] and wide not in words[0] and narrow in words[0]:
            return f" ({wide} where it was {narrow})"
    return ""


def l2_misses(sides: Sides, threshold: float) -> Found | None:
    """More DRAM bytes for what is asked, where no window accounts for it."""
    if sides.misses < 1 + threshold or claim_misses(sides):
        return None
    base, head = sides.kernels.base, sides.kernels.head
    if (head.dram or 0) - (base.dram or 0) < MB:
        return None
    dram = f"DRAM bytes {format_share((sides.dram or 1.0) - 1, sign=True)}{rates(sides)}"
    asked = f"with {format_share(sides.asked - 1, sign=True)} to move" if abs(sides.asked - 1) > SAME else "with as much to move"
    over = [total.dram_read / read if total.dram_read and (read := total.l2(0)) else 1.0 for total in (base, head)]
    stored = base.used(1), head.used(1)
    if over[1] > FILLED >= over[0] and stored[0] and stored[1] and stored[1] < stored[0]:
        sentence = f"{dram}: DRAM reads {over[1]:.2g} times what the SMs read, because sectors that stores fill in part are read first"
    else:
        sentence = f"{dram} {asked}: what L2 served comes from DRAM, the working set no longer fits or is visited in another order"
    evidence = (("dram", base.dram, head.dram), ("l2_hit_rate", base.hit_rate, head.hit_rate))
    return Found(sentence, sides.seconds_of(sides.misses), evidence)
