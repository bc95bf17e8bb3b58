"""Limits on page faults and migrations: exact, and never a pass where nothing was counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pytest_gpumem.judging.judge import judge
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.units import MiB

NONE = Migrations(before=PageCounts(to_host=MiB), launch=PageCounts(), source="CUPTI")
SOME = Migrations(
    before=PageCounts(),
    launch=PageCounts(gpu_faults=3, gpu_groups=1, gpu_pages=3, to_device=MiB, to_host=MiB, causes={"fault": MiB, "eviction": MiB}),
    source="CUPTI",
)


@pytest.mark.parametrize(
    ("limits", "migrations", "outcome", "said"),
    [
        ({"max_gpu_page_faults": "0"}, NONE, Outcome.PASS, "0 page faults of the GPU in one launch, not above max_gpu_page_faults 0"),
        ({"max_gpu_page_faults": "3"}, SOME, Outcome.PASS, "3 page faults"),
        ({"max_gpu_page_faults": "2"}, SOME, Outcome.FAIL, r"3 page faults .* in one launch, above max_gpu_page_faults 2 \(marker\)"),
        ({"max_migrated": "2 MiB"}, SOME, Outcome.PASS, "2 MiB migrated"),
        ({"max_migrated": "1 MiB"}, SOME, Outcome.FAIL, r"2 MiB migrated .* \(fault 1 MiB, eviction 1 MiB\), above max_migrated 1 MiB"),
        ({"max_migrated": "0 B"}, NONE, Outcome.PASS, "0 B migrated"),
        ({"max_gpu_page_faults": "0"}, None, Outcome.UNDECIDED, "cannot be judged, not counted: no counting pass was taken"),
        ({"max_migrated": "1 GiB"}, Migrations(not_counted="no cupti-python"), Outcome.UNDECIDED, "not counted: no cupti-python"),
    ],
)
def test_a_limit_is_held_against_the_count_of_one_launch(
    limits: dict[str, str], migrations: Migrations | None, outcome: Outcome, said: str, bench: Any, h100: DeviceFacts
) -> None:
    held = Limits(**limits, origin=dict.fromkeys(limits, "marker"))
    verdict = judge(bench.measurement(migrations=migrations), held, h100, [], strict=False)
    assert (verdict.outcome, verdict.code) == (outcome, Code.CONDITIONS if outcome is Outcome.UNDECIDED else None)
    assert re.search(said, verdict.reason)


def test_what_was_not_counted_outweighs_what_passed_but_not_what_failed(bench: Any, h100: DeviceFacts) -> None:
    limits = Limits(max_gpu_page_faults="0", max_latency="1 s")
    assert judge(bench.measurement(), limits, h100, [], strict=False).outcome is Outcome.UNDECIDED
    failing = Limits(max_gpu_page_faults="0", max_latency="1 us")
    assert judge(bench.measurement(), failing, h100, [], strict=False).outcome is Outcome.FAIL
