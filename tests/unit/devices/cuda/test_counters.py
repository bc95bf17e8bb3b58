"""Counts of page faults and migrations, from single events, and a pass whose context is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from counted_device import failing

pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.what_ran import PageEvent, page_counts


def test_faults_groups_and_pages_are_counted() -> None:
    events = [PageEvent("gpu_faults", 2, i, i, (i // 2) << 16, "read") for i in range(8)]
    counts = page_counts(events, maps=False)
    assert (counts.gpu_faults, counts.gpu_groups, counts.gpu_pages) == (16, 8, 4)


def test_copies_beside_each_other_take_their_time_once() -> None:
    copies = [
        PageEvent("to_device", 1, start, end, 0, "prefetch")
        for start, end in ((0, 10), (2, 5), (8, 12), (20, 21))
    ]
    counts = page_counts(copies, maps=False)
    assert counts.to_device_seconds == pytest.approx(13e-9)


def test_a_clock_that_fails_with_the_context_is_a_reason_and_no_error_of_its_own() -> None:
    """The error that lost the context is the test's."""
    counters = CudaCounters(0)
    counters._cupti = SimpleNamespace(get_timestamp=failing(error=RuntimeError))
    counters._errors = (RuntimeError,)
    with pytest.raises(NotCounted, match="CUPTI refuses to tell the time: made to fail"):
        counters._now()
