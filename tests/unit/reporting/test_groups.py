"""What kind of test a row is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from known_devices import H100
from measurements import TRIAD, measurement, passing
from msgspec.structs import replace

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import MovedBytes, Window
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.groups import Behaviour, behaviour_of, behaviours, function_of
from pytest_gpumem.units import MiB


def row(nodeid: str, **changes: Any) -> Row:
    return passing(nodeid, **TRIAD | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Behaviour.DRAM),
        ({"sectors_per_request": 4.0}, Behaviour.DRAM),
        ({"sectors_per_request": 5.0}, Behaviour.PATTERN),
        ({"mode": "hot"}, Behaviour.CACHE),
        ({"window": Window(MiB, 1.0, MiB), "mode": "hot"}, Behaviour.PERSISTING),
        ({"moved_bytes": MovedBytes(MiB, MiB, link=True)}, Behaviour.LINK),
        ({"managed": True}, Behaviour.MANAGED),
        ({"accesses_per_launch": 10, "mode": "hot"}, Behaviour.LATENCY),
        ({"overlap": Overlap((Part("a", 1.0),), 2.0, 1.0, 2)}, Behaviour.OVERLAP),
        ({"moved_bytes": None, "footprint": None, "sampler": "host"}, Behaviour.ALLOCATION),
        ({"moved_bytes": None}, Behaviour.OTHER),
        ({"footprint": 1 * MiB}, Behaviour.OTHER),
    ],
)
def test_the_kind_of_a_measurement(changes: dict[str, Any], expected: Behaviour) -> None:
    assert behaviour_of(measurement(**TRIAD | changes), H100) is expected


def test_a_test_is_of_one_kind() -> None:
    rows = [
        row("t.py::test_a[x]"),
        row("t.py::test_a[y]", window=Window(MiB, 1.0, MiB)),
        row("t.py::test_b"),
        replace(row("t.py::test_c"), measurement=None),
    ]
    assert behaviours(rows, H100) == {
        "t.py::test_a": Behaviour.PERSISTING,
        "t.py::test_b": Behaviour.DRAM,
        "t.py::test_c": Behaviour.NOTHING,
    }


def test_parameters_are_no_part_of_a_function() -> None:
    assert function_of(row("a[1]/t.py::TestX::test_a[b::c-[d]]")) == "a[1]/t.py::TestX::test_a"
    assert function_of(row("odd[1]")) == "odd"


def test_a_test_whose_memory_alone_is_watched_is_of_its_own_kind(
    make_row: Callable[..., Row], facts: DeviceFacts
) -> None:
    alone = replace(make_row("a.py::test_memory", measured=False), footprint=Footprint(1))
    timed = replace(make_row("a.py::test_both"), footprint=Footprint(1))
    part = replace(
        make_row("a.py::test_both", measured=False, label="part"), footprint=Footprint(1)
    )
    found = behaviours([alone, part, timed], facts)
    assert found["a.py::test_memory"] is Behaviour.MEMORY
    assert found["a.py::test_both"] is behaviours([timed], facts)["a.py::test_both"]


def test_counting_pages_moves_no_row_to_managed_memory() -> None:
    def kind(**counts: Any) -> Behaviour:
        return behaviour_of(
            measurement(
                **TRIAD, migrations=Migrations(PageCounts(), PageCounts(**counts), "CUPTI")
            ),
            H100,
        )

    assert kind() is Behaviour.DRAM
    assert kind(gpu_faults=3) is Behaviour.MANAGED
    assert kind(to_device=4096) is Behaviour.MANAGED
