"""The questions that an examination asks a machine, so that a test can answer them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pytest_gpumem.devices import opening
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.kernels import sources
from pytest_gpumem.memory.pinned import DEFAULT_SHARE
from pytest_gpumem.nsight.tools import Tool, find
from pytest_gpumem.records.device import Card
from pytest_gpumem.units import GiB, format_bytes


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _tool(wanted: Tool) -> Path:
    return find(wanted, os.environ)


def _set_aside(chosen: opening.Chosen) -> int:
    device = chosen.open()
    try:
        return device.set_aside()
    finally:
        device.close()


def _lockable() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Machine:
    """A machine. The defaults ask this one."""

    choose: Callable[[str], opening.Chosen] = opening.choose
    wanted: Callable[[], str] = lambda: os.environ.get("GPUMEM_DEVICE", "")
    """The device that the environment asks for, empty where it does not."""
    look: Callable[[str | None], Card] = opening.look
    """State of the card at a PCI bus id, or of the first one; raises `NoDevice`."""
    set_aside: Callable[[opening.Chosen], int] = _set_aside
    """Bytes of L2 that are set aside on a device; asked under MPS only, because it needs a context."""
    version: Callable[[str], str | None] = _version
    """Version of an installed distribution. CUDA packages are not imported to ask them."""
    which: Callable[[str], str | None] = shutil.which
    tool: Callable[[Tool], Path] = _tool
    """A profiler where the commands that run it find it; raises `ToolMissing`."""
    read: Callable[[str], str | None] = _read
    """Text of a file, or None."""
    kernels: Callable[[], Path] = sources.folder
    administrator: Callable[[], bool] = lambda: hasattr(os, "geteuid") and os.geteuid() == 0
    lockable: Callable[[], int | None] = _lockable
    """Bytes that a process may lock into RAM (RLIMIT_MEMLOCK); None without a limit."""


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a control group of version 2 and of version 1 says how much memory it has."""
LEAST_FREE = GiB
"""Bytes of free RAM below which a transfer benchmark of usual sizes drives the host to its limit."""


def pinned(machine: Machine) -> Check:
    """Limits of page-locked memory."""
    fields = dict(line.split(":", 1) for line in (machine.read("/proc/meminfo") or "").splitlines() if ":" in line)
    total, free = (_kib(fields.get(name)) for name in ("MemTotal", "MemAvailable"))
    if total is None:
        return Check("pinned memory", Status.OK, "the host does not say how much RAM it has")
    said = [f"{_gib(total)} of RAM"]
    group = _group(machine)
    if group is not None and group < total:
        said.append(f"the control group has {_gib(group)} of it")
        total = group
    if free is not None:
        said.append(f"{_gib(min(free, total))} free")
    lockable = machine.lockable()
    said.append(f"RLIMIT_MEMLOCK {format_bytes(lockable) if lockable is not None else 'unlimited'}")
    detail = f"buffers may lock {_gib(DEFAULT_SHARE * total)} ({', '.join(said)})"
    if free is not None and min(free, total) < LEAST_FREE:
        return Check("pinned memory", Status.WARNING, detail, "free some, or give the container more: locked pages cannot be swapped")
    return Check("pinned memory", Status.OK, detail)


def _kib(field: str | None) -> int | None:
    words = (field or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _group(machine: Machine) -> int | None:
    for path in LIMITS:
        said = (machine.read(path) or "").strip()
        if said.isdigit():
            return int(said)
    return None


def _gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.1f} GiB"
