"""The questions that an examination asks a machine, so that a test can answer them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pytest_gpumem.devices import opening
from pytest_gpumem.kernels import sources
from pytest_gpumem.nsight.tools import Tool, find
from pytest_gpumem.records.card import Card


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
