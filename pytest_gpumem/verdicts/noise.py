"""How much a measurement varies that nobody changed: what real GPUs showed, for use until a baseline knows better.

One triad on H100 and H200 cards, arrays of 256, 32 and 2 MiB, fresh processes, cold samples from a CUDA graph. Latency is what
decides: what varies (event ticks of 32 ns, where buffers land in L2 and DRAM) is nearly constant in time, so that it weighs more
on a short kernel.
"""

from __future__ import annotations

import itertools
import math

# Latency in seconds, standard deviation of its logarithm.
_BETWEEN_PROCESSES = ((7.0e-6, 0.010), (39.5e-6, 0.002), (268e-6, 0.0005))
# 256 MiB: the whole spread of one-placement processes; 32 and 2 MiB: fresh buffers in one process.
_BETWEEN_PLACEMENTS = ((7.0e-6, 0.021), (39.5e-6, 0.0037), (268e-6, 0.0005))


def process_spread(latency: float) -> float:
    """Expected spread of a latency between processes, as a share of it.

    The measured figures: 0.05 % at 268 us (256 MiB), 0.2 % at 39.5 us (32 MiB), 1 % at 7 us (2 MiB). Between them a straight line
    in logarithms; above, constant; below, a constant time of 70 ns.

    Args:
        latency: seconds, above 0.
    """
    return _interpolated(_BETWEEN_PROCESSES, latency)


def placement_spread(latency: float) -> float:
    """Expected spread between buffer placements of one process, as a share of the latency.

    The measured figures: 0.05 % at 268 us, 0.37 % at 39.5 us, 2.1 % at 7 us.

    Args:
        latency: seconds, above 0.
    """
    return _interpolated(_BETWEEN_PLACEMENTS, latency)


def _interpolated(points: tuple[tuple[float, float], ...], latency: float) -> float:
    if latency <= points[0][0]:
        return points[0][1] * points[0][0] / latency
    for (left, high), (right, low) in itertools.pairwise(points):
        if latency <= right:
            position = math.log(latency / left) / math.log(right / left)
            return math.exp(math.log(high) + position * (math.log(low) - math.log(high)))
    return points[-1][1]
