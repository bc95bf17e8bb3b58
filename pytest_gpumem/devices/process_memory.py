"""This process's memory as Linux reports it. On other systems all results are None."""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def is_mapped(address: int, proc: Path = _SELF) -> bool | None:
    """True if an address lies in memory that this process has mapped (proc(5), /proc/pid/maps)."""
    mapping = _mapping(address, proc)
    # Address space that a driver has reserved and that nobody can read is no memory yet.
    return None if mapping is None else mapping.partition(" ")[2].startswith("r")


def is_of_a_driver(address: int, proc: Path = _SELF) -> bool | None:
    """True if a driver made the memory at an address: it is mapped from a device file."""
    mapping = _mapping(address, proc)
    return None if mapping is None else "/dev/" in mapping


def _mapping(address: int, proc: Path) -> str | None:
    """The line of /proc/self/maps for an address; empty if the address is not mapped, None if there
    is no such file."""
    try:
        lines = (proc / "maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        first, _, last = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line
    return ""
