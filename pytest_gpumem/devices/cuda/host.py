"""The host's side: NumPy arrays over raw memory, and how much memory the host can still give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cupy.cuda import PinnedMemoryPointer

from pytest_gpumem.devices.protocol import Allocation, Unsupported

PINNED_SHARE = 0.5
"""Most of the available memory that may be page-locked: locked pages cannot be swapped, and a host without free pages stalls."""


@dataclass(frozen=True)
class _Range:
    """Memory that somebody else owns, in the form that CuPy's buffer-protocol pointer wants."""

    ptr: int
    size: int


def array(allocation: Allocation, dtype: str, size: int) -> Any:
    """A one-dimensional NumPy array over memory that the host sees; valid until the memory is freed.

    Raises:
        Unsupported: device memory.
    """
    if not allocation.host_address:
        raise Unsupported(f"NumPy cannot see {allocation.kind.value} memory")
    pointer = PinnedMemoryPointer(_Range(allocation.host_address, allocation.nbytes), 0)
    return np.frombuffer(pointer, dtype=dtype, count=size)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new allocations of the host can take without swapping: of the machine, and of the control group if that is tighter."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:  # no control group of version 2, or none with a memory controller
        return machine
    if limit == "max":
        return machine
    # File pages that were not used lately are given back on demand.
    return max(0, min(machine, int(limit) - used + int(counters.get("inactive_file", 0))))
