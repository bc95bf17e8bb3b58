"""Limits on what one launch runs: exact, and never a pass where nothing was watched."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.judging.limits import waits_for_counts
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, DramBytes, Limits
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran
from pytest_gpumem.units import MiB, QuantityError

TRIAD = Step(
    StepKind.KERNEL,
    "triad",
    code="a",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    registers=40,
    local=16,
    stream=0,
)
SCALE = replace(TRIAD, name="scale", registers=16, local=0)
COPY = Step(StepKind.COPY, "H2D", source="pinned", memory="device", nbytes=2**20, stream=0)
WAIT = Step(StepKind.SYNCHRONISATION, "stream", stream=0)
JOIN = Step(StepKind.JOIN, stream=0)
SOME = what_ran([COPY, TRIAD, SCALE, COPY, JOIN, WAIT], {})


@pytest.mark.parametrize(
    ("limit", "enough", "too_little", "figure"),
    [
        ("max_kernels", "2", "1", "2 kernels in one launch"),
        ("max_copies", "2", "1", "2 copies in one launch"),
        ("max_copied_bytes", "2 MiB", "1 MiB", "2 MiB copied in one launch"),
        ("max_waits", "1", "0", "the host waits 1 time in one launch"),
        ("max_registers", "40", "39", "40 registers of a thread"),
        ("max_spill", "16 B", "15 B", "16 B of local memory of a thread"),
    ],
)
def test_a_limit_is_held_against_one_launch(
    limit: str, enough: str, too_little: str, figure: str, bench: Any, h100: DeviceFacts
) -> None:
    for written, outcome in ((enough, Outcome.PASS), (too_little, Outcome.FAIL)):
        limits = Limits(**{limit: written}, origin={limit: "marker"})
        verdict = judge(bench.measurement(what_ran=SOME), limits, h100, [], strict=False)
        assert (verdict.outcome, verdict.code) == (outcome, None)
        assert re.search(rf"{figure}, .*above {limit} {written} \(marker\)", verdict.reason)


@pytest.mark.parametrize(
    ("limit", "enough", "too_little"),
    [
        ("max_kernels", "baseline + 1", "baseline"),
        ("max_copies", "baseline + 100%", "baseline + 50%"),
        ("max_copied_bytes", "baseline + 1 MiB", "baseline + 1023 KiB"),
        ("max_waits", "baseline + 1", "baseline+0"),
        ("max_registers", "baseline + 25%", "baseline + 20%"),
        ("max_spill", "baseline + 50% + 4 B", "baseline + 50%"),
    ],
)
def test_a_limit_over_the_baseline_is_held_against_its_newest_count(
    limit: str, enough: str, too_little: str, bench: Any, h100: DeviceFacts
) -> None:
    before = what_ran([COPY, replace(TRIAD, registers=32, local=8)], {})
    past = [
        bench.measurement(what_ran=one)
        for one in (SOME, before, WhatRan(not_watched="no CUPTI"), None)
    ]
    for written, outcome in ((enough, Outcome.PASS), (too_little, Outcome.FAIL)):
        limits = replace(Limits(), **{limit: LIMITS[limit].parse(written)})
        assert (
            judge(bench.measurement(what_ran=SOME), limits, h100, past, strict=False).outcome
            is outcome
        )
        alone = judge(bench.measurement(what_ran=SOME), limits, h100, past[2:], strict=False)
        assert (alone.outcome, alone.code) == (Outcome.NEW, Code.NO_BASELINE)


def test_a_growth_in_percent_is_exact(bench: Any, h100: DeviceFacts) -> None:
    """45 x 1.4 is less than 63 in floats."""
    then, at, above = (
        bench.measurement(what_ran=what_ran([replace(TRIAD, registers=count)], {}))
        for count in (45, 63, 64)
    )
    for now, outcome in ((at, Outcome.PASS), (above, Outcome.FAIL)):
        assert (
            judge(now, Limits(max_registers="baseline + 40%"), h100, [then], strict=False).outcome
            is outcome
        )


@pytest.mark.parametrize("limit", ["max_gpu_page_faults", "max_migrated"])
def test_pages_have_limits_over_the_baseline_too(limit: str, bench: Any, h100: DeviceFacts) -> None:
    then, now = (
        Migrations(launch=PageCounts(gpu_faults=count, to_device=count)) for count in (100, 110)
    )
    past = [bench.measurement(migrations=then)]
    for written, outcome in (("baseline + 10%", Outcome.PASS), ("baseline + 9%", Outcome.FAIL)):
        assert (
            judge(
                bench.measurement(migrations=now),
                replace(Limits(), **{limit: written}),
                h100,
                past,
                strict=False,
            ).outcome
            is outcome
        )


@pytest.mark.parametrize(
    "written",
    [
        "baseline +",
        "baseline - 1",
        "baseline + 1 + 2",
        "baseline + 64 KiB",
        "baselines",
        "2 x baseline",
    ],
)
def test_what_is_no_growth_over_the_baseline_is_refused(written: str) -> None:
    with pytest.raises(
        QuantityError, match=r'whole number from 0 on, or "baseline"|accepted is "baseline"'
    ):
        LIMITS["max_kernels"].parse(written)


@pytest.mark.parametrize("ran", [None, WhatRan(not_watched="cupti-python cannot be imported")])
@pytest.mark.parametrize("limit", ["max_kernels", "max_waits", "max_spill", "same_kernels"])
def test_what_was_not_watched_is_undecided(
    limit: str, ran: WhatRan | None, bench: Any, h100: DeviceFacts
) -> None:
    verdict = judge(
        bench.measurement(what_ran=ran), replace(Limits(), **{limit: "0"}), h100, [], strict=False
    )
    assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.CONDITIONS)


def test_counts_are_judged_under_any_conditions(bench: Any, h100: DeviceFacts) -> None:
    shared = (Conditions(other_processes=3), Conditions(other_processes=3))
    now = bench.measurement(what_ran=SOME, conditions=shared)
    assert judge(now, Limits(max_kernels="2"), h100, [], strict=False).outcome is Outcome.PASS
    assert judge(now, Limits(max_kernels="1"), h100, [], strict=False).outcome is Outcome.FAIL
    both = judge(now, Limits(max_kernels="2", max_latency="1 s"), h100, [], strict=False)
    assert (both.outcome, both.code) == (Outcome.UNDECIDED, Code.CONDITIONS)
    assert (
        judge(now, Limits(max_kernels="1", max_latency="1 s"), h100, [], strict=False).outcome
        is Outcome.FAIL
    )


def test_the_same_kernels_as_in_the_newest_run_that_knows_them(
    bench: Any, h100: DeviceFacts
) -> None:
    limits, now = (
        Limits(same_kernels="true", origin={"same_kernels": "marker"}),
        bench.measurement(what_ran=SOME),
    )

    def verdict(*past: WhatRan | None) -> Any:
        return judge(
            now, limits, h100, [bench.measurement(what_ran=one) for one in past], strict=False
        )

    recompiled = what_ran([replace(TRIAD, code="b"), replace(SCALE, registers=20)], {})
    assert (
        verdict(None, recompiled, None).outcome is Outcome.PASS
    )  # machine code may change, and copies may come
    assert (verdict().outcome, verdict(None).code) == (Outcome.NEW, Code.NO_BASELINE)
    smaller = verdict(what_ran([replace(TRIAD, block=(128, 1, 1)), SCALE], {}))
    assert smaller.outcome is Outcome.FAIL
    assert re.search(
        r"no longer triad 64x1x1 of 128x1x1; new triad 64x1x1 of 256x1x1", smaller.reason
    )
    shared = verdict(what_ran([replace(TRIAD, dynamic_shared=1024, cluster=(2, 1, 1)), SCALE], {}))
    assert (
        "no longer triad 64x1x1 of 256x1x1 in clusters of 2x1x1 with 1 KiB of dynamic shared memory; new"
        in shared.reason
    )
    for other in ([TRIAD], [SCALE, TRIAD], [TRIAD, TRIAD, SCALE]):
        assert verdict(what_ran(other, {})).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("limit", "enough", "too_little", "figure"),
    [
        ("max_dram_bytes", "3 MiB", "2 MiB", "3 MiB of DRAM in one launch"),
        ("max_sectors_per_request", "8", "4", "8 sectors a load of a warp"),
        ("min_l2_hit_rate", "75%", "80%", "an L2 hit rate of 75"),
    ],
)
def test_limits_on_counters_are_judged_where_they_were_read(
    limit: str, enough: str, too_little: str, figure: str, bench: Any, h100: DeviceFacts
) -> None:
    counts = DramBytes(2 * 2**20, 2**20, None, None, 5, "ncu", 8.0, 0.75)
    for written, outcome in ((enough, Outcome.PASS), (too_little, Outcome.FAIL)):
        limits = replace(Limits(), **{limit: written})
        now = bench.measurement(dram_bytes=counts, moved_bytes=None)
        verdict = judge(now, limits, h100, [], strict=False)
        assert verdict.outcome is outcome
        assert figure in verdict.reason
        assert waits_for_counts(now, limits) is None
        uncounted = bench.measurement()
        assert judge(uncounted, limits, h100, [], strict=False).outcome is Outcome.MEASURED
        assert limit in str(waits_for_counts(uncounted, limits))


@pytest.mark.parametrize("limit", ["max_sectors_per_request", "min_l2_hit_rate"])
def test_a_counter_that_was_not_read_is_undecided(
    limit: str, bench: Any, h100: DeviceFacts
) -> None:
    now = bench.measurement(dram_bytes=DramBytes(1, 1, None, None, 5, "ncu"), moved_bytes=None)
    assert (
        judge(
            now,
            replace(Limits(), **{limit: "50%" if "rate" in limit else "4"}),
            h100,
            [],
            strict=False,
        ).outcome
        is Outcome.UNDECIDED
    )


# Page faults and migrations


NO_PAGES = Migrations(before=PageCounts(to_host=MiB), launch=PageCounts(), source="CUPTI")
PAGES = Migrations(
    before=PageCounts(),
    launch=PageCounts(
        gpu_faults=3,
        gpu_groups=1,
        gpu_pages=3,
        to_device=MiB,
        to_host=MiB,
        causes={"fault": MiB, "eviction": MiB},
    ),
    source="CUPTI",
)


@pytest.mark.parametrize(
    ("limits", "migrations", "outcome", "said"),
    [
        (
            {"max_gpu_page_faults": "0"},
            NO_PAGES,
            Outcome.PASS,
            "0 page faults of the GPU in one launch, not above max_gpu_page_faults 0",
        ),
        ({"max_gpu_page_faults": "3"}, PAGES, Outcome.PASS, "3 page faults"),
        (
            {"max_gpu_page_faults": "2"},
            PAGES,
            Outcome.FAIL,
            r"3 page faults .* in one launch, above max_gpu_page_faults 2 \(marker\)",
        ),
        ({"max_migrated": "2 MiB"}, PAGES, Outcome.PASS, "2 MiB migrated"),
        (
            {"max_migrated": "1 MiB"},
            PAGES,
            Outcome.FAIL,
            r"2 MiB migrated .* \(fault 1 MiB, eviction 1 MiB\), above max_migrated 1 MiB",
        ),
        ({"max_migrated": "0 B"}, NO_PAGES, Outcome.PASS, "0 B migrated"),
        (
            {"max_gpu_page_faults": "0"},
            None,
            Outcome.UNDECIDED,
            "cannot be judged, not counted: no counting pass was taken",
        ),
        (
            {"max_migrated": "1 GiB"},
            Migrations(not_counted="no cupti-python"),
            Outcome.UNDECIDED,
            "not counted: no cupti-python",
        ),
    ],
)
def test_a_limit_is_held_against_the_count_of_one_launch(
    limits: dict[str, str],
    migrations: Migrations | None,
    outcome: Outcome,
    said: str,
    bench: Any,
    h100: DeviceFacts,
) -> None:
    held = Limits(**limits, origin=dict.fromkeys(limits, "marker"))
    verdict = judge(bench.measurement(migrations=migrations), held, h100, [], strict=False)
    assert (verdict.outcome, verdict.code) == (
        outcome,
        Code.CONDITIONS if outcome is Outcome.UNDECIDED else None,
    )
    assert re.search(said, verdict.reason)


def test_what_was_not_counted_outweighs_what_passed_but_not_what_failed(
    bench: Any, h100: DeviceFacts
) -> None:
    limits = Limits(max_gpu_page_faults="0", max_latency="1 s")
    assert judge(bench.measurement(), limits, h100, [], strict=False).outcome is Outcome.UNDECIDED
    failing = Limits(max_gpu_page_faults="0", max_latency="1 us")
    assert judge(bench.measurement(), failing, h100, [], strict=False).outcome is Outcome.FAIL
