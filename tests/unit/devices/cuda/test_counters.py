"""Counts of page faults and migrations, from single events."""

from __future__ import annotations

import pytest

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
