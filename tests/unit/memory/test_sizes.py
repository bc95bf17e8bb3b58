"""Sizes as a user writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_gpumem.memory.buffers import BadBuffer, parse_shape
from pytest_gpumem.units import MiB


@pytest.mark.parametrize(
    ("written", "elements"),
    [(64 * MiB, (16 * MiB,)), ("64 MiB", (16 * MiB,)), ((3, 5), (3, 5)), ([7], (7,)), (np.int64(8), (2,))],
)
def test_bytes_text_and_shapes(written: Any, elements: tuple[int, ...]) -> None:
    assert parse_shape(written, "f4") == (elements, np.dtype("f4"))


@pytest.mark.parametrize("written", [0, -4, 6, "64", "12 lightyears", (), (0,), (2, -1), (1.5,), 1.5, True, None])
def test_what_is_no_size_is_refused_with_its_value(written: Any) -> None:
    with pytest.raises(BadBuffer) as refused:
        parse_shape(written, "f4")
    assert str(written) in str(refused.value)


@pytest.mark.parametrize("dtype", ["float33", object, "S0"])
def test_what_is_no_element_type_is_refused(dtype: Any) -> None:
    with pytest.raises(BadBuffer, match="dtype"):
        parse_shape(64, dtype)
