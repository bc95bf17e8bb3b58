"""Rules about persisting L2: the window and its set-aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.traffic import size
from pytest_gpumem.units import format_bytes, format_share
from pytest_gpumem.verdicts.causes_rule import Found, Pairs

if TYPE_CHECKING:
    from pytest_gpumem.verdicts.causes_figures import Figures
    from pytest_gpumem.verdicts.causes_sides import Sides

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
