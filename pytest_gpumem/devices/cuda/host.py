"""The host's side: NumPy arrays over raw memory, how much memory the host has, and on which NUMA
node new memory comes to lie."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Allocation, Unsupported


def array(allocation: Allocation, dtype: str, size: int) -> Any:
    """A one-dimensional NumPy array over memory that the host sees; valid until the memory is
    freed.
    Raises `Unsupported`: device memory.
    """
    if not allocation.host_address:
        raise Unsupported(f"NumPy cannot see {allocation.kind.value} memory")
    memory: Any = (ctypes.c_ubyte * allocation.nbytes).from_address(allocation.host_address)
    return np.frombuffer(memory, dtype=dtype, count=size)


def total_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM that this process may use: the machine's, or the limit of a control group that
    it is in if that is less."""
    return min([_meminfo(proc, "MemTotal"), *(limit for limit, _ in _limits(proc, cgroup))])


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new allocations of the host can take without swapping: of the machine, and of the
    control groups if these are tighter."""
    return max(
        0, min([_meminfo(proc, "MemAvailable"), *(left for _, left in _limits(proc, cgroup))])
    )


def _meminfo(proc: Path, name: str) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def _limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """The limit in bytes of each control group (version 2) that this process is in, and what is
    left of it: of its job, such as one of Slurm, and of the groups around it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    job = cgroup / next(
        (line.removeprefix("0::/") for line in lines if line.startswith("0::/")), ""
    )
    for group in (job, *job.parents):
        with suppress(OSError):  # no memory controller, or another mount than this process's
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            counters = dict(
                line.split() for line in (group / "memory.stat").read_text().splitlines()
            )
            if limit != "max":
                # File pages that were not used lately are given back on demand.
                yield int(limit), int(limit) - used + int(counters.get("inactive_file", 0))
        if group == cgroup:
            return


_NODES = Path("/sys/devices/system/node")


def nodes(system: Path = _NODES) -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node of the host, by its number; empty where the host does not say."""
    cpus = {}
    for folder in sorted(system.glob("node[0-9]*")):
        try:
            cpus[int(folder.name.removeprefix("node"))] = _cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return cpus


def _cpus(listed: str) -> frozenset[int]:
    """CPUs of a list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for piece in listed.strip().split(","):
        if piece:
            first, _, last = piece.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


@contextmanager
def on_node(node: int | None, nearest: int | None, system: Path = _NODES) -> Iterator[int | None]:
    """Run this thread on the CPUs of a NUMA node inside the block; its affinity is put back after
    it.

    The kernel gives a page from the node of the CPU that touches it first, and page-locking touches
    (Linux, numa(7), "local allocation").
    `node`: asked for; None: `nearest`, if this thread may run there at all.
    `nearest`: the node that the device is attached to; None where it is not known.
    `system`: where the host describes its nodes.
    Gives the node, or None where the thread runs as before.
    Raises `Unsupported`: the node is not there, or none of its CPUs is this process's to use.
    """
    there = nodes(system)
    wanted = nearest if node is None else node
    if node is not None and node not in there:
        known = ", ".join(map(str, there)) or "none that it names"
        raise Unsupported(f"numa={node}: the host has no such NUMA node; it has: {known}")
    if wanted is None or wanted not in there or not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    cpus = before & there[wanted]
    if not cpus:
        if node is not None:
            raise Unsupported(
                f"numa={node}: none of the CPUs of that NUMA node is this process's to run on"
            )
        yield None
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield wanted
    finally:
        os.sched_setaffinity(0, before)
