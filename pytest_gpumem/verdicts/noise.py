"""How much a measurement varies that nobody changed: what real GPUs showed, for use until a baseline knows better.

One triad on H200 cards, arrays of 2, 32 and 256 MiB, 30 fresh processes, clean-cold samples one at a time, the launch overhead taken out
(ci/records/nvidia-h200/peers.json and peers_random.json, whichever shows more). Latency is what decides: what varies (event ticks of
32 ns, where buffers land in L2 and DRAM) is nearly constant in time, so that it weighs more on a short kernel.
"""

from __future__ import annotations

import itertools
import math

# Latency in seconds, standard deviation of its logarithm.
_BETWEEN_PROCESSES = ((5.4e-6, 0.0051), (24.8e-6, 0.0012), (183e-6, 0.00037))
# At 183 us the processes do not differ beyond what their placements leave: the whole spread stands for what they may add.
_BETWEEN_PLACEMENTS = ((5.4e-6, 0.0094), (24.8e-6, 0.0029), (183e-6, 0.0016))
# At 5.4 and 24.8 us: means of 30 to 60 processes on two cards and at two times on one of them (peers.json, peers_random.json,
# unrelated_allocation.json), less what their processes leave. At 183 us one session is recorded: there it is as much as its processes.
_BETWEEN_SESSIONS = ((5.4e-6, 0.0025), (24.8e-6, 0.0007), (183e-6, 0.0004))

LAUNCH_OVERHEAD = 60e-9
"""Seconds by which the launch overhead differs between processes, as a standard deviation (ci/records/nvidia-h200/reading_noise.json)."""


def process_spread(latency: float, *, levelled: bool = True) -> float:
    """Expected spread of a latency between processes of one session, beyond what their placements leave, as a share of it.

    The measured figures: 0.037 % at 183 us (256 MiB), 0.12 % at 24.8 us (32 MiB), 0.51 % at 5.4 us (2 MiB). Between them a straight line
    in logarithms; above, constant; below, a constant time of 28 ns.

    Args:
        latency: seconds, above 0.
        levelled: launch overhead does not come into it: it is known and taken out, or shared by a batch of launches.
    """
    spread = _interpolated(_BETWEEN_PROCESSES, latency)
    return spread if levelled else math.hypot(spread, LAUNCH_OVERHEAD / latency)


def placement_spread(latency: float) -> float:
    """Expected spread between buffer placements of one process, as a share of the latency.

    The measured figures: 0.16 % at 183 us, 0.29 % at 24.8 us, 0.94 % at 5.4 us.

    Args:
        latency: seconds, above 0.
    """
    return _interpolated(_BETWEEN_PLACEMENTS, latency)


def session_spread(latency: float) -> float:
    """Expected spread between sessions (another hour, another card of the same kind), as a share of the latency.

    0.25 % at 5.4 us, 0.07 % at 24.8 us, from three sessions on two cards; 0.04 % at 183 us is assumed.

    Args:
        latency: seconds, above 0.
    """
    return _interpolated(_BETWEEN_SESSIONS, latency)


def _interpolated(points: tuple[tuple[float, float], ...], latency: float) -> float:
    if latency <= points[0][0]:
        return points[0][1] * points[0][0] / latency
    for (left, high), (right, low) in itertools.pairwise(points):
        if latency <= right:
            position = math.log(latency / left) / math.log(right / left)
            return math.exp(math.log(high) + position * (math.log(low) - math.log(high)))
    return points[-1][1]
