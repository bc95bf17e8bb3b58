"""Rows of one test over a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.families import FamilyPlot, families
from pytest_gpumem.units import MiB

MakeRow = Callable[..., Row]


@pytest.fixture
def one(facts: DeviceFacts, make_row: MakeRow) -> Callable[..., FamilyPlot]:
    """The only family of rows with these labels; a label that begins with "[" is a test's parameters."""

    def made(labels: list[str], **changes: Any) -> FamilyPlot:
        rows = []
        for label in labels:
            parameters, apart = (label, "") if label.startswith("[") else ("", label)
            rows.append(make_row(f"t.py::test_a{parameters}", label=apart, **changes))
        (family,) = families(rows, facts)
        return family

    return made


def xs(family: FamilyPlot) -> dict[str, list[float]]:
    return {series.name: [point.x for point in series.points] for series in family.series}


@pytest.mark.parametrize(
    ("labels", "unit", "expected"),
    [
        (["stride 1", "stride 8", "stride 2"], "stride", {"bandwidth": [1, 2, 8]}),
        (["1/6 of L2", "2/6 of L2", "6/6 of L2"], "of L2", {"bandwidth": [1 / 6, 1 / 3, 1]}),
        (["512 KiB", "1 MiB", "1 GiB"], "MiB", {"bandwidth": [0.5, 1, 1024]}),
        (["[264-8MiB]", "[264-16MiB]", "[264-32MiB]"], "MiB", {"bandwidth": [8, 16, 32]}),
        (["-1 C", "0 C", "1.5 C"], "C", {"bandwidth": [-1, 0, 1.5]}),
        (
            [
                "5 MiB, ratio 1",
                "6 MiB, ratio 1",
                "7 MiB, ratio 1",
                "5 MiB, off",
                "6 MiB, off",
                "7 MiB, off",
            ],
            "MiB",
            {"ratio 1": [5, 6, 7], "off": [5, 6, 7]},
        ),
        (
            [
                "[1-float32]",
                "[2-float32]",
                "[4-float32]",
                "[1-float64]",
                "[2-float64]",
                "[4-float64]",
            ],
            "parameter",
            {"float32": [1, 2, 4], "float64": [1, 2, 4]},
        ),
        (
            ["[1-32]", "[2-32]", "[3-32]", "[1-64]", "[2-64]", "[3-64]"],
            "parameter",
            {"32": [1, 2, 3], "64": [1, 2, 3]},
        ),
    ],
)
def test_numbers_in_labels_and_parameters(
    labels: list[str], unit: str, expected: dict[str, list[float]], one: Callable[..., FamilyPlot]
) -> None:
    family = one(labels)
    assert family.x_unit == unit
    assert {name: pytest.approx(values) for name, values in xs(family).items()} == expected


@pytest.mark.parametrize(
    "labels",
    [["1 MiB", "2 MiB"], ["f4", "f8", "f16"], ["a", "b", "c"], [""], ["1.2.3", "1.2.4", "1.2.5"]],
)
def test_too_few_numbers_are_no_curve(
    labels: list[str], facts: DeviceFacts, make_row: MakeRow
) -> None:
    assert families([make_row("t.py::test_a", label=label) for label in labels], facts) == []


def test_tests_are_not_mixed(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(f"t.py::test_{name}", label=str(number)) for number in range(3) for name in "ab"
    ]
    assert [
        (family.function, len(family.series[0].points)) for family in families(rows, facts)
    ] == [
        ("t.py::test_a", 3),
        ("t.py::test_b", 3),
    ]


def test_the_figure_is_what_all_rows_have(one: Callable[..., FamilyPlot]) -> None:
    labels = ["1", "2", "3"]
    assert one(labels).y_name == "bandwidth"
    assert one(labels, moved_bytes=None).y_name == "latency"
    assert one(labels, accesses_per_launch=10).y_name == "latency per access"
    assert one(labels, requested=7680 * MiB).y_name == "asked bandwidth"
    point = one(labels).series[0].points[0]
    # 805 306 368 bytes in 268.3 us, whose interval is 0.1 % to both sides.
    assert point.y == pytest.approx(3001.5e9, rel=1e-4)
    assert (point.low, point.high) == pytest.approx((point.y / 1.001, point.y / 0.999))


def test_ceilings(one: Callable[..., FamilyPlot], facts: DeviceFacts) -> None:
    labels = ["1", "2", "3"]
    assert [ceiling.value for ceiling in one(labels).ceilings] == [facts.dram_peak]
    # Far below it the line would take all room, and over a link it says nothing.
    assert one(labels, moved_bytes=MovedBytes(1 * MiB, 0)).ceilings == ()
    assert one(labels, moved_bytes=MovedBytes(512 * MiB, 0, link=True)).ceilings == ()


def test_sectors_predict_a_second_curve(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row("t.py::test_a", label=f"stride {s}", sectors_per_request=4.0 * s)
        for s in (1, 2, 4)
    ]
    (family,) = families(rows, facts)
    measured, predicted = family.series
    assert predicted.predicted
    assert [point.y for point in predicted.points] == pytest.approx(
        [measured.points[0].y / s for s in (1, 2, 4)]
    )
    coalesced = [
        make_row("t.py::test_a", label=f"stride {s}", sectors_per_request=4.0) for s in (1, 2, 4)
    ]
    assert len(families(coalesced, facts)[0].series) == 1


def test_a_ladder_of_sizes_is_one_plot_with_a_curve_for_each_place(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    """Labels as those of the memory suite's ladder, from L1 to a peer: bytes on one axis, seconds of an access on the other."""
    places = {
        "L1": ("16 KiB", "64 KiB"),
        "L2": ("256 KiB", "1 MiB", "5 MiB"),
        "DRAM": ("100 MiB", "200 MiB"),
        "mapped host memory": ("25 MiB", "50 MiB"),
    }
    rows = [
        make_row("t.py::test_a", label=f"{place}, {size}", accesses_per_launch=10)
        for place, sizes in places.items()
        for size in sizes
    ]
    (family,) = families(rows, facts)
    assert (family.x_unit, family.y_name) == ("MiB", "latency per access")
    assert {one.name: len(one.points) for one in family.series} == {
        place: len(sizes) for place, sizes in places.items()
    }
