"""What differs between two runs of a row, as data and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.judging.differences import (
    differences,
    ran_differently,
    row_differences,
)
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, MovedBytes, Window
from pytest_gpumem.records.row import Difference, LimitResult, Row, Verdict
from pytest_gpumem.records.what_ran import Migrations, PageCounts, Step, WhatRan, what_ran
from pytest_gpumem.reporting.row import describe

KERNEL = Step(
    "kernel",
    "triad",
    code="c0de",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    registers=16,
    local=0,
    stream=0,
)
OTHER = replace(KERNEL, name="scale", code="5ca1e")
COPY = Step("copy", "H2D", source="pinned", memory="device", nbytes=4 * 2**20, stream=0)
WAIT = Step("synchronisation", "stream")


def of(base: Sequence[Step], head: Sequence[Step]) -> list[Difference]:
    return list(ran_differently(what_ran(base, {}), what_ran(head, {})))


def test_a_changed_kernel() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"block": (128, 1, 1)}, "block", "kernel triad: block 256 → 128"),
        ({"code": "other"}, "code", "kernel triad: its module changed"),
        ({"local": 64}, "local", "kernel triad: local memory of a thread 0 B → 64 B"),
    ]
    for change, field, text in cases:
        (one,) = of([COPY, KERNEL], [COPY, replace(KERNEL, **change)])
        assert (one.kind, one.name, one.field, describe(one)) == ("kernel", "triad", field, text), (
            change
        )


def test_changed_arguments() -> None:
    def found(base: tuple[str, ...], head: tuple[str, ...]) -> list[str]:
        return [
            describe(one)
            for one in of([replace(KERNEL, arguments=base)], [replace(KERNEL, arguments=head)])
        ]

    assert found(("device -", "100000 0"), ("device -", "107ae1 0")) == [
        "kernel triad: argument 2: 1048576 → 1080033"
    ]
    assert found(("device -",), ("managed -",)) == ["kernel triad: argument 1: device → managed"]
    assert found(("device - 1 1",), ("device - 1 2",)) == [
        "kernel triad: argument 1, byte 12: 1 → 2"
    ]
    assert found(("1",), ("1", "2")) == ["kernel triad: number of arguments 1 → 2"]
    assert found(("5", "12 ?"), ("5", "12 7")) == []
    assert found(("5", "12 ?"), ("5", "13 7")) == ["kernel triad: argument 2: 12 ? → 13 ?"]


def test_a_copy_that_became_pageable_and_one_more_copy() -> None:
    pageable = replace(COPY, source="pageable")
    changed, added = of([COPY, KERNEL], [pageable, KERNEL, COPY])
    assert (changed.field, changed.was, changed.now) == ("source", "pinned", "pageable")
    assert describe(added) == "copy H2D added (4 MiB pinned → device)"


def test_kernels_that_were_added_and_removed_and_an_extra_wait() -> None:
    found = of([KERNEL, OTHER], [KERNEL, KERNEL, WAIT])
    assert {describe(one) for one in found} == {
        "kernel scale removed (64 blocks of 256)",
        "kernel triad added (64 blocks of 256)",
        "synchronisation stream added",
    }


def test_the_same_difference_of_many_steps_is_one() -> None:
    (one,) = of([KERNEL] * 3, [replace(KERNEL, block=(128, 1, 1))] * 3)
    assert one.times == 3
    assert describe(one) == "3 × kernel triad: block 256 → 128"


def test_another_order_of_the_same_steps() -> None:
    (one,) = of([KERNEL, OTHER], [OTHER, KERNEL])
    assert describe(one) == "the same steps in another order"


def test_state() -> None:
    base = what_ran([KERNEL], {"window": "8 MiB", "x": "pinned"})
    head = what_ran([KERNEL], {"x": "pageable", "window": "8 MiB"})
    assert {one: describe(one) for one in ran_differently(base, head)} == {
        Difference("state", "pinned", "pageable", "x"): "state x: pinned → pageable",
    }


# What was declared, and pages


def measured(bench: Any, ran: WhatRan | None = None, **changes: Any) -> Measurement:
    found: Measurement = bench.run(268e-6, what_ran=ran, **changes)
    return found


def faults(count: int, to_device: int) -> Migrations:
    return Migrations(before=PageCounts(), launch=PageCounts(gpu_faults=count, to_device=to_device))


def test_what_is_declared_or_counted(bench: Any) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"moved_bytes": MovedBytes(8 << 20, 0)},
            {"moved_bytes": MovedBytes(8 << 20, 2 << 20)},
            "declared bytes 8 MiB → 10 MiB",
        ),
        ({"sectors_per_request": 4.0}, {"sectors_per_request": 8.0}, "sectors per request 4 → 8"),
        (
            {"migrations": faults(0, 0)},
            {"migrations": faults(1243, 0)},
            "1243 GPU page faults where there were none",
        ),
        (
            {"migrations": faults(0, 1 << 20)},
            {"migrations": faults(0, 64 << 20)},
            "migrated bytes 1 MiB → 64 MiB",
        ),
    ]
    for base, head, text in cases:
        (one,) = differences(measured(bench, **base), measured(bench, **head))
        assert describe(one) == text, base


def test_what_is_unknown_of_a_side_is_no_difference(bench: Any) -> None:
    known = measured(
        bench, what_ran([KERNEL], {}), sectors_per_request=4.0, migrations=faults(9, 0)
    )
    assert (
        differences(
            known,
            measured(bench, WhatRan(not_watched="CUPTI is missing"), sectors_per_request=None),
        )
        == ()
    )
    assert (
        differences(
            measured(bench, migrations=faults(1000, 0)), measured(bench, migrations=faults(1050, 0))
        )
        == ()
    )  # varies so


def test_a_window_is_said_once_and_before_what_ran(bench: Any) -> None:
    window, state = Window(8 << 20, 1.0, 8 << 20), {"set-aside of L2": "8 MiB"}
    base = measured(bench, what_ran([replace(KERNEL, window="8 MiB")], state), window=window)
    head = measured(
        bench,
        what_ran([replace(KERNEL, grid=(8, 1, 1))], {"set-aside of L2": "0 B"}),
        window=None,
    )
    kinds = [(one.kind, one.field) for one in differences(base, head)]
    assert kinds == [("access-policy window", ""), ("kernel", "grid")]


def test_a_row_that_fails_by_its_kernels_says_first_what_ran(bench: Any) -> None:
    base = measured(bench, what_ran([KERNEL], {}), moved_bytes=MovedBytes(1, 1))
    head = measured(bench, what_ran([KERNEL, OTHER], {}), moved_bytes=MovedBytes(2, 2))
    for limit, first in (("max_kernels", "kernel"), ("max_regression", "declared bytes")):
        verdict = Verdict(Outcome.FAIL, "", limits=(LimitResult(limit, Outcome.FAIL),))
        assert row_differences(Row("t.py::t", Limits(), verdict, head), base)[0].kind == first
