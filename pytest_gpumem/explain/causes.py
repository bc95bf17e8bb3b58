"""The causes of a slow-down: the rules applied to the evidence of two sides, and the share of each cause. Pure.

The threshold of a rule is above the variation between two runs of the same code: DRAM bytes of ncu vary by 1 to 3 % (lines that are dirty
in L2 at a launch's end), clocks by one step of 15 MHz, page faults by a few per cent. A rule estimates seconds by a physical bound, not by
a fit. Together, causes account for at most the measured slow-down; the rest is "unexplained". Without a slow-down beyond its interval there
are none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.explain import rules_link, rules_memory, rules_ran
from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.model import BaseAndHead, Estimate, Need, Pair, Rule
from pytest_gpumem.explain.pairing import only
from pytest_gpumem.explain.what_ran import Divergence, compared
from pytest_gpumem.judging.paired import SHOWN, Paired
from pytest_gpumem.judging.screen import mean_latency
from pytest_gpumem.judging.spread import difference
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import UNEXPLAINED

RULES = (
    *rules_memory.WINDOW_RULES,
    *rules_link.RULES,
    *rules_memory.RULES,
    *rules_ran.RULES,
)  # all rules, in the order in which they are applied

LEAST = 0.01  # share of the slow-down below which a cause is left out, and by which estimates may be scaled without "up to"
LARGE = 0.5  # share of the slow-down above which the unexplained part gets a note
SMALL = 0.1  # share of the slow-down below which the kernels count as not slower
CONFIDENCE = 0.95  # of the interval, two-sided


@dataclass(frozen=True)
class SlowDown:
    """Head against base; seconds of one launch."""

    base: float
    head: float
    low: float  # lower end of the interval of `seconds`
    high: float  # upper end of the interval of `seconds`
    confidence: float = CONFIDENCE

    @property
    def seconds(self) -> float:
        """Seconds that head takes longer."""
        return self.head - self.base

    @property
    def share(self) -> float:
        """`seconds` as a share of base."""
        return self.seconds / self.base

    @property
    def real(self) -> bool:
        """True if the interval is above 0."""
        return self.low > 0


@dataclass(frozen=True)
class Cause:
    """One thing that changed, and the part of the slow-down that it accounts for."""

    rule: str  # `Rule.name`
    seconds: float  # of the slow-down
    share: float  # `seconds` as a share of the slow-down
    up_to: bool  # it may be less: the estimates exceeded the slow-down, or this one has no upper bound of its own
    estimate: float  # seconds as the rule alone estimates them
    figures: Mapping[str, Pair] = field(default_factory=dict)  # as `Estimate.figures`
    details: Mapping[str, str] = field(default_factory=dict)  # as `Estimate.details`


@dataclass(frozen=True)
class Note:
    """Something besides the causes that a reader must know."""

    code: str  # a key of `text.NOTES`
    base: str | float
    head: str | float  # names, or seconds


@dataclass(frozen=True)
class Explanation:
    """Causes, the largest share first, and the rest."""

    slow_down: SlowDown
    causes: tuple[Cause, ...]
    unexplained: float  # seconds that no cause accounts for
    skipped: tuple[
        tuple[Rule, tuple[Need, ...]], ...
    ] = ()  # rules that lack evidence, with their needs
    notes: tuple[Note, ...] = ()
    ran: tuple[Divergence, ...] | None = None
    """What ran differently; None if nothing is known of one side."""

    @property
    def unexplained_share(self) -> float:
        """`unexplained` as a share of the slow-down; 0 without one."""
        return self.unexplained / self.slow_down.seconds if self.slow_down.real else 0.0

    @property
    def first(self) -> str | None:
        """The rule with the largest share, or `UNEXPLAINED`; None without a slow-down."""
        if not self.slow_down.real:
            return None
        if not self.causes or self.unexplained_share > self.causes[0].share:
            return UNEXPLAINED
        return self.causes[0].rule


def explain(base: SideFigures, head: SideFigures, slow_down: SlowDown) -> Explanation:
    """Find the causes of a slow-down of `head` against `base`."""
    sides = BaseAndHead(base, head)
    notes, ran = (
        tuple(_notes(sides)),
        compared(base.measurement.what_ran, head.measurement.what_ran),
    )
    if not slow_down.real:
        return Explanation(slow_down, (), 0.0, notes=notes, ran=ran)
    found: list[tuple[Rule, Estimate]] = []
    skipped = []
    for rule in RULES:
        if lacking := tuple(need for need in rule.needs if not need.met(sides)):
            skipped.append((rule, lacking))
        elif (estimate := rule.find(sides, rule.threshold)) is not None:
            found.append((rule, estimate))
    causes, left = share_out(found, slow_down.seconds)
    if left > LARGE * slow_down.seconds and (where := _where_else(sides, slow_down)) is not None:
        notes = (*notes, where)
    return Explanation(slow_down, causes, left, tuple(skipped), notes, ran)


def share_out(
    found: Sequence[tuple[Rule, Estimate]], seconds: float
) -> tuple[tuple[Cause, ...], float]:
    """Divide the slow-down of `seconds` among estimates: the causes, the largest first, and the seconds that are left.

    First come the estimated seconds, scaled down in proportion if they exceed the slow-down. The rest goes to the open estimates. Without
    any, each `Estimate.reserve` takes of it up to its own size, in the order given.
    """
    total = math.fsum(one.seconds for _, one in found)
    scale = min(1.0, seconds / total) if total > 0 else 1.0
    given = [one.seconds * scale for _, one in found]
    left = max(0.0, seconds - math.fsum(given))
    if opened := [index for index, (_, one) in enumerate(found) if one.open]:
        # In proportion to their estimates; in equal parts if all are 0.
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
            seconds=each,
            share=each / seconds,
            up_to=scale < 1 - LEAST or one.open or (one.reserve > 0 and not one.measured),
            estimate=one.seconds + one.reserve,
            figures=one.figures,
            details=one.details,
        )
        for (rule, one), each in zip(found, given, strict=True)
        if each >= LEAST * seconds
    ]
    left = max(0.0, seconds - math.fsum(cause.seconds for cause in causes))
    return tuple(sorted(causes, key=lambda cause: -cause.seconds)), left


def _notes(sides: BaseAndHead) -> Iterator[Note]:
    was, now = sides.base.measurement, sides.head.measurement
    if was.sampler != now.sampler:
        yield Note("sampler", was.sampler, now.sampler)
    if was.mode != now.mode:
        yield Note("mode", was.mode, now.mode)
    gone, new = only(sides.base.kernels.names, sides.head.kernels.names)
    if gone and new:
        yield Note("kernels", gone, new)


def _where_else(sides: BaseAndHead, slow_down: SlowDown) -> Note | None:
    """A note that the unexplained part is in the kernels or beside them; None if neither is clear, or the times are of different tools."""
    was, now = sides.base.kernels.seconds, sides.head.kernels.seconds
    if not was or not now or sides.base.counted != sides.head.counted:
        return None
    part = (now - was) / slow_down.seconds
    if part >= LARGE:
        return Note("in the kernels, counted" if sides.counted else "in the kernels", was, now)
    return Note("beside the kernels", was, now) if part <= SMALL else None


def slow_down(base: Sequence[Measurement], head: Measurement) -> SlowDown:
    """Head against base, one measurement a run, each with its further processes; with an interval from the variances of the screen."""
    found = difference(head, base)
    reach = found.variance().reach((1 + CONFIDENCE) / 2)
    # Head follows from base and the ratio, which corrects both sides for the same launch overhead.
    before = mean_latency(base)
    after, low, high = (before * math.exp(found.log + way) for way in (0.0, -reach, reach))
    return SlowDown(before, after, low - before, high - before)


def slow_down_of(base: float, paired: Paired) -> SlowDown | None:
    """Head against base, by the pairs of a duet; None where they are too few for an interval.
    `base`: seconds of one launch of base.
    """
    if not math.isfinite(paired.bounds[0]):
        return None
    low, high = (base * bound for bound in paired.bounds)
    return SlowDown(base, base * (1 + paired.change), low, high, SHOWN)
