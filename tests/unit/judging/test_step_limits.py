"""Limits on what one launch runs: exact, and never a pass where nothing was watched."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import naming
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.judging.limits import counts_steps
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.what_ran import Migrations, PageCounts, Step, WhatRan, what_ran
from pytest_gpumem.units import MiB, QuantityError

TRIAD = Step(
    "kernel",
    "triad",
    code="a",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    registers=40,
    local=16,
    stream=0,
)
SCALE = replace(TRIAD, name="scale", registers=16, local=0)
COPY = Step("copy", "H2D", source="pinned", memory="device", nbytes=2**20, stream=0)
WAIT = Step("synchronisation", "stream", stream=0)
SOME = what_ran([COPY, TRIAD, SCALE, COPY, WAIT], {})


def test_a_limit_is_held_against_one_launch(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[str, str, str, str]] = [
        ("max_kernels", "2", "1", "2 kernels in a launch"),
        ("max_copies", "2", "1", "2 copies in a launch"),
        ("max_copied_bytes", "2 MiB", "1 MiB", "2 MiB copied in a launch"),
        ("max_waits", "1", "0", "1 host wait in a launch"),
        ("max_spill", "16 B", "15 B", "16 B of local memory of a thread in a launch"),
    ]
    for limit, enough, too_little, figure in cases:
        for written, outcome in ((enough, Outcome.PASS), (too_little, Outcome.FAIL)):
            limits = Limits(**{limit: written}, origin={limit: "marker"})
            verdict = judge(bench.measurement(what_ran=SOME), limits, h100, [])
            assert (verdict.outcome, verdict.code) == (outcome, None), limit
            assert re.search(rf"{figure}, .*above {limit} {written} \(marker\)", verdict.reason), (
                limit
            )


def test_only_limits_on_what_a_launch_runs_have_it_counted() -> None:
    assert counts_steps(Limits(max_kernels="1"))
    assert not counts_steps(Limits(max_latency="1 ms", max_regression="1%"))


def test_the_limit_base_is_the_greatest_count(bench: Any, h100: DeviceFacts) -> None:
    cases: list[str] = ["max_kernels", "max_copies", "max_copied_bytes", "max_waits", "max_spill"]
    for limit in cases:
        before = what_ran([COPY, replace(TRIAD, registers=32, local=8)], {})
        unknown = [WhatRan(not_watched="no CUPTI"), None]
        limits = replace(Limits(), **{limit: LIMITS[limit].parse(" base")})
        for runs, outcome in (([SOME, before], Outcome.PASS), ([before], Outcome.FAIL)):
            past = [bench.measurement(what_ran=one) for one in (*runs, *unknown)]
            assert judge(bench.measurement(what_ran=SOME), limits, h100, past).outcome is outcome, (
                limit
            )
            alone = judge(bench.measurement(what_ran=SOME), limits, h100, past[-2:])
            assert (alone.outcome, alone.code) == (Outcome.NEW, Code.NO_BASELINE), limit


def test_what_is_neither_a_count_nor_base_is_refused() -> None:
    for written in ["baseline", "base + 1", "bases", "2 x base"]:
        with (
            naming(written),
            pytest.raises(QuantityError, match='whole number from 0 on, or "base"'),
        ):
            LIMITS["max_kernels"].parse(written)


def test_what_was_not_watched_is_undecided(bench: Any, h100: DeviceFacts) -> None:
    limit_cases: list[str] = ["max_kernels", "max_waits", "max_spill"]
    ran_cases: list[WhatRan | None] = [None, WhatRan(not_watched="cupti-python cannot be imported")]
    for limit in limit_cases:
        for ran in ran_cases:
            verdict = judge(
                bench.measurement(what_ran=ran), replace(Limits(), **{limit: "0"}), h100, []
            )
            assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.CONDITIONS), (
                limit,
                ran,
            )


def test_counts_are_judged_under_any_conditions(bench: Any, h100: DeviceFacts) -> None:
    shared = (Conditions(other_processes=3), Conditions(other_processes=3))
    now = bench.measurement(what_ran=SOME, conditions=shared)
    assert judge(now, Limits(max_kernels="2"), h100, []).outcome is Outcome.PASS
    assert judge(now, Limits(max_kernels="1"), h100, []).outcome is Outcome.FAIL
    both = judge(now, Limits(max_kernels="2", max_latency="1 s"), h100, [])
    assert (both.outcome, both.code) == (Outcome.UNDECIDED, Code.CONDITIONS)
    assert judge(now, Limits(max_kernels="1", max_latency="1 s"), h100, []).outcome is Outcome.FAIL


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


def test_a_limit_is_held_against_the_count_of_one_launch(bench: Any, h100: DeviceFacts) -> None:
    cases: list[tuple[dict[str, str], Migrations | None, Outcome, str]] = [
        (
            {"max_gpu_page_faults": "0"},
            NO_PAGES,
            Outcome.PASS,
            "0 GPU page faults in a launch, not above max_gpu_page_faults 0",
        ),
        (
            {"max_gpu_page_faults": "2"},
            PAGES,
            Outcome.FAIL,
            r"3 GPU page faults in a launch, above max_gpu_page_faults 2 \(marker\)",
        ),
        (
            {"max_migrated": "1 MiB"},
            PAGES,
            Outcome.FAIL,
            r"2 MiB migrated .* \(fault 1 MiB, eviction 1 MiB\), above max_migrated 1 MiB",
        ),
        (
            {"max_gpu_page_faults": "0"},
            None,
            Outcome.UNDECIDED,
            "cannot be judged: no counting pass was taken",
        ),
        (
            {"max_migrated": "1 GiB"},
            Migrations(not_counted="no cupti-python"),
            Outcome.UNDECIDED,
            "cannot be judged: no cupti-python",
        ),
    ]
    for limits, migrations, outcome, said in cases:
        held = Limits(**limits, origin=dict.fromkeys(limits, "marker"))
        verdict = judge(bench.measurement(migrations=migrations), held, h100, [])
        assert (verdict.outcome, verdict.code) == (
            outcome,
            Code.CONDITIONS if outcome is Outcome.UNDECIDED else None,
        ), (limits, migrations, outcome, said)
        assert re.search(said, verdict.reason), (limits, migrations, outcome, said)
