"""A counting pass in words."""

from __future__ import annotations

from faulting_pass import FAULTING

from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.reporting.row_facts import migrations_text
from pytest_gpumem.units import MiB


def test_both_parts_of_a_pass_are_said() -> None:
    back = PageCounts(to_host=16 * MiB, to_host_seconds=0.5e-3, causes={"prefetch": 16 * MiB})
    assert list(migrations_text(Migrations(before=back, launch=FAULTING, source="CUPTI"))) == [
        "one launch, counted by CUPTI: 159 GPU page faults in 26 groups on 150 pages (9 duplicates), 48 CPU page faults, "
        "16 MiB to the device in 1.000 ms = 16.78 GB/s, 0 B to the host, 2 MiB mapped where it was, "
        "moved by fault 10 MiB, speculation 6 MiB",
        "before it, not timed: 0 GPU page faults, 0 CPU page faults, 0 B to the device, 16 MiB to the host in 500.0 us = 33.55 GB/s, "
        "moved by prefetch 16 MiB",
    ]


def test_a_pass_that_put_nothing_back_says_one_sentence() -> None:
    for mapped in (0, None):
        assert len(list(migrations_text(Migrations(PageCounts(mapped=mapped), PageCounts(mapped=mapped), "CUPTI")))) == 1


def test_what_was_not_counted_says_why() -> None:
    assert list(migrations_text(Migrations(not_counted="no cupti-python"))) == ["not counted: no cupti-python"]
