"""What every reference promises. `test_kernel_sources_run` checks their results against the sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import SCALARS, arguments_of, call_of, cycle

from pytest_gpumem.kernels.catalogue import CATALOGUE


def wrapped(value: int) -> int:
    """A Python integer as a 32-bit one."""
    return (value + 2**31) % 2**32 - 2**31


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype="i4")


def result(name: str, scalars: dict[str, Any] | None = None, /, **arrays: Any) -> Any:
    kernel: Any = CATALOGUE[name]
    call = call_of(kernel, arrays, **(scalars or {}))
    return kernel.reference(arrays, call.scalars)


def test_integers_wrap_around() -> None:
    near = 2**31 - 1
    assert result("triad", {"s": 3}, a=ints(0), b=ints(5), c=ints(near))["a"].tolist() == [
        wrapped(3 * near + 5)
    ]
    assert result("stream_add", c=ints(0), a=ints(near), b=ints(near))["c"].tolist() == [-2]


def test_chase_refuses_what_is_no_cycle() -> None:
    nodes = cycle(np.random.default_rng(0), 8)
    nodes[0] = 8
    with pytest.raises(ValueError, match=r"no cycle: indices from \d to 8, 8 nodes"):
        result("chase", {"steps": 3}, nodes=nodes, out=ints(0))
    with pytest.raises(ValueError, match=r"no cycle: indices from \d to 8, 8 nodes"):
        result("chase_onward", {"steps": 3}, nodes=nodes, out=ints(0))


MANY_TO_ONE = (
    "read",
    "dot",
    "l2_read",
    "transpose",
    "transpose_tiled",
    "transpose_padded",
    "reread",
)
"""Kernels whose result may be decided by a prefix to a lesser length only."""
ALL = [(k.name, dtype) for k in CATALOGUE.values() for dtype in k.dtypes]


def test_reference_gives_what_is_written_and_changes_nothing() -> None:
    for name, dtype in ALL:
        kernel = CATALOGUE[name]
        arrays = arguments_of(name, 1000, dtype, np.random.default_rng(1))
        before = {key: array.copy() for key, array in arrays.items()}
        got = result(name, SCALARS.get(name), **arrays)
        assert set(got) == {
            p.name for p in kernel.parameters if p.role.value in ("write", "update")
        }, (name, dtype)
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, before[key])
            if key in got:
                assert got[key].dtype == array.dtype, (name, dtype)
                assert len(got[key]) == len(array), (name, dtype)
                assert not np.shares_memory(got[key], array), (name, dtype)


@settings(max_examples=40)
@given(size=st.integers(100, 6000), cut=st.integers(40, 6000), amount=st.integers(1, 33))
def test_a_prefix_gives_the_prefix_of_the_result(size: int, cut: int, amount: int) -> None:
    for name in CATALOGUE:
        if name.startswith("chase"):
            continue
        with naming(name):
            kernel: Any = CATALOGUE[name]
            arrays = arguments_of(name, size, kernel.dtypes[0], np.random.default_rng(size))
            scalars = {
                **call_of(kernel, arrays, offset=amount, stride=amount).scalars,
                **({"rounds": 2} if name == "elementwise" else {}),
            }
            full = kernel.reference(arrays, scalars)
            part = kernel.reference({key: array[:cut] for key, array in arrays.items()}, scalars)
            period = arrays["lut_persistent"].size if name.startswith("reset_data") else 0
            for key, content in part.items():
                if name not in MANY_TO_ONE:
                    assert len(content) == min(len(arrays[key]), cut)
                if cut >= period:
                    np.testing.assert_array_equal(content, full[key][: len(content)])
