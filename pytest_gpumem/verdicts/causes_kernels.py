"""Rules about what runs on the SMs: kernels, their shapes and the clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.units import format_time
from pytest_gpumem.verdicts.causes_names import base_names
from pytest_gpumem.verdicts.causes_rule import GAP_SECONDS, Found

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
    return base_names(kernel.name for kernel in kernels)


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
        f"grid {before.blocks} × {before.threads} → {after.blocks} × {after.threads}: the launch fills {100 * now:.3g} % of the device's "
        f"threads where it was {100 * was:.3g} %"
    )
    return Found(sentence, sides.kernel_seconds * (1 - now / was), (("resident_share", was, now),))


def occupancy(sides: Sides, threshold: float) -> Found | None:
    """Fewer warps at once on an SM, for a kernel that lives on memory."""
    was, now = sides.kernels.base.occupancy, sides.kernels.head.occupancy
    if not was or not now or now > was * (1 - threshold) or not _lives_on_memory(sides):
        return None
    # Of kernels that belong together; what is a group on one side has no shape of its own.
    pairs = [(was.kernels[0], now.kernels[0]) for was, now in sides.kernels.pairs if len(was.kernels) == len(now.kernels) == 1]
    regs = _changed([(k.registers, o.registers) for k, o in pairs])
    block = _changed([(k.threads, o.threads) for k, o in pairs])
    why = [f"registers {regs}" if regs else "", f"threads of a block {block}" if block else ""]
    shown = f" ({', '.join(one for one in why if one)})" if any(why) else ""
    sentence = f"occupancy {100 * was:.0f} → {100 * now:.0f} %{shown}: fewer loads in flight"
    return Found(sentence, 0.0, (("occupancy", was, now),), reserve=sides.kernel_seconds * (1 - now / was))


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
