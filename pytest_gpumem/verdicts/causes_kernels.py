"""Rules about what runs on the SMs: kernels, their accesses, bytes and shapes, and the clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.traffic import size
from pytest_gpumem.units import MB, format_bytes, format_share, format_time
from pytest_gpumem.verdicts.causes_rule import GAP_SECONDS, Found
from pytest_gpumem.verdicts.causes_windows import claim_misses, rates

if TYPE_CHECKING:
    from pytest_gpumem.verdicts.causes_pairing import OneKernel
    from pytest_gpumem.verdicts.causes_sides import Sides


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
    return ", ".join(dict.fromkeys(kernel.name.partition("(")[0].removeprefix("void ") for kernel in kernels))


def access_pattern(sides: Sides, threshold: float) -> Found | None:
    """Sectors that are fetched for the same bytes."""
    ratio = sides.pattern
    if ratio < 1 + threshold:
        return None
    was, now = sides.base.measurement.sectors_per_request, sides.head.measurement.sectors_per_request
    sectors, of = (was, now), "request"
    if sides.counted:
        seen = [(sides.kernels.base.sectors(which), sides.kernels.head.sectors(which)) for which in (0, 1)]
        known = [(one, other, name) for (one, other), name in zip(seen, ("load", "store"), strict=True) if one and other]
        if known:
            *both, of = max(known, key=lambda item: item[1] / item[0])
            sectors = (both[0], both[1])
    shown = f"sectors per {of} {sectors[0]:.3g} → {sectors[1]:.3g}: " if sectors[0] and sectors[1] else ""
    sentence = f"{shown}{_pattern(ratio)}"
    if sides.counted and (dram := sides.dram) is not None and dram > 1.02:
        sentence += f"; DRAM bytes {format_share(dram - 1, sign=True)}"
    evidence = [("sectors_per_request", sectors[0], sectors[1])]
    used = [(sides.kernels.base.used(which), sides.kernels.head.used(which)) for which in (0, 1)]
    evidence += [(name, one, other) for (one, other), name in zip(used, ("used_of_load", "used_of_store"), strict=True) if one and other]
    return Found(sentence, sides.seconds_of(ratio), tuple(evidence))


def _pattern(ratio: float) -> str:
    whole = round(ratio)
    if ratio <= 1.3:
        return "misaligned, each warp touches a sector more"
    if whole >= 2 and abs(ratio / whole - 1) < 0.05:
        return f"stride {whole}" if whole < 8 else f"stride {whole} or more: each element has a sector of its own"
    return f"{ratio:.3g} times the sectors for the same bytes: accesses are less coalesced"


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
            told.append(f"asked of L2 {size(base.asked)} → {size(head.asked)}")
            evidence.append(("asked_of_l2", base.asked, head.asked))
    wider = _wider(sides)
    sentence = f"{format_share(sides.asked - 1, sign=True)} bytes to move{wider}: {', '.join(told)}"
    return Found(sentence, sides.seconds_of(sides.asked), tuple(evidence))


def _wider(sides: Sides) -> str:
    names = [" ".join(kernel.name.lower() for kernel in side.kernels) for side in (sides.base, sides.head)]
    for wide, narrow in (("double", "float"), ("float64", "float32"), ("int64", "int32"), ("long", "int"), ("float", "half")):
        if wide in names[1] and wide not in names[0] and narrow in names[0]:
            return f" ({wide} where it was {narrow})"
    return ""


def l2_misses(sides: Sides, threshold: float) -> Found | None:
    """More DRAM bytes for what is asked, where no window accounts for it."""
    if sides.misses < 1 + threshold or claim_misses(sides):
        return None
    base, head = sides.kernels.base, sides.kernels.head
    if (head.dram or 0) - (base.dram or 0) < MB:
        return None
    dram, asked = (format_share(ratio - 1, sign=True) for ratio in (sides.dram or 1.0, sides.asked))
    sentence = (
        f"DRAM bytes {dram}{rates(sides)} with {asked} to move: what L2 served comes from DRAM, the working set no longer fits or is "
        "visited in another order"
    )
    evidence = (("dram", base.dram, head.dram), ("l2_hit_rate", base.hit_rate, head.hit_rate))
    return Found(sentence, sides.seconds_of(sides.misses), evidence)


def fewer_threads(sides: Sides, threshold: float) -> Found | None:
    """A grid that no longer fills the device."""
    shares = []
    for total, figures in ((sides.kernels.base, sides.base), (sides.kernels.head, sides.head)):
        room = figures.facts.sm_count * figures.facts.max_threads_per_sm
        longest = max(total.kernels, key=lambda kernel: kernel.seconds, default=None)
        if longest is None or not room:
            return None
        shares.append((min(1.0, longest.blocks * longest.threads / room), longest))
    (was, before), (now, after) = shares
    if now > was * (1 - threshold):
        return None
    sentence = (
        f"grid {before.blocks} × {before.threads} → {after.blocks} × {after.threads}: the launch fills {100 * now:.0f} % of the device's "
        f"threads where it was {100 * was:.0f} %"
    )
    return Found(sentence, sides.kernel_seconds * (1 - now / was), (("resident_share", was, now),))


def occupancy(sides: Sides, threshold: float) -> Found | None:
    """Fewer warps at once on an SM, for a kernel that lives on memory."""
    was, now = sides.kernels.base.occupancy, sides.kernels.head.occupancy
    if not was or not now or now > was * (1 - threshold) or not _lives_on_memory(sides):
        return None
    regs = _changed([(k.registers, o.registers) for k, o in zip(sides.kernels.base.kernels, sides.kernels.head.kernels, strict=False)])
    block = _changed([(k.threads, o.threads) for k, o in zip(sides.kernels.base.kernels, sides.kernels.head.kernels, strict=False)])
    why = [f"registers {regs}" if regs else "", f"threads of a block {block}" if block else ""]
    shown = f" ({', '.join(one for one in why if one)})" if any(why) else ""
    sentence = f"occupancy {100 * was:.0f} → {100 * now:.0f} %{shown}: fewer loads in flight"
    return Found(sentence, sides.kernel_seconds * (1 - now / was), (("occupancy", was, now),), weak=True)


LIVES_ON_MEMORY = 0.3
"""Share of the DRAM peak that base reached, from which on its kernels' time is that of memory."""


def _lives_on_memory(sides: Sides) -> bool:
    total, peak = sides.kernels.base, sides.base.facts.peak_bandwidth
    seconds = min(total.seconds, sides.base.latency) or sides.base.latency
    return bool(total.dram and peak and total.dram / seconds > LIVES_ON_MEMORY * peak)


def _changed(pairs: Sequence[tuple[int | None, int | None]]) -> str:
    for was, now in pairs:
        if was is not None and now is not None and was != now:
            return f"{was} → {now}"
    return ""


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
