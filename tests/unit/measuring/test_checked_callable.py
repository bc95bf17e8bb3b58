"""A callable with `check`, `reads` and `writes` is checked and has its bytes, as a case does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench import Bench
from cases import naming

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.units import MiB


def double(x: Buffer, y: Buffer) -> None:
    y.view()[:] = 2 * x.view()


def right(x: Buffer, y: Buffer) -> bool:
    return bool((y.read() == 2 * x.read()).all())


def test_it_has_declared_bytes_and_is_checked_at_every_placement(bench: Bench) -> None:
    x, y = bench.buffers(2, 1 * MiB)
    checks: list[int] = []

    def check() -> bool:
        checks.append(y.address)
        return right(x, y)

    target = bench.target(
        double, x, y, reference=lambda: double(x, y), check=check, reads=[x], writes=[y]
    )
    taken = bench.take(target, placements=3)
    assert taken.checked
    assert taken.moved_bytes is not None
    assert (taken.moved_bytes.reads, taken.moved_bytes.writes) == (1 * MiB, 1 * MiB)
    assert taken.footprint == 2 * MiB
    assert len(taken.placements) == 3
    assert len(set(checks)) == 2  # before the samples, and where the last placement is
    assert taken.notes == ()
    bare = bench.take(bench.target(double, x, y, reference=lambda: double(x, y)))
    assert (bare.checked, bare.moved_bytes, bare.footprint) == (False, None, None)


def test_outputs_are_poisoned_unless_they_are_also_read(bench: Bench) -> None:
    x, y = bench.buffers(2, 64)
    seen: list[Any] = []

    def launch() -> None:
        seen.append((np.isnan(x.read()).any(), np.isnan(y.read()).all()))

    bench.take(bench.target(launch, reference=launch, check=lambda: True, reads=[x], writes=[x, y]))
    assert seen[0] == (False, True)
    with pytest.raises(WrongResult, match="<lambda>: its check returned False after one launch"):
        bench.take(
            bench.target(
                lambda: None,
                reference=lambda: None,
                check=lambda: right(x, y),
                reads=[x],
                writes=[y],
            )
        )


def test_a_mistake_is_one_sentence() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"check": True}, "check= is a function without arguments, not an object of type bool$"),
        (
            {"check": lambda x: True},
            "check= is a function without arguments: missing a required argument: 'x'$",
        ),
        ({"reference": abs}, "reference= is a function without arguments: missing a required "),
        ({"reads": 3}, "reads= is a list of arrays or buffers, not int"),
        ({"writes": np.zeros(4)}, "writes= is a list of arrays or buffers, not ndarray"),
        ({"reads": [3.5]}, r"reads= takes arrays or buffers; 3\.5 has no nbytes"),
        (
            {"check": lambda: np.array([True, True])},
            "check= returned a value of type ndarray that is neither true nor false",
        ),
        (
            {"moved": 0},
            "moved= is the compulsory bytes of a launch, a positive integer or .* not 0$",
        ),
        ({"moved": "lots"}, "moved= is the compulsory bytes of a launch.*, not 'lots'$"),
    ]
    for declared, message in cases:
        bench = Bench()
        with naming(declared):
            x, y = bench.buffers(2, 64)
            with pytest.raises(BadCall, match=f"^{message}"):
                bench.take(bench.target(double, x, y, **{"reference": lambda: None, **declared}))


def test_a_kernel_of_the_catalogue_declares_these_itself() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"check": print}, "check"),
        ({"reference": print}, "check"),
        ({"reads": []}, "traffic"),
        ({"moved": 64}, "traffic"),
    ]
    for declared, known in cases:
        bench = Bench()
        with naming(declared):
            (name,) = declared
            with pytest.raises(
                BadCall, match=f"^{name}=.*: the {known} of copy is known from the kernel$"
            ):
                bench.target(bench.kernels.copy, *bench.buffers(2), **declared)
