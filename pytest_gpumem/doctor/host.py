"""The host: how much memory may be page-locked."""

from __future__ import annotations

from pytest_gpumem.doctor.machine import Machine
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.memory.pinned import DEFAULT_SHARE
from pytest_gpumem.units import GiB, format_bytes

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
