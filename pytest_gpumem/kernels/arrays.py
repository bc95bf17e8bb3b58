"""What references need to be written once for NumPy and CuPy: neither is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of one module, by parameter name."""

Scalars: TypeAlias = Mapping[str, int | float]
"""Scalars by parameter name."""

Reference: TypeAlias = Callable[[Arrays, Scalars], Mapping[str, Any]]
"""What `Kernel.reference` is."""


def module_of(array: Any) -> Any:
    """The module that an array comes from, `numpy` or `cupy`: the array exists, so it has been imported."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def element(value: int | float, array: Any) -> Any:
    """A scalar in an array's element type, as the kernel gets it."""
    return array.dtype.type(value)


def filled_like(array: Any, value: int | float) -> Any:
    """A new array of the same size and type, filled with one value."""
    return module_of(array).full(array.shape, element(value, array), dtype=array.dtype)
