"""Why something got slower: rules over the evidence of two sides, and how much of the slow-down each accounts for. Pure.

Every rule looks at one thing that moved, and says nothing below its threshold, which lies above what the figure varies by between runs
of unchanged code. What it estimates in seconds is a physical bound, not a fit: bytes over a rate, faults by their cost, clocks by their
ratio. The estimates are then held against the measured slow-down: together they never account for more than that, and what they leave
is "unexplained". Without a slow-down beyond its interval nothing is blamed, whatever moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpumem.explain.figures import Evidence, Figures
from pytest_gpumem.explain.model import Sides
from pytest_gpumem.explain.pairing import only
from pytest_gpumem.explain.rule import Found, Rule
from pytest_gpumem.explain.rules import RULES
from pytest_gpumem.judging.spread import difference
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_time

UNEXPLAINED = "unexplained"
"""Name of what no rule accounts for."""
LEAST = 0.01
"""Share of the slow-down below which a cause is not told, and by which estimates may be scaled without a word."""

LARGE = 0.5
"""Share of the slow-down above which what is unexplained is worth a note, and a part of it is most of it."""
SMALL = 0.1
"""Share of the slow-down below which a part of it is none."""


@dataclass(frozen=True)
class SlowDown:
    """What is to be explained: head over base."""

    base: float
    """Seconds of one launch."""
    head: float
    """Seconds of one launch."""
    low: float
    """Lower end of the interval of `seconds`."""
    high: float
    """Upper end of the interval of `seconds`."""
    confidence: float = 0.95
    """Of the interval, two-sided."""

    @property
    def seconds(self) -> float:
        """Seconds that head takes longer."""
        return self.head - self.base

    @property
    def share(self) -> float:
        """The same as a share of base."""
        return self.seconds / self.base

    @property
    def real(self) -> bool:
        """Whether it lies beyond its interval."""
        return self.low > 0


@dataclass(frozen=True)
class Cause:
    """One thing that moved, with what it accounts for."""

    rule: str
    """Name of the rule, a key of `RULES`."""
    sentence: str
    """What moved, without a full stop."""
    seconds: float
    """Seconds of the slow-down."""
    share: float
    """The same as a share of the slow-down."""
    up_to: bool
    """It may be less: the estimates were more than there is to explain, or this one has no upper bound of its own."""
    estimate: float
    """Seconds as the rule alone estimates them."""
    evidence: tuple[tuple[str, float | None, float | None], ...] = ()
    """Figures, each with its value in base and in head; bytes, hertz, seconds and shares."""


@dataclass(frozen=True)
class Explanation:
    """Causes, the largest share first, and what is left."""

    slow_down: SlowDown
    causes: tuple[Cause, ...]
    unexplained: float
    """Seconds that no cause accounts for."""
    not_looked_at: tuple[str, ...]
    """What no rule could look at, with what it needs."""
    why_nothing: str | None = None
    """Why there are no causes, where nothing was to be explained."""
    notes: tuple[str, ...] = ()
    """What a reader must know besides."""

    @property
    def unexplained_share(self) -> float:
        """The same as a share of the slow-down; 0 where there is none."""
        return self.unexplained / self.slow_down.seconds if self.slow_down.real else 0.0

    @property
    def first(self) -> str | None:
        """The rule, or `UNEXPLAINED`, with the largest share; None where nothing was to be explained."""
        if self.why_nothing is not None:
            return None
        if not self.causes or self.unexplained_share > self.causes[0].share:
            return UNEXPLAINED
        return self.causes[0].rule


def explain(base: Evidence, head: Evidence, slow_down: SlowDown, rules: Sequence[Rule] = RULES) -> Explanation:
    """Say what moved between two sides, ordered by how much of the slow-down each cause accounts for.

    Args:
        base: the side that was faster.
        head: the side that is slower.
        slow_down: of head against base, with its interval.
        rules: what is looked at.
    """
    sides = Sides(Figures(base), Figures(head))
    notes = tuple(_notes(sides))
    if not slow_down.real:
        least, most = slow_down.low / slow_down.base, slow_down.high / slow_down.base
        why = f"no slow-down beyond its interval ({100 * least:+.2f} to {100 * most:+.2f} %)"
        return Explanation(slow_down, (), 0.0, (), why, notes)
    found: list[tuple[Rule, Found]] = []
    missing: dict[str, list[str]] = {}
    for rule in rules:
        if lacks := [need.words for need in rule.needs if not need.there(sides)]:
            missing.setdefault(" and ".join(lacks), []).append(rule.looks_at)
        elif (one := rule.find(sides, rule.threshold)) is not None:
            found.append((rule, one))
    causes, left = share_out(found, slow_down.seconds)
    told = tuple(f"{', '.join(what)}: {lack}" for lack, what in missing.items())
    if left > LARGE * slow_down.seconds and (where := _where_else(sides, slow_down)) is not None:
        notes = (*notes, where)
    return Explanation(slow_down, causes, left, told, None, notes)


def share_out(found: Sequence[tuple[Rule, Found]], seconds: float) -> tuple[tuple[Cause, ...], float]:
    """Hold estimates against what was measured.

    Those with a bound of their own come first, in proportion where they are more than there is. Of what they leave, what has no upper
    bound takes all; else what only makes waiting longer (`Found.reserve`) takes at most its estimate, in the order given.

    Args:
        found: rules with their findings.
        seconds: the measured slow-down, above 0.

    Returns:
        The causes, the largest first, and the seconds that are left.
    """
    total = math.fsum(one.seconds for _, one in found)
    scale = min(1.0, seconds / total) if total > 0 else 1.0
    given = [one.seconds * scale for _, one in found]
    left = max(0.0, seconds - math.fsum(given))
    if opened := [index for index, (_, one) in enumerate(found) if one.open]:
        # In proportion to what each has already; in equal parts where none has anything.
        weights = [given[index] for index in opened]
        whole = math.fsum(weights)
        for index, weight in zip(opened, weights, strict=True):
            given[index] += left * (weight / whole if whole > 0 else 1 / len(opened))
        left = 0.0
    for index, (_, one) in enumerate(found):
        more = min(one.reserve, left)
        given[index] += more
        left -= more
    causes = [
        Cause(
            rule=rule.name,
            sentence=one.sentence,
            seconds=each,
            share=each / seconds,
            up_to=scale < 1 - LEAST or one.open or one.reserve > 0,
            estimate=one.seconds + one.reserve,
            evidence=one.evidence,
        )
        for (rule, one), each in zip(found, given, strict=True)
        if each >= LEAST * seconds
    ]
    left = max(0.0, seconds - math.fsum(cause.seconds for cause in causes))
    return tuple(sorted(causes, key=lambda cause: -cause.seconds)), left


def _notes(sides: Sides) -> list[str]:
    was, now = sides.base.measurement, sides.head.measurement
    said = []
    if was.sampler != now.sampler:
        said.append(f"base was timed by the sampler {was.sampler}, head by {now.sampler}: a part of the difference may be the clock's")
    if was.mode != now.mode:
        said.append(f"base was measured {was.mode}, head {now.mode}")
    gone, new = only(*([kernel.name for kernel in side.kernels] for side in (sides.base, sides.head)))
    if gone and new:
        said.append(f"other kernels run: {new} where it was {gone}")
    return said


def _where_else(sides: Sides, slow_down: SlowDown) -> str | None:
    """Whether what is unexplained lies in the kernels or beside them; None where their times were not seen alike, or do not tell."""
    was, now = (sum(kernel.seconds for kernel in side.kernels) for side in (sides.base, sides.head))
    if not was or not now or sides.base.counted != sides.head.counted:
        return None
    times, part = f"{format_time(was)} → {format_time(now)}", (now - was) / slow_down.seconds
    if part >= LARGE:
        bytes_too = " at about the same bytes and accesses" if sides.counted else ""
        return (
            f"the kernels themselves take longer{bytes_too}, {times}: arithmetic, bank conflicts, divergence, atomics or waiting, which no "
            "rule looks at; `gpumem profile ncu --set full` shows them"
        )
    if part <= SMALL:
        return f"the kernels take no longer, {times}: the time goes beside them, to the host, to gaps or to what waits for another stream"
    return None


CONFIDENCE = 0.95
"""Of the interval, two-sided."""


def slow_down(base: Sequence[Measurement], head: Measurement) -> SlowDown:
    """Head against base, with the interval that the screen's variances give.

    Args:
        base: one measurement for each process, at least one.
        head: with the further processes that it may have.
    """
    found = difference(head, base)
    reach = found.variance().reach((1 + CONFIDENCE) / 2)
    # Base is what was measured of it; head follows from the ratio, in which the launch overhead is put to the same on both sides.
    before = math.exp(math.fsum(math.log(one.latency) for one in base) / len(base))
    after, low, high = (before * math.exp(found.log + way) for way in (0.0, -reach, reach))
    return SlowDown(before, after, low - before, high - before, CONFIDENCE)
