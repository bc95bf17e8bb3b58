"""What ran differently, as data and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.explain.what_ran import Divergence, differences
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran

KERNEL = Step(
    StepKind.KERNEL,
    "triad",
    code="c0de",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    registers=16,
    local=0,
    stream=0,
)
OTHER = replace(KERNEL, name="scale", code="5ca1e")
COPY = Step(StepKind.COPY, "H2D", source="pinned", memory="device", nbytes=4 * 2**20, stream=0)
WAIT = Step(StepKind.SYNCHRONISATION, "stream")


def of(base: Sequence[Step], head: Sequence[Step]) -> list[Divergence]:
    return list(differences(what_ran(base, {}), what_ran(head, {})))


def test_the_same_work_has_no_differences() -> None:
    assert of([COPY, KERNEL], [COPY, KERNEL]) == []


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"block": (128, 1, 1)}, "block", "kernel triad: block 256 → 128"),
        ({"grid": (8, 8, 1)}, "grid", "kernel triad: grid 64 → 8 × 8"),
        ({"code": "other"}, "code", "kernel triad: other machine code"),
        ({"registers": 40}, "registers", "kernel triad: registers 16 → 40"),
        ({"local": 64}, "local", "kernel triad: local memory of a thread 0 B → 64 B"),
        ({"window": "1 MiB"}, "window", "kernel triad: access-policy window none → 1 MiB"),
    ],
)
def test_a_changed_kernel(change: dict[str, Any], field: str, text: str) -> None:
    (one,) = of([COPY, KERNEL], [COPY, replace(KERNEL, **change)])
    assert (one.change, one.what, one.name, one.field, one.text) == (
        "changed",
        "kernel",
        "triad",
        field,
        text,
    )


def test_changed_arguments() -> None:
    def found(base: tuple[str, ...], head: tuple[str, ...]) -> list[str]:
        return [
            one.text
            for one in of([replace(KERNEL, arguments=base)], [replace(KERNEL, arguments=head)])
        ]

    assert found(("p256", "100000"), ("p256", "107ae1")) == [
        "kernel triad: argument 2 0x100000 → 0x107ae1"
    ]
    assert found(("p256",), ("p4",)) == [
        "kernel triad: argument 1 an address aligned to 256 bytes → an address aligned to 4 bytes"
    ]
    assert found(("p256 1*3",), ("p256 1 2 1",)) == ["kernel triad: argument 1, byte 16 0x1 → 0x2"]
    assert found(("1",), ("1", "2")) == ["kernel triad: number of arguments 1 → 2"]
    assert found(("5", "12??"), ("5", "1234")) == []
    assert found(("5", "12??"), ("5", "1334")) == ["kernel triad: argument 2 0x12?? → 0x13??"]
    assert found(("5",), ("varies",)) == ["kernel triad: argument 1 0x5 → varies"]


def test_a_copy_that_became_pageable_and_one_more_copy() -> None:
    pageable = replace(COPY, source="pageable")
    changed, added = of([COPY, KERNEL], [pageable, KERNEL, COPY])
    assert (changed.field, changed.was, changed.now) == ("source", "pinned", "pageable")
    assert (added.change, added.text) == ("added", "copy H2D added (4 MiB pinned → device)")


def test_kernels_that_were_added_and_removed_and_an_extra_wait() -> None:
    found = of([KERNEL, OTHER], [KERNEL, KERNEL, WAIT])
    assert {(one.change, one.what, one.name) for one in found} == {
        ("removed", "kernel", "scale"),
        ("added", "kernel", "triad"),
        ("added", "synchronisation", "stream"),
    }


def test_the_same_difference_of_many_steps_is_one() -> None:
    (one,) = of([KERNEL] * 3, [replace(KERNEL, block=(128, 1, 1))] * 3)
    assert one.times == 3
    assert one.text == "3 × kernel triad: block 256 → 128"


def test_a_renamed_kernel_with_the_same_code_is_no_difference() -> None:
    assert of([KERNEL], [replace(KERNEL, name="triad_v2")]) == []
    (one,) = of([KERNEL], [replace(KERNEL, name="triad_v2", block=(128, 1, 1))])
    assert (one.name, one.field) == ("triad_v2", "block")


def test_another_order_of_the_same_steps() -> None:
    (one,) = of([KERNEL, OTHER], [OTHER, KERNEL])
    assert one.what == "order"


def test_work_that_moved_to_another_stream() -> None:
    (one,) = of([COPY, KERNEL], [COPY, replace(KERNEL, stream=1)])
    assert (one.field, one.was, one.now) == ("stream", "0", "1")


def test_calls_and_state() -> None:
    base = what_ran(
        [KERNEL], {"cudaMemAdvise": 1, "cuLaunchKernel": 2}, {"window": "8 MiB", "x": "pinned"}
    )
    head = what_ran([KERNEL], {"cuLaunchKernel": 3}, {"x": "pageable", "window": "8 MiB"})
    found = {
        (one.change, one.what, one.name, one.was, one.now): one.text
        for one in differences(base, head)
    }
    assert found == {
        ("removed", "call", "cudaMemAdvise", "1", None): "call cudaMemAdvise removed (1)",
        ("changed", "call", "cuLaunchKernel", "2", "3"): "call cuLaunchKernel: count 2 → 3",
        ("changed", "state", "x", "pinned", "pageable"): "state x: pinned → pageable",
    }


def test_the_reference_of_a_simulated_device_has_no_machine_code() -> None:
    assert Divergence("changed", "kernel", "reference", "code").text == "reference: other source"
