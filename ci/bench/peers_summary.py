"""Spread between processes, wall time, cost of precision and agreement of the ways of peers.py. Pure functions over its record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from record_file import head
from scipy import special

CONFIDENCE = 0.95

OURS, DIRTY, HOT = "gpumem clean-cold", "gpumem dirty-cold", "gpumem hot"
HOT_ONCE = "gpumem hot, one placement"
CORRECTED = ", corrected"
"""Added to the name of a way: its values as if all processes had the same launch overhead, as a comparison of processes takes them."""
NVBENCH, CUDAGRAPH = "nvbench cold", "triton do_bench_cudagraph"

COST_LIMITS = {256: 1 / 5, 32: 1 / 20, 2: 1 / 20}
"""Cost of precision over nvbench's, by MiB of each array: the variance between processes times the wall time of a case."""
DIRTY_LIMITS = {256: 0.015, 32: 0.015}
"""Difference of the dirty-cold mean from nvbench's cold mean."""
HOT_LIMITS = dict.fromkeys(COST_LIMITS, 0.01)
"""Difference of the hot mean from do_bench_cudagraph's."""
Values = Sequence[float]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One way of measuring, at one size, over all processes."""

    way: str
    mib: int
    processes: int
    mean: float
    """Mean of the reported values in seconds."""
    spread: Interval | None
    """Standard deviation of the reported values over their mean, with the chi-square interval of normal values; None below two values."""
    wall: float
    """Median wall time of one case in seconds."""
    samples: float
    """Median number of samples of one case."""
    throttled: int
    """Cases with a throttle reason before or after."""


@dataclass(frozen=True)
class Line:
    """One claim, what was measured for it, and whether it holds."""

    claim: str
    mib: int
    limit: float
    measured: Interval | None
    """None where this record does not hold what the claim needs."""
    interval: str
    """The method of the interval."""
    holds: bool | None
    """True if the measured value keeps the limit; None without one."""
    beyond_doubt: bool
    """True if the whole interval is on the same side of the limit."""


def spread(values: Values) -> float:
    """Standard deviation (n - 1) over the mean."""
    return float(np.std(values, ddof=1) / np.mean(values))


def spread_interval(values: Values) -> Interval | None:
    """The spread with its chi-square interval: exact for normal values and a mean known far better than the deviation."""
    n = len(values)
    if n < 2:
        return None
    found, tail = spread(values), (1 - CONFIDENCE) / 2
    above, below = (float(special.chdtri(n - 1, share)) for share in (tail, 1 - tail))
    return Interval(found, found * math.sqrt((n - 1) / above), found * math.sqrt((n - 1) / below))


def cost_ratio(
    ours: Values, theirs: Values, our_walls: Values, their_walls: Values
) -> Interval | None:
    """Cost of precision of ours over theirs: the ratio of the variances, each as a share of its mean, times the ratio of the wall times.

    A way that takes n times as long, or needs n processes, to reduce its variance to the n-th part costs the same. The interval is the F
    interval of the variances of normal values; the medians of the wall times are taken as known. None if either has fewer than two values
    or theirs do not differ.
    """
    if len(ours) < 2 or len(theirs) < 2 or spread(theirs) == 0:
        return None
    found = (spread(ours) / spread(theirs)) ** 2 * float(
        np.median(our_walls) / np.median(their_walls)
    )
    tail, m, n = (1 - CONFIDENCE) / 2, len(ours) - 1, len(theirs) - 1
    return Interval(
        found,
        found / float(special.fdtri(m, n, 1 - tail)),
        found * float(special.fdtri(n, m, 1 - tail)),
    )


def mean_difference(ours: Values, theirs: Values) -> Interval | None:
    """Mean of ours over mean of theirs, less 1, with Welch's interval."""
    if len(ours) < 2 or len(theirs) < 2:
        return None
    base = float(np.mean(theirs))
    difference = float(np.mean(ours)) / base - 1
    a, b = (float(np.var(v, ddof=1)) / len(v) for v in (ours, theirs))
    if a + b == 0:
        return Interval(difference, difference, difference)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    half = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(a + b) / base
    return Interval(difference, difference - half, difference + half)


# Over a record


def cases(
    record: dict[str, Any], way: str | None = None, mib: int | None = None
) -> list[dict[str, Any]]:
    """The cases in the order of their rounds. A worker that failed has none.

    Ways whose cases all know their process's launch overhead come a second time, corrected.
    """
    taken = [case for run in record["runs"] for case in run["cases"]]
    every = [*taken, *_corrected(taken)]
    return [case for case in every if way in (None, case["way"]) and mib in (None, case["mib"])]


def _corrected(taken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases with the launch overhead put to the mean of their way and size (`pytest_gpumem.judging.slowdown.corrected_logs`)."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for case in taken:
        groups.setdefault((case["way"], case["mib"]), []).append(case)
    found = []
    for group in groups.values():
        overheads = [case.get("overhead") for case in group]
        known = [overhead for overhead in overheads if overhead is not None]
        if len(known) == len(group):
            common = float(np.mean(known))
            for case, overhead in zip(group, known, strict=True):
                value = case["value"] + common - overhead
                found.append({**case, "way": case["way"] + CORRECTED, "value": value})
    return found


def rows(record: dict[str, Any]) -> list[Row]:
    """A row for each size and way, in the order in which the record names them first."""
    keys = dict.fromkeys((case["mib"], case["way"]) for case in _sorted(cases(record)))
    found = []
    for mib, way in keys:
        own = cases(record, way, mib)
        values = [case["value"] for case in own]
        found.append(
            Row(
                way=way,
                mib=mib,
                processes=len(values),
                mean=float(np.mean(values)),
                spread=spread_interval(values),
                wall=float(np.median([case["wall"] for case in own])),
                samples=float(np.median([case["samples"] for case in own])),
                throttled=sum(
                    bool(case[when]["throttle_reasons"])
                    for case in own
                    for when in ("before", "after")
                ),
            )
        )
    return found


WAYS = (
    OURS,
    OURS + CORRECTED,
    NVBENCH,
    DIRTY,
    DIRTY + CORRECTED,
    "triton do_bench median",
    "triton do_bench mean",
    "cupyx benchmark",
    HOT,
    HOT + CORRECTED,
    HOT_ONCE,
    HOT_ONCE + CORRECTED,
    CUDAGRAPH,
    "torch Timer",
    "nvbench batch",
)
"""Order of a table: what is compared stands together."""


def _sorted(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda case: (case["mib"], WAYS.index(case["way"])))


def made_of(record: dict[str, Any], mib: int) -> dict[str, float] | None:
    """The parts of our clean-cold spread between processes.

    Returns:
        Shares of the mean: `between_placements` within a process, `expected` between processes if their placements were drawn independently,
        `overhead` by the launch overhead (0 where it is unknown), `found`, and the `rest` whose square is what `found` has beyond the squares
        of both: what else a process keeps for all its placements; and `placements`, their median number. None with fewer than two processes
        or placements.
    """
    own = [case for case in cases(record, OURS, mib) if len(case["medians"]) > 1]
    if len(own) < 2:
        return None
    mean = float(np.mean([case["value"] for case in own]))
    counts = [len(case["medians"]) for case in own]
    variances = np.array([np.var(case["medians"], ddof=1) for case in own])
    expected = math.sqrt(float(np.mean(variances / counts))) / mean
    overheads = [case["overhead"] for case in own if case.get("overhead") is not None]
    overhead = float(np.std(overheads, ddof=1)) / mean if len(overheads) == len(own) else 0.0
    found = spread([case["value"] for case in own])
    return {
        "placements": float(np.median(counts)),
        "between_placements": math.sqrt(float(np.mean(variances))) / mean,
        "expected": expected,
        "overhead": overhead,
        "found": found,
        "rest": math.sqrt(max(0.0, found**2 - expected**2 - overhead**2)),
    }


def lines(record: dict[str, Any]) -> list[Line]:
    """Every claim of the comparison, with what this record measured for it."""

    def values(way: str, mib: int, what: str = "value") -> list[float]:
        return [case[what] for case in cases(record, way, mib)]

    found = []
    for way in (OURS, OURS + CORRECTED):
        for mib, limit in COST_LIMITS.items():
            figures = (
                values(one, mib, what) for what in ("value", "wall") for one in (way, NVBENCH)
            )
            claim = f"cost of precision over nvbench's{way.removeprefix(OURS)}"
            found.append(_line(claim, mib, limit, cost_ratio(*figures), "F"))
    differences = [
        ("dirty-cold less nvbench's cold mean", DIRTY, NVBENCH, DIRTY_LIMITS),
        ("hot less do_bench_cudagraph", HOT, CUDAGRAPH, HOT_LIMITS),
        ("hot, one placement, less do_bench_cudagraph", HOT_ONCE, CUDAGRAPH, HOT_LIMITS),
    ]
    for claim, way, other, limits in differences:
        for mib, limit in limits.items():
            difference = mean_difference(values(way, mib), values(other, mib))
            found.append(_line(claim, mib, limit, difference, "Welch", both_ways=True))
    return found


def _line(
    claim: str,
    mib: int,
    limit: float,
    measured: Interval | None,
    interval: str,
    *,
    both_ways: bool = False,
) -> Line:
    size: Callable[[float], float] = abs if both_ways else float
    if measured is None:
        return Line(claim, mib, limit, None, interval, None, False)
    holds = size(measured.value) <= limit
    ends = [size(measured.low) <= limit, size(measured.high) <= limit]
    beyond = (
        all(ends)
        if holds
        else not any(ends) and not (both_ways and measured.low < 0 < measured.high)
    )
    return Line(claim, mib, limit, measured, interval, holds, beyond)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """What a record keeps of its runs, as JSON holds it."""
    sizes = dict.fromkeys(case["mib"] for case in _sorted(cases(record)))
    parts = {mib: made_of(record, mib) for mib in sizes}
    runs = record["runs"]
    return {
        "workers": len(runs),
        "failed": sum(run["error"] is not None for run in runs),
        "cards": len({run["card"] for run in runs}),
        "rows": [asdict(row) for row in rows(record)],
        "must_show": [asdict(line) for line in lines(record)],
        "clean_cold_spread_is_made_of": [
            {"mib": mib, **part} for mib, part in parts.items() if part
        ],
    }


def kept_rows(summary: dict[str, Any]) -> list[Row]:
    """The rows that a summary keeps."""
    return [Row(**{**row, "spread": _interval(row["spread"])}) for row in summary["rows"]]


def kept_lines(summary: dict[str, Any]) -> list[Line]:
    """The claims that a summary keeps."""
    return [
        Line(**{**line, "measured": _interval(line["measured"])}) for line in summary["must_show"]
    ]


def _interval(plain: dict[str, float] | None) -> Interval | None:
    return None if plain is None else Interval(**plain)


# As text


def table(record: dict[str, Any]) -> str:
    """The rows by size, and the claims that the record can judge; * marks a doubtful one."""
    kept = record["summary"]
    several = f", {kept['cards']} cards" if kept["cards"] > 1 else ""
    said = [
        head(record) + several,
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if kept["failed"]:
        said.append(f"{kept['failed']} of {kept['workers']} workers failed and are left out")
    said += ["", _HEAD]
    last = None
    for row in kept_rows(kept):
        said.append(_row_text(row, first=row.mib != last))
        last = row.mib
    said += ["", f"{'':4}  {'claim':<62}{'measured':<12}limit"]
    claims = kept_lines(kept)
    said += [_claim_text(line, line.measured) for line in claims if line.measured is not None]
    if left := sum(line.measured is None for line in claims):
        said.append(f"{left} further claims are not measured in this record")
    return "\n".join(said)


_HEAD = f"{'arrays':<9}{'way':<30}{'us':>9}{'spread %':>10}{'wall s':>8}"


def _row_text(row: Row, *, first: bool) -> str:
    size = f"{row.mib} MiB" if first else ""
    spread = "" if row.spread is None else f"{100 * row.spread.value:.3f}"
    noted = f"  {row.throttled} throttled" if row.throttled else ""
    return f"{size:<9}{row.way:<30}{row.mean * 1e6:>9.3f}{spread:>10}{row.wall:>8.3f}{noted}"


def _claim_text(line: Line, measured: Interval) -> str:
    mark = "ok" if line.holds else "MISS"
    claim = f"{line.claim}, {line.mib} MiB"
    doubt = "" if line.beyond_doubt else " *"
    if "over" in line.claim:
        value, limit = f"{measured.value:.3f}", f"{line.limit:.3g}"
    else:
        value, limit = f"{100 * measured.value:.3f} %", f"{100 * line.limit:.3g} %"
    return f"{mark:<4}  {claim:<62}{value + doubt:<12}{limit}"
