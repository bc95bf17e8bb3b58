"""Search for the set-aside and hit ratio that suit a kernel, cheaper than the full grid. Independent of the device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.memory.l2 import fit_hit_ratio, fit_set_aside
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.l2_sweep import LEAST_GAIN, OFF, Change, Point, Setting, Sweep, Textbook

Measure = Callable[[int, float], tuple[float, "float | None"]]
"""Measures one setting: from a set-aside in bytes (0: off) and a hit ratio to a latency and its half-width in seconds."""

HIT_RATIOS = (0.2, 0.4, 0.6, 0.8, 1.0)  # hit ratios of the full grid
GRID_SHARE = 0.25  # largest share of the full grid's settings that a search measures
ROOM = (0.75, 0.92)
"""Shares of a set-aside that a setting with room fills: lines of the same sets evict each other before it is full."""
COARSE = (8, 4, 2)
"""Steps of L2/16 in the coarse map: half, a quarter, an eighth of L2. A saturated H200 lost by jumps beyond half and beyond a quarter."""
ALIKE = 0.003
"""Latencies that differ by at most this share, and by no more than their noise, are the same: the smaller set-aside is then better."""
NEAR = 2
"""Steps over which a comparison of full and with room holds: so near to one, a full setting is not tried with room."""
CLOSE = 0.03  # share by which the second-best may be slower than the best and still be refined in turn with it; otherwise it comes after
ROUNDS = 4  # fresh measurements of each setting that the search confirms
LEAST = 3  # settings that are measured however small the grid is: off, fitted, maximum


def grid(facts: DeviceFacts) -> list[Setting]:
    """The full grid: off, and every step of L2/16 up to the device's maximum at each of `HIT_RATIOS`."""
    step = facts.l2_step_bytes
    return [
        OFF,
        *(
            Setting(k * step, ratio)
            for k in range(1, facts.persisting_l2_max_bytes // step + 1)
            for ratio in HIT_RATIOS
        ),
    ]


def sweep(measure: Measure, facts: DeviceFacts, nbytes: int, *, target: str) -> Sweep:
    """Search for the setting with the lowest latency; measure it, off, and the textbook's settings again.

    The search starts with a coarse map: off, the fitted setting, the maximum with room, the fractions of L2 in `COARSE`, and ratio 1 at
    half the fitted set-aside. Then it measures the neighbours of the best two. It finds a valley that is one step wide at the fitted
    set-aside, and may miss it elsewhere.

    The textbook's settings are the maximum (CUDA C++ Best Practices Guide, 9.2.2.1) and 3/4 of L2 (CUDA C++ Programming Guide, Device
    Memory L2 Access Management), both at the hit ratio that does not thrash (Best Practices Guide, 9.2.2.2). Gain and losses are ratios
    within rounds of all settings, so that a drift of the device cancels; their intervals are Student's over the logarithms.
    `measure`: measures a setting.
    `facts`: the device, which has persisting L2.
    `nbytes`: bytes under the window.
    `target`: the name of the kernel.
    """
    search = _Search(measure, facts, nbytes)
    search.run()
    best = search.best()
    step, largest = facts.l2_step_bytes, facts.persisting_l2_max_bytes
    three_quarters = facts.l2_bytes * 3 // 4 // step * step
    books = {
        "the maximum (3/4 of L2)" if three_quarters == largest else "the maximum": _fitted(
            largest, nbytes
        )
    }
    if three_quarters < largest:
        books["3/4 of L2"] = _fitted(three_quarters, nbytes)
    rounds = _rounds(measure, dict.fromkeys((OFF, best, *books.values())))
    points = {
        setting: Point(setting, statistics.fmean(seconds), half_width(seconds))
        for setting, seconds in rounds.items()
    }
    gain = change(rounds[OFF], rounds[best])
    pays = gain.low > 0 and gain.share >= LEAST_GAIN
    recommended = rounds[best if pays else OFF]
    return Sweep(
        target=target,
        device=facts.name,
        simulated=facts.simulated,
        window_bytes=nbytes,
        points=tuple(search.points.values()),
        grid=len(grid(facts)),
        off=points[OFF],
        best=points[best],
        gain=gain,
        textbook=tuple(
            Textbook(name, points[setting], change(rounds[setting], recommended))
            for name, setting in books.items()
        ),
    )


def _fitted(set_aside: int, nbytes: int) -> Setting:
    return Setting(set_aside, fit_hit_ratio(set_aside, nbytes))


def _rounds(measure: Measure, settings: Mapping[Setting, None]) -> dict[Setting, list[float]]:
    """Seconds of each setting in every round; every second round goes backwards, so that a steady drift favours no setting."""
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(ROUNDS):
        for setting in seconds if number % 2 == 0 else reversed(seconds):
            seconds[setting].append(measure(*setting)[0])
    return seconds


def change(one: Sequence[float], other: Sequence[float]) -> Change:
    """Share by which the first takes longer than the other, from pairs of latencies, with Student's 95 % interval over the log-ratios."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    middle, width = statistics.fmean(logs), half_width(logs) or 0.0
    return Change(math.expm1(middle), math.expm1(middle - width), math.expm1(middle + width))


def _noise(one: Point, other: Point) -> float:
    """Half-width of the difference of two latencies, in seconds; 0 where unknown."""
    return math.hypot(one.half_width or 0.0, other.half_width or 0.0)


class _Search:
    """The settings measured so far, and the next ones."""

    def __init__(self, measure: Measure, facts: DeviceFacts, nbytes: int) -> None:
        self._measure = measure
        self._step = facts.l2_step_bytes
        self._steps = facts.persisting_l2_max_bytes // self._step
        self._nbytes = nbytes
        self._fit = fit_set_aside(facts, nbytes) // self._step
        self.most = max(LEAST, int(GRID_SHARE * len(grid(facts))))
        self.points: dict[Setting, Point] = {}

    def run(self) -> None:
        """Measure until no better neighbour is left, or the share of the grid is used up."""
        for setting in self._coarse():
            if not self._take(setting):
                return
        while (further := next(self._next(), None)) is not None:
            if not self._take(further):
                return

    def best(self) -> Setting:
        """The lowest latency with a set-aside; of latencies that are the same, the smallest set-aside."""
        least = self._ranked()[0]
        alike = [
            p.setting
            for p in self._ranked()
            if p.latency - least.latency <= min(_noise(p, least), ALIKE * least.latency)
        ]
        # At the same set-aside the measured order decides, which `min` keeps.
        return min(alike, key=lambda setting: setting.set_aside)

    def _take(self, setting: Setting) -> bool:
        """Measure a setting; False where the search is over."""
        if setting in self.points:
            return True
        if len(self.points) >= self.most:
            return False
        self.points[setting] = Point(setting, *self._measure(*setting))
        return True

    def _ranked(self) -> list[Point]:
        return sorted(
            (p for p in self.points.values() if p.setting.set_aside), key=lambda p: p.latency
        )

    def _full(self, steps: int) -> Setting:
        """A full set-aside: the largest hit ratio that does not thrash."""
        return _fitted(steps * self._step, self._nbytes)

    def _room(self, steps: int) -> Setting:
        """The largest hit ratio of the grid that leaves room; a full set-aside if none does."""
        set_aside = steps * self._step
        with_room = (
            ratio for ratio in HIT_RATIOS if ROOM[0] <= ratio * self._nbytes / set_aside <= ROOM[1]
        )
        return Setting(set_aside, max(with_room, default=fit_hit_ratio(set_aside, self._nbytes)))

    def _coarse(self) -> Iterator[Setting]:
        """Off, the fitted setting, the maximum with room; then fractions of L2, and ratio 1 at half the fitted set-aside."""
        yield OFF
        yield self._full(self._fit)
        yield self._room(self._steps)
        for steps in COARSE:
            yield self._full(min(steps, self._steps))
        # If the kernel uses only a part of its window, a smaller set-aside at ratio 1 holds all of that part.
        if self._fit > 1:
            yield Setting(self._fit // 2 * self._step, 1.0)

    def _next(self) -> Iterator[Setting]:
        """Neighbours of the best two that were not measured, the most promising first."""
        ranked = self._ranked()
        first = self.best()
        order: list[Setting | None] = [*self._around(first)]
        # Settings next to the best belong to its valley.
        rival = next(
            (p for p in ranked if abs(p.setting.set_aside - first.set_aside) > self._step), None
        )
        other = [] if rival is None else [*self._around(rival.setting)]
        if rival is not None and rival.latency <= (1 + CLOSE) * ranked[0].latency:
            order = [setting for pair in zip_longest(order, other) for setting in pair]
        order += [*self._ratios(first), *other]
        yield from (
            setting for setting in order if setting is not None and setting not in self.points
        )

    def _around(self, setting: Setting) -> Iterator[Setting]:
        """Neighbours of a setting: one step of set-aside less and more; with room if it is full, with more room if it has some."""
        steps = setting.set_aside // self._step
        nearby = range(max(1, steps - NEAR), steps + NEAR + 1)
        compared = any(
            self._full(other) in self.points and self._room(other) in self.points
            for other in nearby
        )
        if setting == self._full(steps) and not compared:
            yield self._room(steps)
        yield from (
            self._as_full(setting, other)
            for other in (steps - 1, steps + 1)
            if 1 <= other <= self._steps
        )
        if setting == self._room(steps) and steps < self._steps:
            yield Setting(setting.set_aside + self._step, setting.hit_ratio)

    def _as_full(self, setting: Setting, steps: int) -> Setting:
        """Another set-aside, full or with room as that of `setting`, else at the same hit ratio."""
        own = setting.set_aside // self._step
        if setting == self._full(own):
            return self._full(steps)
        if setting == self._room(own):
            return self._room(steps)
        return Setting(steps * self._step, setting.hit_ratio)

    def _ratios(self, setting: Setting) -> Iterator[Setting]:
        """The grid's next hit ratio above and below at the same set-aside."""
        higher = [ratio for ratio in HIT_RATIOS if ratio > setting.hit_ratio]
        lower = [ratio for ratio in HIT_RATIOS if ratio < setting.hit_ratio]
        yield from (Setting(setting.set_aside, ratio) for ratio in (*higher[:1], *lower[-1:]))
