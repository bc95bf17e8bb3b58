"""Read bandwidth of L2 over a sweep of footprints: a plateau, a knee, and DRAM's bandwidth beyond."""

from __future__ import annotations

import pytest

from pytest_gpumem.kernels.calls import requested_bytes
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES, knee, plateau

SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 3 / 2, 2, 4)
"""Footprints, as shares of L2."""
SERVED = 16
"""Bytes read by one launch over those of L2, whatever the footprint: on a large GPU some 100 us, of which the launch itself is little."""


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
