"""What is known of a launch before it runs: the sectors of its requests, and declarations that contradict each other."""

from __future__ import annotations

import pytest
from bench import Bench

from pytest_gpumem.measuring.case import Case
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import MiB


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
