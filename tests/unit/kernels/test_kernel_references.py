"""References against the texts' formulas in plain Python loops, and what every reference promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import KiB, arguments_of, call_of, cycle, random_array

from pytest_gpumem.kernels.catalogue import CATALOGUE


def wrapped(value: int) -> int:
    """A Python integer as a 32-bit one."""
    return (value + 2**31) % 2**32 - 2**31


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype="i4")


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype="f4")


def result(name, scalars=None, /, **arrays):
    kernel = CATALOGUE[name]
    call = call_of(kernel, arrays, **(scalars or {}))
    return kernel.reference(arrays, call.scalars)


def test_stream_by_hand():
    a, b, c = floats(1, 2, 3), floats(10, 20, 30), floats(0.5, 0.25, 4)
    out = floats(0, 0, 0)
    assert result("copy", c=out, a=a)["c"].tolist() == [1, 2, 3]
    assert result("mul", {"s": 4.0}, b=out, c=c)["b"].tolist() == [2, 1, 16]
    assert result("stream_add", c=out, a=a, b=b)["c"].tolist() == [11, 22, 33]
    assert result("triad", {"s": 4.0}, a=out, b=b, c=c)["a"].tolist() == [12, 21, 46]
    assert result("write", {"value": 1.5}, a=out)["a"].tolist() == [1.5, 1.5, 1.5]


def test_triad_scales_by_three_unless_told():
    assert result("triad", a=floats(0), b=floats(1), c=floats(2))["a"].tolist() == [7]


def test_integers_wrap_around():
    near = 2**31 - 1
    assert result("triad", {"s": 3}, a=ints(0), b=ints(5), c=ints(near))["a"].tolist() == [wrapped(3 * near + 5)]
    assert result("stream_add", c=ints(0), a=ints(near), b=ints(near))["c"].tolist() == [-2]


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_read_and_dot_sum_tile_by_tile(dtype):
    rng = np.random.default_rng(3)
    width = np.dtype(dtype).itemsize
    for name, tile in (("read", 64 * KiB // width), ("dot", 32 * KiB // width)):
        arrays = arguments_of(name, 5 * tile, dtype, rng)
        expected = []
        for t in range(5):
            total = 0
            for i in range(t * tile, (t + 1) * tile):
                a = arrays["a"][i].item()
                total += a if name == "read" else a * arrays["b"][i].item()
            expected.append(wrapped(total) if dtype == "i4" else total)
        actual = result(name, **arrays)["sums"]
        assert actual.dtype == np.dtype(dtype)
        np.testing.assert_allclose(actual, expected, rtol=0 if dtype == "i4" else 1e-6)


def test_reset_data_repeats_the_table():
    # The example of the text: [5, 2, 1, 4] repeated.
    table = ints(5, 2, 1, 4)
    data = ints(*[0] * 11)
    assert result("reset_data", data_streaming=data, lut_persistent=table)["data_streaming"].tolist() == [table[i % 4] for i in range(11)]
    assert result("reset_data", data_streaming=ints(0, 0), lut_persistent=table)["data_streaming"].tolist() == [5, 2]


def test_a_table_in_shared_memory_gives_the_same_result():
    assert CATALOGUE["reset_data_shared"].reference is CATALOGUE["reset_data"].reference


def test_sliding_window_thread_by_thread():
    rng = np.random.default_rng(5)
    for freq, data in ((7, 40), (40, 7)):
        persistent, streaming = random_array(rng, freq, "i4"), random_array(rng, data, "i4")
        p, s = persistent.tolist(), streaming.tolist()
        for tid in range(data):
            p[tid % freq] |= 1
            s[tid] = wrapped(3 * s[tid])
        got = result("sliding_window", data_persistent=persistent, data_streaming=streaming)
        assert got["data_persistent"].tolist() == p
        assert got["data_streaming"].tolist() == s


def test_managed_memory_by_hand():
    # The values of the text: x = 1, y = 2, y = x + y = 3.
    assert result("init", x=floats(9, 9))["x"].tolist() == [1, 1]
    assert result("init_warp_per_page", {"value": 2.0}, x=floats(9, 9))["x"].tolist() == [2, 2]
    assert result("add", x=floats(1, 1), y=floats(2, 2)) == {"y": pytest.approx([3, 3])}


@pytest.mark.parametrize("amount", [1, 2, 5, 8, 31, 32])
def test_offset_and_stride_copies_leave_the_rest(amount):
    rng = np.random.default_rng(amount)
    old, new = random_array(rng, 100, "f4"), random_array(rng, 100, "f4")
    expected = old.tolist()
    for xid in range(amount, 100):
        expected[xid] = new[xid]
    assert result("offset_copy", {"offset": amount}, odata=old, idata=new)["odata"].tolist() == expected
    expected = old.tolist()
    for thread in range(-(-100 // amount)):
        expected[thread * amount] = new[thread * amount]
    assert result("stride_copy", {"stride": amount}, odata=old, idata=new)["odata"].tolist() == expected


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 1000])
def test_chase_walks_the_cycle(steps):
    nodes = cycle(np.random.default_rng(steps), 64)
    for start in (0, 17):
        node = start
        for _ in range(steps):
            node = int(nodes[node * 16])
        assert result("chase", {"steps": steps, "start": start}, nodes=nodes, out=ints(-1))["out"].tolist() == [node]


def test_the_onward_walk_starts_where_out_says():
    nodes = cycle(np.random.default_rng(4), 100)
    for start in (0, 99, 100, -1, -(2**31)):
        node = start % 2**32 % 100
        for _ in range(10):
            node = int(nodes[node * 16])
        assert result("chase_onward", {"steps": 10}, nodes=nodes, out=ints(start))["out"].tolist() == [node]


def test_chase_refuses_what_is_no_cycle():
    nodes = cycle(np.random.default_rng(0), 8)
    nodes[0] = 8
    with pytest.raises(ValueError, match=r"no cycle: indices from \d to 8, 8 nodes"):
        result("chase", {"steps": 3}, nodes=nodes, out=ints(0))
    with pytest.raises(ValueError, match=r"no cycle: indices from \d to 8, 8 nodes"):
        result("chase_onward", {"steps": 3}, nodes=nodes, out=ints(0))


@pytest.mark.parametrize("name", ["transpose", "transpose_tiled", "transpose_padded"])
def test_transpose_by_hand(name):
    # 1 2 3      1 4
    # 4 5 6  ->  2 5
    #            3 6
    source = ints(1, 2, 3, 4, 5, 6)
    assert result(name, {"width": 3, "height": 2}, odata=ints(*[0] * 6), idata=source)["odata"].tolist() == [1, 4, 2, 5, 3, 6]


def test_a_prefix_of_a_matrix_decides_the_start_of_its_transposes_first_row():
    kernel, matrix = CATALOGUE["transpose"], np.arange(70, dtype="i4")
    part = kernel.reference({"odata": matrix[:33], "idata": matrix[:33]}, {"width": 10, "height": 7})
    assert part["odata"].tolist() == [0, 10, 20]


def test_l2_read_gives_a_sum_for_each_tile_and_pass():
    a = np.random.default_rng(2).integers(-(2**31), 2**31, 3 * 1024, dtype="i4")
    expected = [wrapped(sum(a[1024 * t : 1024 * (t + 1)].tolist())) for t in range(3) for _ in range(2)]
    assert result("l2_read", {"repeats": 2}, a=a, sums=np.zeros(6, dtype="i4"))["sums"].tolist() == expected


def test_elementwise_is_the_logistic_map():
    x = floats(0.1, 0.5, 0.9)
    got = result("elementwise", {"rounds": 3}, x=x)["x"]
    for first, actual in zip(x, got, strict=True):
        value = first
        for _ in range(3):
            value = np.float32(3.75) * value * (np.float32(1) - value)
        assert actual == value


def test_rereading_at_a_stride_brings_each_rows_first_elements_first():
    x = np.arange(12, dtype="i4")
    assert result("reread", {"times": 2, "stride": 3}, y=np.zeros(12, "i4"), x=x)["y"].tolist() == [0, 3, 6, 9]


def test_elementwise_stays_random():
    x = np.random.default_rng(0).random(4096).astype("f4")
    got = result("elementwise", {"rounds": 2000}, x=x)["x"]
    assert got.min() >= 0
    assert got.max() <= 0.9375 + 1e-6
    assert np.unique(got).size > 1000


MANY_TO_ONE = ("read", "dot", "l2_read", "transpose", "transpose_tiled", "transpose_padded", "reread")
"""Kernels whose result may be decided by a prefix to a lesser length only."""
ALL = [(k.name, dtype) for k in CATALOGUE.values() for dtype in k.dtypes]
SCALARS = {
    "offset_copy": {"offset": 5},
    "stride_copy": {"stride": 3},
    "chase": {"steps": 77},
    "chase_l1": {"steps": 77},
    "chase_onward": {"steps": 77},
    "elementwise": {"rounds": 2},
}


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_reference_gives_what_is_written_and_changes_nothing(name, dtype):
    kernel = CATALOGUE[name]
    arrays = arguments_of(name, 1000, dtype, np.random.default_rng(1))
    before = {key: array.copy() for key, array in arrays.items()}
    got = kernel.reference(arrays, call_of(kernel, arrays, **SCALARS.get(name, {})).scalars)
    assert set(got) == {p.name for p in kernel.parameters if p.role.value in ("write", "update")}
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, before[key])
        if key in got:
            assert got[key].dtype == array.dtype
            assert len(got[key]) == len(array)
            assert not np.shares_memory(got[key], array)


@pytest.mark.parametrize("name", sorted(name for name in CATALOGUE if not name.startswith("chase")))
@settings(max_examples=40)
@given(size=st.integers(100, 6000), cut=st.integers(40, 6000), amount=st.integers(1, 33))
def test_a_prefix_gives_the_prefix_of_the_result(name, size, cut, amount):
    kernel = CATALOGUE[name]
    arrays = arguments_of(name, size, kernel.dtypes[0], np.random.default_rng(size))
    scalars = call_of(kernel, arrays, offset=amount, stride=amount).scalars | ({"rounds": 2} if name == "elementwise" else {})
    full = kernel.reference(arrays, scalars)
    part = kernel.reference({key: array[:cut] for key, array in arrays.items()}, scalars)
    period = arrays["lut_persistent"].size if name.startswith("reset_data") else 0
    for key, content in part.items():
        if name not in MANY_TO_ONE:
            assert len(content) == min(len(arrays[key]), cut)
        if cut >= period:
            np.testing.assert_array_equal(content, full[key][: len(content)])
