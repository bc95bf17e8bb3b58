"""Rules about what kernels move: access patterns, bytes, and misses in L2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpumem.records.traffic import size
from pytest_gpumem.units import MB, format_bytes, format_share
from pytest_gpumem.verdicts.causes_rule import Found
from pytest_gpumem.verdicts.causes_windows import claim_misses, rates

if TYPE_CHECKING:
    from pytest_gpumem.verdicts.causes_accesses import Access, Two
    from pytest_gpumem.verdicts.causes_sides import Sides

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
