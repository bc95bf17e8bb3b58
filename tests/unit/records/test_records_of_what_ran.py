"""The digest of a launch: what changes it, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import FileError
from pytest_gpumem.records.schema import from_plain, to_plain
from pytest_gpumem.records.what_ran import Step, WhatRan, what_ran

KERNEL = Step(
    "kernel",
    "triad",
    code="c0de",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    shared=0,
    registers=16,
    local=0,
    stream=7,
)
COPY = Step("copy", "H2D", source="pinned", memory="device", nbytes=4096, stream=9)


def test_a_record_keeps_each_distinct_step_once_and_numbers_streams_by_first_use() -> None:
    ran = what_ran([COPY, KERNEL, KERNEL, COPY])
    assert [step.stream for step in ran.steps] == [0, 1]
    assert ran.order == (0, 1, 1, 0)
    assert [step.kind for step in ran.launch] == [
        "copy",
        "kernel",
        "kernel",
        "copy",
    ]
    assert len(list(ran.of("kernel"))) == 2


def test_an_edited_file_whose_launch_has_other_steps_is_refused() -> None:
    plain = to_plain(what_ran([COPY, KERNEL], {}))
    with pytest.raises(FileError, match="names step 1 of 1"):
        from_plain({**plain, "steps": plain["steps"][:1]}, WhatRan)


def test_a_record_does_not_depend_on_the_handles_of_streams_or_the_order_of_names() -> None:
    base = what_ran([COPY, KERNEL], {"x": "1", "y": "2"})
    moved = [replace(COPY, stream=123), replace(KERNEL, stream=45)]
    assert what_ran(moved, {"y": "2", "x": "1"}) == base


def test_each_property_of_a_kernel_changes_the_record() -> None:
    cases: list[dict[str, Any]] = [
        {"name": "saxpy"},
        {"code": "0ther"},
        {"grid": (32, 1, 1)},
        {"block": (128, 1, 1)},
        {"shared": 48},
        {"dynamic_shared": 48},
        {"registers": 17},
        {"local": 8},
        {"window": "1 MiB"},
        {"stream": 9},
    ]
    for change in cases:
        changed = what_ran([COPY, replace(KERNEL, **change)], {})
        assert changed != what_ran([COPY, KERNEL], {}), change


def test_order_number_and_state_change_the_record() -> None:
    base = what_ran([COPY, KERNEL], {"window": "none"})
    records = [
        base,
        what_ran([KERNEL, COPY], {"window": "none"}),
        what_ran([COPY, KERNEL, KERNEL], {"window": "none"}),
        what_ran([COPY, KERNEL], {"window": "1 MiB"}),
    ]
    for record in records:
        assert records.count(record) == 1


def test_a_record_is_read_back_equal() -> None:
    ran = what_ran([COPY, KERNEL], {"window": "none"})
    plain = to_plain(ran)
    assert from_plain(plain, WhatRan) == ran
    assert (
        "window" not in plain["steps"][1]
    )  # what a step does not have takes no room in a baseline


def test_exact_figures_of_a_launch() -> None:
    """Sums over its steps, of registers and spills the most of one kernel; an unknown figure counts as 0."""
    unknown = replace(KERNEL, registers=None, local=None)
    waits = [Step("synchronisation", name) for name in ("device", "event")]
    launch = [
        COPY,
        KERNEL,
        replace(KERNEL, registers=40, local=8),
        unknown,
        replace(COPY, nbytes=100),
        COPY,
        replace(COPY, nbytes=None),
    ]
    ran = what_ran([*launch, *waits, Step("memset", nbytes=64)])
    assert (ran.kernels, ran.copies, ran.copied_bytes, ran.waits) == (3, 4, 2 * 4096 + 100, 2)
    assert (ran.registers, ran.spill) == (40, 8)
    nothing = what_ran([unknown], {})
    assert (
        nothing.copies,
        nothing.copied_bytes,
        nothing.waits,
        nothing.registers,
        nothing.spill,
    ) == (0, 0, 0, 0, 0)
    assert (WhatRan().kernels, WhatRan().registers, WhatRan().spill) == (0, 0, 0)
