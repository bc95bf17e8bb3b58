"""Absolute limits, conditions, and what strict does."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.judging.finding import is_failure
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes, Overlap, Part
from pytest_gpumem.records.row import LimitResult, Verdict
from pytest_gpumem.units import GiB, MiB


def held(origin: str = "marker", **limits: str) -> Limits:
    return Limits(**limits, origin=dict.fromkeys(limits, origin))


def test_a_row_without_a_limit_is_measured_and_passes_nothing(
    bench: Any, h100: DeviceFacts
) -> None:
    verdict = judge(bench.measurement(), Limits(), h100, [])
    assert verdict == Verdict(Outcome.MEASURED, "no limit set")
    known = judge(bench.measurement(270e-6), Limits(), h100, [bench.measurement()])
    assert known.outcome is Outcome.MEASURED
    assert known.comparison is not None
    assert known.reason.startswith("+0.746 % against 1 saved process of 1 day, no limit set")


def test_absolute_limits(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[dict[str, str], Outcome]] = [
        ({"max_latency": "0.3 ms"}, Outcome.PASS),
        ({"max_latency": "267.9 us"}, Outcome.UNDECIDED),
        ({"max_latency": "260 us"}, Outcome.FAIL),
        ({"min_bandwidth": "3006 GB/s"}, Outcome.UNDECIDED),
        ({"min_bandwidth": "3.2 TB/s"}, Outcome.FAIL),
        ({"min_bandwidth": "95% of peak"}, Outcome.FAIL),
        ({"max_latency": "267.9 us", "min_bandwidth": "3 TB/s"}, Outcome.UNDECIDED),
    ]
    for limits, outcome in cases:
        verdict = judge(bench.measurement(samples=3), held(**limits), h100, [])
        assert (verdict.outcome, verdict.code) == (
            outcome,
            Code.NOISY if outcome is Outcome.UNDECIDED else None,
        ), limits


def test_the_sentence_has_figure_limit_origin_distance_margin_and_samples(
    bench: Any, h100: DeviceFacts
) -> None:
    verdict = judge(bench.measurement(samples=3), held(min_bandwidth="3.2 TB/s"), h100, [])
    assert verdict.reason.startswith(
        "3005 GB/s is below min_bandwidth 3200 GB/s (marker) by 6.10 %, margin 0.2"
    )
    assert verdict.reason.endswith("24 samples on 8 placements")
    verdict = judge(
        bench.measurement(), held("--gpumem-max-latency", max_latency="250 us"), h100, []
    )
    assert verdict.reason.startswith(
        "268.0 us is above max_latency 250.0 us (--gpumem-max-latency) by 7.20 %, margin "
    )
    verdict = judge(bench.measurement(), held(min_bandwidth="95% of peak"), h100, [])
    assert "below min_bandwidth 3185 GB/s (95% of peak, marker) by 5.65 %" in verdict.reason
    # Where something is wrong, what is right is left out.
    verdict = judge(
        bench.measurement(), held(max_latency="250 us", min_bandwidth="1 GB/s"), h100, []
    )
    assert "min_bandwidth" not in verdict.reason


def test_a_verdict_lists_every_limit_that_is_no_pass_the_worst_first(
    bench: Any, h100: DeviceFacts
) -> None:
    limits = held(max_latency="1 s", max_kernels="1", max_regression="1%", min_bandwidth="1 GB/s")
    slower = judge(bench.measurement(400e-6), limits, h100, bench.baseline(3))
    results = {result.limit: (result.outcome, result.code) for result in slower.limits}
    assert results == {
        "max_regression": (Outcome.FAIL, Code.SLOWER),
        "max_kernels": (Outcome.UNDECIDED, Code.CONDITIONS),
    }
    assert slower.limits[0].limit == "max_regression"
    assert [result.limit for result in judge(bench.measurement(), limits, h100, []).limits] == [
        "max_kernels",
        "max_regression",
    ]
    assert judge(bench.measurement(), held(max_latency="1 s"), h100, []).limits == ()
    throttled = replace(bench.measurement(), profiled=True)
    doubt = LimitResult(
        "",
        Outcome.UNDECIDED,
        Code.CONDITIONS,
        "mend the machine: a profiler was attached; no limit was judged",
    )
    assert judge(throttled, limits, h100, []).limits[0] == doubt


def test_a_share_of_the_peak_without_meaning_is_a_failure(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"footprint": 199 * MiB, "moved_bytes": MovedBytes(10**8, 10**8)},
            "its footprint is below 200 MiB, 4 x L2 (footprint 199 MiB)",
        ),
        ({"mode": "hot"}, "in hot mode"),
        ({"moved_bytes": MovedBytes(GiB, GiB, link=True)}, "cross the host link"),
    ]
    for changes, why in cases:
        verdict = judge(bench.measurement(**changes), held(min_bandwidth="1% of peak"), h100, [])
        assert verdict.outcome is Outcome.FAIL, changes
        assert "cannot be judged" in verdict.reason, changes
        assert why in verdict.reason, changes


def test_a_rate_without_traffic_is_a_failure(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[MovedBytes | None, str]] = [
        (None, "(give `moved=`)"),
        (MovedBytes(0, 0), "a launch moves no bytes"),
    ]
    for moved, why in cases:
        row = bench.measurement(moved_bytes=moved)
        verdict = judge(row, held(min_bandwidth="1 GB/s"), h100, [])
        assert verdict.outcome is Outcome.FAIL, moved
        assert why in verdict.reason, moved


def test_a_share_of_an_unknown_peak_is_a_failure_and_a_rate_is_judged(
    bench: Any, no_peak: DeviceFacts
) -> None:
    verdict = judge(bench.measurement(), held(min_bandwidth="1% of peak"), no_peak, [])
    assert verdict.outcome is Outcome.FAIL
    assert "the peak is unknown" in verdict.reason
    assert (
        judge(bench.measurement(), held(min_bandwidth="1 TB/s"), no_peak, []).outcome
        is Outcome.PASS
    )


def test_nothing_moves_faster_than_the_peak(bench: Any, h100: DeviceFacts) -> None:
    impossible = MovedBytes(2**30, 2**30)
    verdict = judge(bench.measurement(moved_bytes=impossible), Limits(), h100, [])
    assert verdict.outcome is Outcome.FAIL
    assert (
        verdict.reason
        == "the declared traffic is wrong: 8013 GB/s is above the device's peak of 3352 GB/s"
    )
    # L2 may well be faster.
    for changes in ({"mode": "hot"}, {"footprint": 199 * MiB}):
        assert (
            judge(bench.measurement(moved_bytes=impossible, **changes), Limits(), h100, []).outcome
            is Outcome.MEASURED
        )


def test_conditions_that_forbid_a_judgement(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"profiled": True}, "a profiler was attached"),
        (
            {
                "conditions": (
                    Conditions(),
                    Conditions(sm_clock_hz=1.2e9, throttle_reasons=("sw_power_cap",)),
                )
            },
            "throttled at the last samples (sw_power_cap at 1200 MHz)",
        ),
        (
            {"conditions": (Conditions(other_processes=2), Conditions())},
            "2 other processes on the device",
        ),
        (
            {"discarded": 8, "during": Conditions(throttle_reasons=("sw_power_cap",))},
            "8 samples taken under throttling (sw_power_cap), 8 left",
        ),
        ({"discarded": 99}, "99 samples taken under throttling, 8 left"),
        ({"floor": 268e-6}, "as if nothing was launched"),
    ]
    for changes, why in cases:
        broken = held(max_latency="1 us", max_regression="1%")
        verdict = judge(
            bench.measurement(268e-6, spread=0.0, **changes), broken, h100, [bench.measurement()]
        )
        assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.CONDITIONS), changes
        assert why in verdict.reason, changes


def test_hardly_more_than_the_floor_is_nothing_launched(bench: Any, h100: DeviceFacts) -> None:
    # 64 ns is the floor's share of one launch in a batch of twenty.
    for floor, latency, outcome in (
        (1.28e-6, 1.29e-6, Outcome.UNDECIDED),
        (1.28e-6, 3.3e-6, Outcome.MEASURED),
        (64e-9, 65e-9, Outcome.UNDECIDED),
        (64e-9, 1.0e-6, Outcome.MEASURED),
    ):
        assert (
            judge(
                bench.measurement(latency, floor=floor, moved_bytes=None), Limits(), h100, []
            ).outcome
            is outcome
        )


def test_a_missing_baseline_is_said(bench: Any, h100: DeviceFacts) -> None:
    verdict = judge(bench.measurement(), held(max_regression="1%"), h100, [])
    assert (verdict.outcome, verdict.code) == (Outcome.NEW, Code.NO_BASELINE)
    assert verdict.reason == "nothing to compare with: the baseline holds no such row"
    # A broken absolute limit weighs more.
    verdict = judge(bench.measurement(), held(max_regression="1%", max_latency="1 us"), h100, [])
    assert verdict.outcome is Outcome.FAIL
    assert "nothing to compare with" in verdict.reason


def test_what_fails() -> None:
    for outcome in Outcome:
        assert is_failure(Verdict(outcome, ""), strict=False) is (outcome is Outcome.FAIL), outcome
        assert is_failure(Verdict(outcome, ""), strict=True) is (
            outcome in (Outcome.FAIL, Outcome.UNDECIDED, Outcome.NEW)
        ), outcome


def test_strict_says_so_and_changes_no_outcome(bench: Any, h100: DeviceFacts) -> None:
    limits = held(max_regression="1%")
    lax, strict = (judge(bench.measurement(), limits, h100, [], strict=s) for s in (False, True))
    assert lax.outcome is strict.outcome is Outcome.NEW
    assert strict.reason == lax.reason + " (strict: this fails)"


OVERLAP = Overlap(
    (Part("host to device", 200e-6), Part("kernel", 266e-6)),
    sequential=466e-6,
    bound=266e-6,
    streams=4,
    chunks=4,
)


def test_min_overlap_is_a_share_of_what_can_be_hidden(bench: Any, h100: DeviceFacts) -> None:
    """267.9 us of 466 us in turn and 266 us at best: 99.1 % of 200 us are hidden."""
    cases: list[tuple[str, Outcome]] = [
        ("90%", Outcome.PASS),
        ("99.15%", Outcome.UNDECIDED),
        ("100%", Outcome.FAIL),
    ]
    for least, outcome in cases:
        verdict = judge(bench.measurement(overlap=OVERLAP), held(min_overlap=least), h100, [])
        assert verdict.outcome is outcome, least
        assert f"min_overlap {least} (marker)" in verdict.reason, least


def test_min_overlap_where_nothing_overlaps_is_no_pass(bench: Any, h100: DeviceFacts) -> None:
    alone = judge(bench.measurement(), held(min_overlap="50%"), h100, [])
    assert alone.outcome is Outcome.FAIL
    assert (
        "cannot be judged: nothing overlaps in it (measure staged_copy or gpu_work.together)"
        in alone.reason
    )
    shared = replace(OVERLAP, bound=466e-6)
    nothing = judge(bench.measurement(overlap=shared), held(min_overlap="50%"), h100, [])
    assert nothing.outcome is Outcome.FAIL
    assert "there is nothing to hide" in nothing.reason
