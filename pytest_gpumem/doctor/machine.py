"""The queries that an examination makes, so that a test can answer them; and the check of page-locked memory."""

from __future__ import annotations

import os
import shutil
import sys
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
from pytest_gpumem.runs.child import run
from pytest_gpumem.units import GiB, format_bytes

TRIAL_SECONDS = 60
"""How long a library may take to launch one kernel."""


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
        return device.l2.set_aside()
    finally:
        device.close()


def _fails(program: str) -> str | None:
    alarmed = f"import signal; getattr(signal, 'alarm', int)({TRIAL_SECONDS})\n{program}"
    try:
        done = run([sys.executable, "-c", alarmed], os.environ, lambda line: None)
    except OSError as error:
        return str(error)
    if done.exit_code == 0:
        return None
    return next((line.strip() for line in reversed(done.output.splitlines()) if line.strip()), done.how)


def _lockable() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Machine:
    """A machine. The defaults query this one."""

    choose: Callable[[str], opening.Chosen] = opening.choose
    wanted: Callable[[], str] = lambda: os.environ.get("GPUMEM_DEVICE", "")
    """The device in GPUMEM_DEVICE; empty if the variable is not set."""
    look: Callable[[str | None], Card] = opening.look
    """State of the card at a PCI bus id, or of the first one; raises `NoDevice`."""
    set_aside: Callable[[opening.Chosen], int] = _set_aside
    """Set-aside of a device in bytes; queried under MPS only, because it needs a context."""
    version: Callable[[str], str | None] = _version
    """Version of an installed distribution, without importing it."""
    which: Callable[[str], str | None] = shutil.which
    tool: Callable[[Tool], Path] = _tool
    """Path of a profiler, found as the commands that run it find it; raises `ToolMissing`."""
    fails: Callable[[str], str | None] = _fails
    """The last line that a Python program printed, if it failed in a process of its own; None if it ran."""
    read: Callable[[str], str | None] = _read
    """Text of a file, or None."""
    kernels: Callable[[], Path] = sources.folder
    administrator: Callable[[], bool] = lambda: hasattr(os, "geteuid") and os.geteuid() == 0
    lockable: Callable[[], int | None] = _lockable
    """Bytes that a process may lock into RAM (RLIMIT_MEMLOCK); None without a limit."""


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory limit of a control group, version 2 and version 1."""
LEAST_FREE = GiB
"""Free RAM in bytes below which a transfer benchmark of usual size exhausts the host."""


def pinned(machine: Machine) -> Check:
    """Limits of page-locked memory."""
    fields = dict(line.split(":", 1) for line in (machine.read("/proc/meminfo") or "").splitlines() if ":" in line)
    total, free = (_kib(fields.get(name)) for name in ("MemTotal", "MemAvailable"))
    if total is None:
        return Check("pinned memory", Status.OK, "the size of the RAM is unknown")
    details = [f"{_gib(total)} of RAM"]
    group = _group(machine)
    if group is not None and group < total:
        details.append(f"the control group has {_gib(group)} of it")
        total = group
    if free is not None:
        details.append(f"{_gib(min(free, total))} free")
    lockable = machine.lockable()
    details.append(f"RLIMIT_MEMLOCK {format_bytes(lockable) if lockable is not None else 'unlimited'}")
    detail = f"buffers may lock {_gib(DEFAULT_SHARE * total)} ({', '.join(details)})"
    if free is not None and min(free, total) < LEAST_FREE:
        return Check("pinned memory", Status.WARNING, detail, "free some, or give the container more: locked pages cannot be swapped")
    return Check("pinned memory", Status.OK, detail)


def _kib(field: str | None) -> int | None:
    words = (field or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _group(machine: Machine) -> int | None:
    for path in LIMITS:
        limit = (machine.read(path) or "").strip()
        if limit.isdigit():
            return int(limit)
    return None


def _gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.1f} GiB"
