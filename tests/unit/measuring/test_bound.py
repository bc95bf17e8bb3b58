"""Arguments of a kernel: what does not fit is one line that names kernel, parameter and value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from bench import Bench
from cases import naming

from pytest_gpumem.measuring.bound import BadCall


def test_what_does_not_fit() -> None:
    cases: list[tuple[Callable[..., object], str]] = [
        (
            lambda k, a, b, c, d: k.triad(a, b, c, 3.0, 4.0),
            "triad(a, b, c, s): too many positional",
        ),
        (
            lambda k, a, b, c, d: k.triad(a, b),
            "triad(a, b, c, s): missing a required argument: 'c'",
        ),
        (
            lambda k, a, b, c, d: k.triad(a, b, c, "3"),
            "triad(a, b, c, s): 's' is a number, not '3'",
        ),
        (
            lambda k, a, b, c, d: k.triad(a, b, 5),
            "triad(a, b, c, s): 'c' is a buffer from a fixture such as device_buffer, not int",
        ),
        (
            lambda k, a, b, c, d: k.sliding_window(a, b),
            "sliding_window: data_persistent holds f4; accepted: i4",
        ),
        (
            lambda k, a, b, c, d: k.copy(a, a),
            "copy(c, a): 'c' is written, so it cannot be the same buffer as 'a'",
        ),
        (
            lambda k, a, b, c, d: k.offset_copy(a, b, 2**30),
            "offset_copy: offset is 1073741824, but the arrays have only 1024 elements",
        ),
        (
            lambda k, a, b, c, d: k.copy.with_grid(0)(a, b),
            "with_grid(): blocks=0; accepted is a whole number of at least 1",
        ),
        (
            lambda k, a, b, c, d: k.copy.with_grid(1.5)(a, b),
            "with_grid(): blocks=1.5; accepted is a whole number of at least 1",
        ),
        (
            lambda k, a, b, c, d: k.copy.with_stream(a),
            "with_stream() takes s of `with persisting_stream(...) as s:`, not Buffer",
        ),
    ]
    for make, message in cases:
        bench = Bench()
        with naming(make):
            arrays = [*bench.buffers(3, 4096), *bench.buffers(1, 4096, "i4")]
            with pytest.raises(BadCall) as caught:
                make(bench.kernels, *arrays)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
            assert bench.device.launched == []


def test_a_call_that_is_repeated_follows_its_arguments(bench: Bench) -> None:
    """Another scalar, another buffer or a moved one is another call."""
    a, b, c = bench.buffers(3, 4096)
    triad = bench.kernels.triad
    expected = [b.read() + np.float32(s) * c.read() for s in (2, 2, 5)]
    for s, content in zip((2, 2, 5), expected, strict=True):
        triad(a, b, c, s)
        np.testing.assert_array_equal(a.read(), content)
    a.write(np.zeros(a.size))
    a.move()
    triad(a, b, c, 5)
    np.testing.assert_array_equal(a.read(), expected[2])
    triad(c, b, a, 5)
    np.testing.assert_array_equal(c.read(), b.read() + np.float32(5) * a.read())
    with pytest.raises(BadCall):
        triad(c, b, a, True)


def test_a_copy_takes_any_types_of_as_many_bytes(bench: Bench) -> None:
    there, halves = bench.memory.device((64,), "u1"), bench.memory.pinned((32,), "f2")
    bench.kernels.memcpy(there, halves)
    assert there.read().tobytes() == halves.read().tobytes()
    with pytest.raises(BadCall, match="memcpy: a copy of 64 B to 65 B"):
        bench.kernels.memcpy(bench.memory.device((65,), "u1"), halves)


def test_a_chosen_grid_is_launched(bench: Bench) -> None:
    a, b = bench.buffers(2, 4096)
    kernel = bench.kernels.copy
    kernel.with_grid(np.int64(7))(a, b)  # type: ignore[arg-type]
    kernel(a, b)
    assert bench.device.launched[0].shape.blocks == 7
    assert bench.device.launched[1].shape.blocks != 7


def test_a_kernel_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(
        (AttributeError, BadCall), match=r"'traid' in the catalogue \(did you mean triad\?\)"
    ):
        _ = bench.kernels.traid
    assert "triad" in dir(bench.kernels)
