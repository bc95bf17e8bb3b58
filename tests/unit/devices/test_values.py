"""Seeded values and comparisons by NumPy, which must agree with the kernels of CUDA devices."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.devices.values import CHUNK, compared_type, fill, mismatch

MASK = 2**64 - 1


def splitmix(seed: int, index: int) -> int:
    """SplitMix64 in Python's integers, written apart from the code under test."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    return mixed((mixed(seed & MASK) + (index + 1) * 0x9E3779B97F4A7C15) & MASK)


def test_values_hash_the_seed_and_the_index() -> None:
    cases: list[tuple[str, object]] = [
        ("u8", lambda z: z),
        ("u4", lambda z: z & 0xFFFFFFFF),
        ("f8", lambda z: (z >> 11) / 2**53),
        ("f4", lambda z: (z >> 40) / 2**24),
        ("f2", lambda z: (z >> 53) / 2**11),
        ("b1", lambda z: bool(z >> 63)),
    ]
    for dtype, expected in cases:
        out = np.empty(100, dtype)
        fill(out, 12345)
        assert [v.item() for v in out] == [expected(splitmix(12345, i)) for i in range(100)], dtype  # type: ignore[operator]


def test_content_does_not_depend_on_the_size() -> None:
    short, long = np.empty(1000, "f4"), np.empty(CHUNK + 1000, "f4")
    fill(short, 7)
    fill(long, 7)
    assert np.array_equal(short, long[:1000])
    tail = [np.float32((splitmix(7, i) >> 40) / 2**24) for i in range(CHUNK, CHUNK + 5)]
    assert list(long[CHUNK : CHUNK + 5]) == tail


def test_floats_compare_by_the_relative_rule() -> None:
    expected = np.array([1.0, 2.0, 0.0, np.inf, 4.0], "f8")
    assert mismatch(expected.copy(), expected, 0.0) is None
    assert mismatch(expected * (1 + 1e-6), expected, 1e-5) is None
    assert mismatch(expected * (1 + 1e-4), expected, 1e-5) == (3, 0)
    off = expected.copy()
    off[2] = 1e-20
    assert mismatch(off, expected, 1e-5) == (1, 2)


def test_nan_equals_nothing() -> None:
    poisoned = np.frombuffer(b"\xff" * 16, "f4")
    assert mismatch(poisoned, poisoned.copy(), 1e9) == (4, 0)


def test_integers_compare_exactly_whatever_the_tolerance() -> None:
    expected = np.arange(CHUNK * 2, dtype="i4")
    actual = expected.copy()
    actual[[CHUNK + 3, CHUNK + 9]] += 1
    assert mismatch(actual, expected, 1.0) == (2, CHUNK + 3)


def test_complex_numbers_compare_by_their_parts() -> None:
    expected = np.array([1 + 1j, 2 + 2j], "c8")
    assert mismatch(expected + np.array([0, 1j], "c8"), expected, 1e-5) == (1, 1)


def test_what_is_no_number_cannot_be_compared() -> None:
    with pytest.raises(Unsupported):
        compared_type(np.dtype("V3"))
