"""Other work on the device, throttling, the SM clock that ran and the host's time of a launch."""

from __future__ import annotations

from typing import Any

import pytest
from bench import Bench
from counted_device import replaced
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.measure import WAIT_SHARE
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import MiB


def judged(bench: Bench, measured: Measurement) -> Any:
    return judge(measured, Limits(max_latency="1 s"), bench.device.facts, [], strict=False)


def triad(bench: Bench, **plan: Any) -> Measurement:
    return bench.measure("triad", *bench.buffers(3, 2 * MiB), 3.0, **{"budget": 0.2, **plan})


class Load:
    """Work of somebody else, such as a thread that the test before has left: it keeps a stream of its own busy until `until`."""

    def __init__(
        self, bench: Bench, until: float, verb: str = "streams.hold", nbytes: int = 64 * MiB
    ) -> None:
        buffers, values = bench.kernels.copy.arguments(tuple(bench.buffers(2, nbytes)), {})
        work, stream = bench.kernels.copy.launch(buffers, values), bench.device.streams.create()

        def queue(*_: Any) -> None:
            for __ in range(4 if bench.device.now() < until else 0):
                bench.device.kernels.launch(work, stream)

        bench.device.before(verb, queue)


def test_work_beside_the_samples_leaves_a_row_undecided() -> None:
    """Also where it has begun before anything was measured, so that what is usual was read beside it."""
    for known in [False, True]:
        bench = Bench()
        assert triad(Bench()).busy == 0, known
        if known:
            bench.harness.floors()
        Load(bench, until=1e9)
        beside = triad(bench)
        assert beside.busy > 0.5, known
        verdict = judged(bench, beside)
        assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.CONDITIONS), known
        assert "other work kept the device busy at " in verdict.reason, known


def test_what_ends_soon_is_waited_for(bench: Bench) -> None:
    alone = triad(bench)
    Load(bench, until=bench.device.now() + 0.04)
    after = triad(bench)
    assert after.busy == 0
    assert after.latency == pytest.approx(alone.latency, rel=0.02)
    assert judged(bench, after).outcome is Outcome.PASS


def run_at(bench: Bench, conditions: Any, hertz: float) -> None:
    """From now on the device, which never throttles by itself, says so."""
    replaced(bench.device, conditions=conditions)
    replaced(bench.device.streams, clock=lambda hold: hertz)


@pytest.mark.parametrize(("seconds", "outcome"), [(0.5, Outcome.PASS), (50.0, Outcome.UNDECIDED)])
def test_throttling_is_waited_out_within_the_budget(
    bench: Bench, seconds: float, outcome: Outcome
) -> None:
    bench.harness.wake()
    calm, begun = bench.device.conditions(), bench.device.now()

    def conditions() -> Any:
        hot = bench.device.now() - begun < WAIT_SHARE * seconds
        return replace(calm, throttle_reasons=("sw_power_cap",)) if hot else calm

    run_at(bench, conditions, 1.4e9)
    taken = triad(bench, budget=1.0)
    assert judged(bench, taken).outcome is outcome
    assert (taken.discarded == 0) is (outcome is Outcome.PASS)
    assert bench.device.now() - begun < 1.5


def test_samples_that_were_discarded_leave_a_verdict_to_the_others(bench: Bench) -> None:
    bench.harness.wake()
    calm, asked = bench.device.conditions(), list[None]()

    def conditions() -> Any:
        asked.append(None)
        # After the first samples; the first question is before them.
        return replace(calm, throttle_reasons=("sw_power_cap",)) if len(asked) == 2 else calm

    run_at(bench, conditions, 1.4e9)
    taken = bench.measure("triad", *bench.buffers(3, 256 * MiB), 3.0, budget=1.0)
    assert taken.conditions[0].throttle_reasons
    assert 0 < taken.discarded < len(taken.samples)
    assert judged(bench, taken).outcome is Outcome.PASS


@pytest.mark.parametrize(("share", "counts"), [(0.9924, False), (0.98, True)])
def test_a_throttle_reason_counts_only_where_the_sm_clock_ran_lower(
    bench: Bench, share: float, counts: bool
) -> None:
    """After much power an H200 reports `sw_power_cap` for seconds, at 1965 of 1980 MHz."""
    bench.harness.wake()
    highest = bench.device.facts.sm_clock_hz
    assert highest is not None
    limited = replace(bench.device.conditions(), throttle_reasons=("sw_power_cap",))
    run_at(bench, lambda: limited, share * highest)
    begun = bench.device.now()
    taken = triad(bench)
    assert bench.device.now() - begun > WAIT_SHARE * 0.2  # it is waited for all the same
    assert judged(bench, taken).outcome is (Outcome.UNDECIDED if counts else Outcome.PASS)
    assert (taken.discarded > 0) is counts
    assert (
        "sw_power_cap reported, but the SM clock ran at 99 % or more of 1980 MHz" in taken.notes
    ) is not counts


def test_lines_that_foreign_code_may_have_kept_are_reset_before_every_cold_sample(
    bench: Bench,
) -> None:
    resets = list[int]()
    bench.device.before("l2.reset_persisting", lambda: resets.append(1))

    def build(memory: Any) -> Case:
        return Case(launch=lambda: None, reference=lambda: None, reads=[memory.device(2 * MiB)])

    cold = bench.case(build, placements=2)
    assert len(resets) >= len(cold.samples)
    resets.clear()
    bench.case(build, placements=2, mode="hot")
    triad(bench)
    assert len(resets) == 2  # once before the samples of each
