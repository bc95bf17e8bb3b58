"""What memory holds, and comparing it: the host's half, which must agree with the kernels."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from pytest_gpumem.devices.cuda import comparing, content, streams
from pytest_gpumem.devices.cuda.comparing import mismatch_on_host, rule_of
from pytest_gpumem.devices.cuda.content import fill_on_host, plain_type, start_of
from pytest_gpumem.devices.protocol import Unsupported

MASK = 2**64 - 1


def splitmix(seed: int, index: int) -> int:
    """SplitMix64 in Python's integers, written apart from the code under test."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    return mixed((mixed(seed & MASK) + (index + 1) * 0x9E3779B97F4A7C15) & MASK)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("u8", lambda z: z),
        ("u4", lambda z: z & 0xFFFFFFFF),
        ("f8", lambda z: (z >> 11) / 2**53),
        ("f4", lambda z: (z >> 40) / 2**24),
        ("f2", lambda z: (z >> 53) / 2**11),
        ("b1", lambda z: bool(z >> 63)),
    ],
)
def test_values_hash_the_seed_and_the_index(dtype: str, expected: object) -> None:
    out = np.empty(100, dtype)
    fill_on_host(out, 12345)
    assert [v.item() for v in out] == [expected(splitmix(12345, i)) for i in range(100)]  # type: ignore[operator]


def test_content_does_not_depend_on_the_size() -> None:
    short, long = np.empty(1000, "f4"), np.empty(content._CHUNK + 1000, "f4")
    fill_on_host(short, 7)
    fill_on_host(long, 7)
    assert np.array_equal(short, long[:1000])
    tail = [np.float32((splitmix(7, i) >> 40) / 2**24) for i in range(content._CHUNK, content._CHUNK + 5)]
    assert list(long[content._CHUNK : content._CHUNK + 5]) == tail


def test_floats_are_uniform_below_one_and_neighbouring_seeds_differ() -> None:
    values, others = np.empty(200_000, "f4"), np.empty(200_000, "f4")
    fill_on_host(values, 1)
    fill_on_host(others, 2)
    assert 0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    assert abs(values.mean() - 0.5) < 4 * np.sqrt(1 / 12 / values.size)
    assert abs(np.corrcoef(values, others)[0, 1]) < 4 / np.sqrt(values.size)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64, 2**70 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= start_of(seed) <= MASK


def test_every_type_is_filled_as_a_plain_one() -> None:
    assert plain_type("i4") == ("u4", 1)
    assert plain_type("c8") == ("f4", 2)
    assert plain_type("c16") == ("f8", 2)
    assert plain_type("V12") == ("u1", 12)
    assert plain_type("b1") == ("b1", 1)


def test_floats_compare_by_the_relative_rule() -> None:
    expected = np.array([1.0, 2.0, 0.0, np.inf, 4.0], "f8")
    assert mismatch_on_host(expected.copy(), expected, 0.0) is None
    assert mismatch_on_host(expected * (1 + 1e-6), expected, 1e-5) is None
    assert mismatch_on_host(expected * (1 + 1e-4), expected, 1e-5) == (3, 0)
    off = expected.copy()
    off[2] = 1e-20
    assert mismatch_on_host(off, expected, 1e-5) == (1, 2)


def test_nan_equals_nothing() -> None:
    poisoned = np.frombuffer(b"\xff" * 16, "f4")
    assert mismatch_on_host(poisoned, poisoned.copy(), 1e9) == (4, 0)


def test_integers_compare_exactly_whatever_the_tolerance() -> None:
    expected = np.arange(content._CHUNK * 2, dtype="i4")
    actual = expected.copy()
    actual[[content._CHUNK + 3, content._CHUNK + 9]] += 1
    assert mismatch_on_host(actual, expected, 1.0) == (2, content._CHUNK + 3)


def test_complex_numbers_compare_by_their_parts() -> None:
    expected = np.array([1 + 1j, 2 + 2j], "c8")
    assert mismatch_on_host(expected + np.array([0, 1j], "c8"), expected, 1e-5) == (1, 1)


def test_what_is_no_number_cannot_be_compared() -> None:
    with pytest.raises(Unsupported):
        rule_of(np.dtype("V3"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_devices_own_kernels_compile(arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("nvidia.cu13")
    fills = [f"gpumem_fill_random<{t}>" for t in content._FILLED_AS.values()]
    rules = {d: rule_of(d)[2] for d in comparing._TYPES}
    compares = [f"gpumem_mismatch<{t}, {rules[d]}<{t}>>" for d, t in comparing._TYPES.items()]
    for source, entries in ((streams.SOURCE, ["gpumem_hold"]), (content.SOURCE, fills), (comparing.SOURCE, compares)):
        program = core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17"))
        code = program.compile("cubin", name_expressions=tuple(entries))
        assert sorted(code.symbol_mapping) == sorted(entries)
