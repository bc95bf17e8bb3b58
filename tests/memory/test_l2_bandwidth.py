"""Read bandwidth of L2 over a sweep of footprints: a plateau, a knee, and DRAM's bandwidth beyond."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from pytest_gpumem.kernels.kernel import requested_bytes
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES

SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 4)
"""Footprints, as shares of L2."""
SERVED = 16
"""Bytes read by one launch over those of L2, whatever the footprint: on a large GPU some 100 us, of which the launch itself is little."""


def plateau(bandwidths: Sequence[float]) -> float:
    """Return the bandwidth that a sweep over ascending footprints keeps while a cache holds them:
    the median of those that are nearer to the highest than to the last, which is beyond it."""
    highest, end = max(bandwidths), bandwidths[-1]
    if end >= highest:
        last = f"of {len(bandwidths)} bandwidths the last, {end:g}, is the highest"
        raise ValueError(f"no fall: {last}; a cache still holds that footprint")
    return statistics.median(b for b in bandwidths if b > (highest + end) / 2)


def knee(footprints: Sequence[float], bandwidths: Sequence[float]) -> float:
    """Return the footprint where the plateau of a sweep over ascending footprints ends: the last
    before bandwidth comes nearer to that of the largest footprint than to the plateau."""
    top = plateau(bandwidths)
    limit = (top + bandwidths[-1]) / 2
    reached = next(i for i, bandwidth in enumerate(bandwidths) if bandwidth >= top)
    below = next(i for i in range(reached, len(bandwidths)) if bandwidths[i] < limit)
    return footprints[below - 1]


# Reading L2 at full speed draws more power than anything else here. A GPU that does it for seconds throttles (sw_power_cap on an H200), and
# so are the first samples of whatever is measured next.
@pytest.mark.gpumem(placements=3, budget="30 ms")
def test_l2_read_bandwidth_has_a_knee(gpu_benchmark, gpu_device, gpu_kernels, device_buffer):
    """Hot, so that the first pass is like all others. A row's bandwidth counts the footprint once; what L2 serves counts every pass."""
    l2 = gpu_device.facts.l2_bytes
    footprints, served = [], []
    for share in SHARES:
        nbytes = int(share * l2) // TILE_BYTES * TILE_BYTES
        repeats = round(SERVED / share)
        arguments = (
            device_buffer(nbytes, "i4"),
            device_buffer((nbytes // TILE_BYTES * repeats,), "i4"),
            repeats,
        )
        result = gpu_benchmark(
            gpu_kernels.l2_read, *arguments, mode="hot", label=f"{share:g} of L2"
        )
        footprints.append(nbytes)
        served.append(requested_bytes(gpu_kernels.l2_read.accesses(*arguments)) / result.latency)
    assert plateau(served) > 1.1 * served[-1]
    assert knee(footprints, served) <= l2
