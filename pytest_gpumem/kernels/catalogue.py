"""Every kernel that ships, by name: each module here is of a source file in `kernels/`."""

from __future__ import annotations

from types import MappingProxyType

from pytest_gpumem.kernels import (
    access_pattern,
    l2_bandwidth,
    l2_persistence,
    latency,
    stream,
    transfers,
    transpose,
    unified_memory,
)
from pytest_gpumem.kernels.kernel import Kernel

_MODULES = (
    stream,
    l2_persistence,
    l2_bandwidth,
    unified_memory,
    access_pattern,
    transpose,
    latency,
    transfers,
)

_KERNELS: dict[str, Kernel] = {}
for _module in _MODULES:
    for _kernel in _module.KERNELS:
        _KERNELS[_kernel.name] = _kernel
CATALOGUE = MappingProxyType(_KERNELS)
"""The catalogue: name to kernel."""
