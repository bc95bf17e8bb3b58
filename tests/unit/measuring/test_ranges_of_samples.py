"""What a measurement's NVTX ranges say, and that none of them lies inside a timed interval."""

from __future__ import annotations

from typing import Any

import pytest
from bench import Bench
from counted_device import replaced

from pytest_gpumem import MiB

SAMPLERS: dict[str, dict[str, Any]] = {
    "blocked": {"mode": "clean-cold", "sampler": "blocked"},
    "batched": {"mode": "hot", "sampler": "batched"},
    "host": {"mode": "clean-cold", "sampler": "host"},
    "plain": {"mode": "clean-cold"},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_range_is_opened_or_closed_within_a_timed_interval(sampler: str) -> None:
    bench = Bench(profiled=sampler == "plain")
    replaced(bench.device, launches_wait=lambda: True)  # then nobody looks for other work
    bench.harness.floors()
    log = bench.log
    target = bench.kernel_target("triad", *bench.buffers(3, 2 * MiB), 3.0)
    bench.device.before("streams.record", lambda event, stream: log.append("event"))
    bench.device.before("now", lambda: log.append("clock"))
    bench.device.before("kernels.launch", lambda what, stream: log.append(what.kernel.name))
    assert bench.take(target, placements=1, **SAMPLERS[sampler]).sampler == sampler
    mark = "clock" if sampler == "host" else "event"
    if (
        sampler == "host"
    ):  # the clock is read elsewhere too: an interval is one reading, the launch, one reading
        intervals = [
            log[at - 1 : at + 2]
            for at, what in enumerate(log)
            if what == "triad" and log[at - 1] == log[at + 1] == mark
        ]
        # A range between a reading and the launch would take the interval apart.
        assert (
            len(intervals) >= sum(what == "triad" for what in log) - 3
        )  # two checks and the first launch are not timed
        return
    marks = [at for at, what in enumerate(log) if what == mark]
    first = next(
        at for at, what in enumerate(log) if what in ("<test_it.warm-up", "<test_it.measure")
    )
    sampled = [at for at in marks if at > first]
    assert len(sampled) >= 2
    for start, end in zip(sampled[::2], sampled[1::2], strict=True):
        assert {*log[start + 1 : end]} - {"clock"} == {"triad"}
