"""What the peers' comparers say of the same samples: one process of the baseline against one of the new code, as they compare two runs.

- pytest-benchmark: `--benchmark-compare-fail`, its own check on its own figures of the samples.
- nvbench_compare.py (cuda-bench 0.3.0): SLOW where the means differ by more than the smaller relative standard deviation.
- nvbench_compare_robust.py (cuda-bench 0.3.0, default preset): between least and upper quartile, SLOW where new code's interval is above
  the other's by 0.5 % or more; SAME where the medians are within 0.5 %, the intervals overlap by half of the narrower one or more, and no
  interquartile range is above 2 % of the median; else undecided. The SM clock, by which it weighs times, is taken as equal.

The samples are this plugin's: over placements of the buffers, which neither peer varies by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_benchmark.utils import parse_compare_fail

STOCK = ("mean:5%", "median:1%", "min:1%")
NVBENCH, ROBUST = "nvbench_compare", "nvbench_compare_robust"
CHECKS = (*STOCK, NVBENCH, ROBUST)
GAP, CENTRES, OVERLAP, DISPERSION = 0.005, 0.005, 0.5, 0.02
"""nvbench_compare_robust's default preset: clear_gap, same.center, same.overlap_fraction, same.relative_dispersion_ceiling."""

Stats = Mapping[str, float]


def verdict(check: str, base: Stats, head: Stats) -> str:
    """ "X": slower; ".": not; "?": undecided.

    Args:
        check: one of `CHECKS`.
        base: figures of the baseline's samples.
        head: figures of the new code's samples, in the same unit.
    """
    if check == NVBENCH:
        noises = [one["stddev"] / one["mean"] for one in (base, head) if one["stddev"]]
        if not noises:
            return "?"
        return "X" if head["mean"] / base["mean"] - 1 > min(noises) else "."
    if check == ROBUST:
        return _robust(base, head)
    return "X" if parse_compare_fail(check).fails(head, base) else "."


def _robust(base: Stats, head: Stats) -> str:
    if head["min"] > base["q3"] and (head["min"] - base["q3"]) / base["q3"] >= GAP:
        return "X"
    if base["min"] > head["q3"] and (base["min"] - head["q3"]) / head["q3"] >= GAP:
        return "."
    if abs(base["median"] - head["median"]) / min(base["median"], head["median"]) > CENTRES or _overlap(base, head) < OVERLAP:
        return "?"
    noisy = max((one["q3"] - one["q1"]) / one["median"] for one in (base, head)) > DISPERSION
    return "?" if noisy else "."


def _overlap(base: Stats, head: Stats) -> float:
    common = min(base["q3"], head["q3"]) - max(base["min"], head["min"])
    if common < 0:
        return 0.0
    widths = [one["q3"] - one["min"] for one in (base, head)]
    return common / min(widths) if min(widths) > 0 else 1.0
