"""What is known of a launch before it runs: the sectors of its requests, and declarations that contradict each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench import Bench

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import MiB


def test_accesses_of_a_call_that_is_not_made(bench: Bench) -> None:
    c, a = bench.buffers(2)
    touched = {
        access.argument: (access.direction, access.footprint)
        for access in bench.kernels.copy.accesses(c, a=a)
    }
    assert touched == {"c": ("write", c.nbytes), "a": ("read", a.nbytes)}
    with pytest.raises(BadCall, match="needs 'a'"):
        bench.kernels.copy.accesses(c)


def test_a_measurement_knows_the_sectors_of_its_requests() -> None:
    for kernel, scalars, sectors in [
        ("offset_copy", (1,), 5),
        ("stride_copy", (16,), 32),
        ("memcpy", (), None),
    ]:
        bench = Bench()
        assert bench.measure(kernel, *bench.buffers(2), *scalars).sectors_per_request == sectors, (
            kernel,
            scalars,
            sectors,
        )


# Declarations


def declared(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if note.startswith("moved=")]


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        (None, []),
        ("2 MiB", []),
        (
            3 * MiB,
            [
                "moved= says 3 MiB, more than the 2 MiB of reads= and writes= (1 MiB + 1 MiB); moved= counts"
            ],
        ),
    ],
)
def test_a_case_that_declares_twice_says_so_once(
    bench: Bench, moved: int | str | None, said: list[str]
) -> None:
    def build(memory: Memory) -> Case:
        x, y = memory.device(1 * MiB), memory.device(1 * MiB)
        return Case(lambda: None, reference=lambda: None, reads=[x], writes=[y], moved=moved)

    assert declared(bench.case(build, placements=3).notes) == said


def beyond(bench: Bench, moved: int, *arguments: Any) -> list[str]:
    return declared(bench.target(lambda *given: None, *arguments, moved=moved).notes)


def test_a_callable_that_declares_more_than_its_arguments_hold_says_so(bench: Bench) -> None:
    x, y = bench.buffers(2, 1 * MiB)
    assert beyond(bench, 4 * MiB, x, y) == []
    (note,) = beyond(bench, 4 * MiB + 1, x, y)
    assert note.startswith(
        "moved= says 4 MiB, but the buffers among the arguments hold 2 MiB and allow 4 MiB"
    )
    assert len(beyond(bench, 3 * MiB, x, x)) == 1  # one buffer, however often it is given
    assert beyond(bench, 4 * MiB, x, [(y,)]) == []
    assert len(beyond(bench, 4 * MiB + 1, [x, (y,)])) == 1
    assert (
        beyond(bench, 4 * MiB, np.zeros(MiB // 4, "f4"), y) == []
    )  # arrays of other libraries hold bytes too
