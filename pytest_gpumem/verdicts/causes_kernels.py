"""Rules about what runs on the SMs: kernels, their shapes and the clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.units import format_time
from pytest_gpumem.verdicts.causes_names import base_name, base_names
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
