"""Lasting changes of level in series of figures.

Bytes and counts are exact: each value that stays is a level. Times scatter, and each step of `steps` is about that:

1. Runs of one hour and one card share a deviation. The median over tests shows it (Tukey's median polish). Its own lasting changes stay in
   the tests, the rest is subtracted.
2. Each test has a scatter, from the median of differences between neighbours, which no step disturbs, and a factor for the correlation of
   neighbours, from the scatter of means of 8 and 16 runs.
3. Differences of moving means over windows of many lengths (MOSUM: Eichinger and Kirch 2018, "A MOSUM procedure for the estimation of
   multiple random change points") select the tests that can have a change; it takes time linear in tests and runs.
4. Ruptures places the changes of those (PELT: Killick, Fearnhead and Eckley 2012, "Optimal detection of changepoints with a linear
   computational cost"). A change stands if the medians of its sides differ by `CERTAIN` standard errors and by `LEAST`.
5. The runs that a change may begin with have a likelihood ratio up to `RATIO` (Hansen 2000, "Sample splitting and threshold estimation").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.outcomes import UserError

Floats = NDArray[np.float64]

LEAST = 0.005  # smallest change of a time that is reported, as a share
LASTING = 3  # fewest runs of the newest level of times
LASTING_INSIDE = 5  # the same of an earlier level: two exceptions of three runs are no level
LASTING_EXACT = 2  # the same of bytes and counts
CERTAIN = 6.0  # standard errors between the levels of many runs
FEW = 10.0  # runs with which the scatter is so uncertain that twice as many standard errors are asked for
RATIO = 7.35  # of the likelihoods, as twice its logarithm, in 95 % of changes
SELECTED = 4.5  # a test is examined closely if two of its moving means differ by this many standard errors
PENALTY = 20.0  # of one more change, in squares of the scatter
LEAST_SCATTER = 2e-4  # of a log-time: clocks are not finer
SPIKE = 4.0  # a run is an exception if it lies this many scatters from the median of itself and its neighbours
TESTS_FOR_COMMON = 8  # a run of fewer tests shows no common deviation
TESTS_AT_MOST = 512  # tests that the common deviation is the median of
CHUNK = 256  # tests that are looked at together
UNSTEADY = 20  # an exact figure that changes in more than one run of this many scatters like a time


@dataclass(frozen=True)
class Step:
    """A change inside a series, by positions of its runs."""

    at: int  # the first run at the new level
    earliest: int  # the first run that it may begin with
    latest: int  # the last one


@dataclass(frozen=True)
class _Times:
    """Logarithms of the times of one test, without what its runs have in common."""

    logs: Floats
    scatter: float  # of a run
    factor: float  # by which a mean of neighbours scatters more than if they were independent

    @property
    def spread(self) -> float:
        return self.scatter * self.factor


def exact_steps(values: Floats) -> list[Step]:
    """The changes of a figure that unchanged code does not change."""
    bounds = np.flatnonzero(np.diff(values)) + 1
    begins, ends = [0, *bounds.tolist()], [*bounds.tolist(), len(values)]
    lasting = [(begin, values[begin]) for begin, end in zip(begins, ends, strict=True) if end - begin >= LASTING_EXACT]
    # Runs between two levels may have the change already.
    found = [
        Step(at, int(np.flatnonzero(values[:at] == before)[-1]) + 1, at)
        for (_, before), (at, after) in pairwise(lasting)
        if after != before
    ]
    if len(found) <= max(3, len(values) / UNSTEADY):
        return found
    return steps([np.arange(len(values), dtype=np.int32)], [values], len(values), scaled=False)[0]


def steps(runs: Sequence[NDArray[np.int32]], values: Sequence[Floats], count: int, *, scaled: bool = True) -> list[list[Step]]:
    """The changes of tests that were measured in the same runs on alike cards.

    Args:
        runs: of each test, its runs' numbers, ascending.
        values: its figures.
        count: number of runs.
        scaled: figures are times, whose logarithms scatter; else they scatter around their median as they are.

    Returns:
        For each test its changes, in order.

    Raises:
        UserError: there are tests to look at closely, and ruptures is not installed.
    """
    if not count:
        return [[] for _ in runs]
    logs = [np.log(own) if scaled else own / (np.abs(np.median(own)) or 1.0) for own in values]
    usual = common(runs, logs, count)
    shared = usual - _levels(usual)
    own = [one - shared[at] for at, one in zip(runs, logs, strict=True)]
    found: list[list[Step]] = [[] for _ in own]
    order = sorted((index for index, one in enumerate(own) if len(one) >= 2 * LASTING), key=lambda index: len(own[index]))
    for begin in range(0, len(order), CHUNK):
        chunk = order[begin : begin + CHUNK]
        for index, times in zip(chunk, _selected([own[index] for index in chunk]), strict=True):
            if times is not None:
                found[index] = _placed(times)
    return found


def common(runs: Sequence[NDArray[np.int32]], logs: Sequence[Floats], count: int) -> Floats:
    """The deviation that the tests of a run have in common, of each run; 0 in a run of few tests."""
    largest = sorted(range(len(runs)), key=lambda index: len(runs[index]))[-max(TESTS_AT_MOST, len(runs) // 2) :]
    chosen = largest[:: max(1, len(largest) // TESTS_AT_MOST)]
    if len(chosen) < TESTS_FOR_COMMON:
        return np.zeros(count)
    table = np.full((len(chosen), count), np.nan)
    for line, index in zip(table, chosen, strict=True):
        line[runs[index]] = logs[index]
    known = np.count_nonzero(~np.isnan(table), axis=0) >= TESTS_FOR_COMMON
    found = np.zeros(count)
    if not known.any():
        return found
    table = table[:, known]
    deviation = np.zeros(table.shape[1])
    for _ in range(3):
        level = np.nanmedian(table[~np.isnan(table).all(axis=1)] - deviation, axis=1)
        deviation = np.nanmedian(table[~np.isnan(table).all(axis=1)] - level[:, None], axis=0)
    found[known] = deviation
    return found


def _levels(deviation: Floats) -> Floats:
    """The lasting part of the common deviation: the median of each stretch between two changes."""
    found = np.full(len(deviation), np.median(deviation))
    if len(deviation) < 2 * LASTING or not deviation.any():
        return found
    (times,) = _selected([deviation])
    bounds = [] if times is None else _bounds(times)
    for begin, end in pairwise([0, *bounds, len(deviation)]):
        found[begin:end] = np.median(deviation[begin:end])
    return found


def _medians(table: Floats, counts: NDArray[np.int64]) -> Floats:
    """The median of each line's first numbers."""
    table = np.where(np.arange(table.shape[1]) < counts[:, None], table, np.inf)
    table.sort(axis=1)
    lines = np.arange(len(table))
    return (table[lines, (counts - 1) // 2] + table[lines, counts // 2]) / 2


def _despiked(table: Floats, scatter: Floats) -> Floats:
    """Each run that lies apart from both of its neighbours, replaced by the middle one of the three."""
    left, middle, right = table[:, :-2], table[:, 1:-1], table[:, 2:]
    low, high = np.minimum(left, right), np.maximum(left, right)
    median = np.clip(middle, low, high)
    out = table.copy()
    out[:, 1:-1] = np.where(np.abs(middle - median) > SPIKE * scatter[:, None], median, middle)
    return out


def _selected(series: Sequence[Floats]) -> list[_Times | None]:
    """The tests of a chunk that can have a change; None for the others."""
    counts = np.array([len(one) for one in series])
    longest = int(counts.max())
    table = np.empty((len(series), longest))
    for line, one in zip(table, series, strict=True):
        line[: len(one)] = one
        line[len(one) :] = one[-1]
    gaps = np.abs(np.diff(table, axis=1))[:, ::2]
    scatter = np.maximum(_medians(gaps, np.maximum(counts // 2, 1)) / (0.6745 * math.sqrt(2)), LEAST_SCATTER)
    table = _despiked(table, scatter)
    table -= table[:, :1]
    sums = np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1)
    windows = [width for width in (3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if 2 * width <= longest]
    largest, factor = np.zeros(len(table)), np.ones(len(table))
    for width in windows:
        apart = (sums[:, 2 * width :] - 2 * sums[:, width:-width] + sums[:, : -2 * width]) / width
        np.abs(apart, out=apart)
        own = counts - 2 * width + 1  # positions of each test
        error = scatter * math.sqrt(2 / width)
        if width in (8, 16) and (many := own >= 8 * width).any():
            step = width // 4
            usual = _medians(apart[:, ::step], np.maximum(own // step, 1)) / 0.6745
            factor = np.where(many, np.maximum(factor, usual / error), factor)
        if longest != counts.min():
            apart[np.arange(apart.shape[1]) >= own[:, None]] = 0.0
        largest = np.maximum(largest, apart.max(axis=1) / error)
    lines = np.arange(len(table))
    for width in (3, 5, 8, 12, 20, 32):  # the newest runs against many
        past = np.minimum(10 * width, counts - width)
        fit = past >= LASTING
        past = np.maximum(past, 1)
        begin = np.maximum(counts - width, 0)
        new = (sums[lines, counts] - sums[lines, begin]) / width
        old = (sums[lines, begin] - sums[lines, np.maximum(begin - past, 0)]) / past
        largest = np.maximum(largest, np.where(fit, np.abs(new - old) / (scatter * np.sqrt(1 / width + 1 / past)), 0.0))
    chosen = largest > SELECTED * factor
    return [_Times(one, float(scatter[line]), float(factor[line])) if chosen[line] else None for line, one in enumerate(series)]


def _bounds(times: _Times) -> list[int]:
    """The first run of each level but the first."""
    logs, spread = times.logs, times.spread
    smooth = _despiked(logs[None, :], np.array([times.scatter]))[0]
    found: Any = _library().KernelCPD(kernel="linear", min_size=LASTING).fit(((smooth - np.median(smooth)) / spread)[:, None])
    bounds = [int(one) for one in found.predict(pen=PENALTY)[:-1]]
    certain = CERTAIN * (1 + FEW / len(logs))
    while bounds:
        edges = [0, *bounds, len(logs)]
        for index, at in enumerate(bounds, 1):  # each between the new place of the one before and the old one of the next
            edges[index] = _best(smooth, edges[index - 1], edges[index + 1], at)
        bounds = edges[1:-1]
        weakest, least = 0, math.inf
        for index, (begin, at, end) in enumerate(zip(edges, bounds, edges[2:], strict=False)):
            change = abs(float(np.median(logs[at:end]) - np.median(logs[begin:at])))
            errors = change / (spread * math.sqrt(1 / (at - begin) + 1 / (end - at)))
            strength = min(errors / certain, change / math.log1p(LEAST))
            if at - begin < LASTING_INSIDE or (end < len(logs) and end - at < LASTING_INSIDE):
                strength = min(strength, 0.0)
            if strength < least:
                weakest, least = index, strength
        if least >= 1:
            break
        del bounds[weakest]
    return bounds


def _costs(logs: Floats) -> Floats:
    """For each place of a single change, the sum of squares around the means of its sides."""
    count = np.arange(1, len(logs))
    centred = logs - logs.mean()
    before = np.cumsum(centred)[:-1]
    return float(centred @ centred) - before**2 / count - before**2 / (len(logs) - count)


def _best(logs: Floats, begin: int, end: int, at: int) -> int:
    """The best place of the one change between two others."""
    costs = _costs(logs[begin:end])[LASTING - 1 : end - begin - LASTING]
    return begin + LASTING + int(np.argmin(costs)) if len(costs) else at


def _placed(times: _Times) -> list[Step]:
    bounds = _bounds(times)
    edges = [0, *bounds, len(times.logs)]
    smooth = _despiked(times.logs[None, :], np.array([times.scatter]))[0]
    found = []
    for begin, at, end in zip(edges, bounds, edges[2:], strict=False):
        costs = _costs(smooth[begin:end])
        likely = np.flatnonzero(costs <= costs[at - begin - 1] + RATIO * times.spread**2) + begin + 1
        # Only around the best place: a run of chance elsewhere is no part of the same stretch.
        low = high = at
        inside = set(likely.tolist())
        while low - 1 in inside:
            low -= 1
        while high + 1 in inside:
            high += 1
        found.append(Step(at, low, high))
    return _with_ramps(found, smooth, times.spread)


def _with_ramps(found: list[Step], logs: Floats, spread: float) -> list[Step]:
    """Steps in one direction that a straight slope describes as well become one change."""
    out: list[Step] = []
    index = 0
    edges = [0, *(step.at for step in found), len(logs)]
    while index < len(found):
        last = index
        for end in range(len(found) - 1, index, -1):
            if _is_ramp(logs, edges[index : end + 3], spread):
                last = end
                break
        if last == index:
            out.append(found[index])
        else:
            low, high = _slope(edges[index : last + 3])
            out.append(Step(high, low, high))
        index = last + 1
    return out


def _slope(edges: Sequence[int]) -> tuple[int, int]:
    """Begin and end of the slope that a staircase with these edges stands for; the outermost edges are those of the levels around it."""
    half = (edges[-2] - edges[1]) // (2 * (len(edges) - 3))
    return max(edges[0] + 1, edges[1] - half), min(edges[-1] - 1, edges[-2] + half)


def _is_ramp(logs: Floats, edges: Sequence[int], spread: float) -> bool:
    levels = [float(np.mean(logs[begin:end])) for begin, end in pairwise(edges)]
    rises = [after > before for before, after in pairwise(levels)]
    if len(set(rises)) > 1:
        return False
    low, high = _slope(edges)
    at = np.arange(edges[0], edges[-1])
    slope = np.interp(at, [low, high], [levels[0], levels[-1]])
    stairs = np.repeat(levels, np.diff(edges))
    own = logs[edges[0] : edges[-1]]
    return float(np.sum((own - slope) ** 2)) <= float(np.sum((own - stairs) ** 2)) + 4 * spread**2


def _library() -> Any:
    try:
        import ruptures
    except ImportError:
        raise UserError("change points need ruptures; pip install 'pytest-gpumem[history]' brings it") from None
    return ruptures
