"""The queries that an examination makes, so that a test can answer them; and the checks of page-locked memory, packages and tools."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pytest_gpumem.devices import opening
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.kernels import sources
from pytest_gpumem.memory.pinned import SHARE
from pytest_gpumem.nsight.tools import COUNTERS_DOCUMENT, NCU, NSYS, Tool, ToolMissing, find
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.runs.child import run
from pytest_gpumem.units import GiB, short_bytes

TRIAL_SECONDS = 60  # how long a library may take to launch one kernel


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


def _set_aside(chosen: opening.DeviceChoice) -> int:
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
    return next(
        (line.strip() for line in reversed(done.output.splitlines()) if line.strip()), done.how
    )


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

    choose: Callable[[str], opening.DeviceChoice] = opening.choose
    wanted: Callable[[], str] = lambda: os.environ.get(
        "GPUMEM_DEVICE", ""
    )  # the device in GPUMEM_DEVICE; empty if the variable is not set
    look: Callable[[str | None], Card] = opening.look
    """State of the card at a PCI bus id, or of the first one; raises `NoDevice`."""
    set_aside: Callable[[opening.DeviceChoice], int] = _set_aside
    """Set-aside of a device in bytes; queried under MPS only, because it needs a context."""
    version: Callable[[str], str | None] = _version
    """Version of an installed distribution, without importing it."""
    which: Callable[[str], str | None] = shutil.which
    tool: Callable[[Tool], Path] = lambda wanted: find(wanted, os.environ)
    """Path of a profiler, found as the commands that run it find it; raises `ToolMissing`."""
    fails: Callable[[str], str | None] = _fails
    """The last line that a Python program printed, if it failed in a process of its own; None if it ran."""
    read: Callable[[str], str | None] = _read  # text of a file, or None
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
    fields = dict(
        line.split(":", 1)
        for line in (machine.read("/proc/meminfo") or "").splitlines()
        if ":" in line
    )
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
    details.append(
        f"RLIMIT_MEMLOCK {short_bytes(lockable) if lockable is not None else 'unlimited'}"
    )
    detail = f"buffers may lock {_gib(SHARE * total)} ({', '.join(details)})"
    if free is not None and min(free, total) < LEAST_FREE:
        return Check(
            "pinned memory",
            Status.WARNING,
            detail,
            "free some, or give the container more: locked pages cannot be swapped",
        )
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


CUPY = {"cupy-cuda13x": 13, "cupy-cuda12x": 12, "cupy": None}
"""Distributions of CuPy with the major version of their CUDA: wheels, and a build from source or conda for any."""
_TORCH = "import torch\nassert torch.zeros(2, device='cuda').add_(1).sum().item() == 2"
_TRITON = "import triton.language"  # it launches through PyTorch, which is tried itself
_NUMBA = """
import warnings
import numpy
from numba import cuda
warnings.simplefilter("ignore")
@cuda.jit
def add(x):
    x[0] += 1
x = cuda.to_device(numpy.ones(1))
add[1, 1](x)
assert x.copy_to_host()[0] == 2
"""
GUESTS = (("PyTorch", "torch", _TORCH), ("Triton", "triton", _TRITON), ("Numba", "numba", _NUMBA))
"""Libraries whose code can be measured, with their distributions and a program that launches a kernel."""


def packages(machine: Machine, facts: DeviceFacts | None, card: Card | None) -> Iterator[Check]:
    """Checks of the packages that pip installs."""
    supported = card.cuda[0] if card is not None and card.cuda is not None else None
    cupy = _cupy(machine, supported)
    yield cupy
    # CuPy decides which CUDA the others have to be of; without one, the driver.
    built = [major for name, major in CUPY.items() if machine.version(name) is not None]
    ours = int(facts.cuda.partition(".")[0]) if facts is not None and facts.cuda else None
    major = (built[0] if len(built) == 1 else None) or ours or supported
    yield _of_major(
        machine,
        "CUDA bindings",
        "cuda-bindings",
        major,
        "cuda",
        Status.FAILURE,
        "no GPU can be used without it",
    )
    yield _package(
        machine,
        "NVML",
        "nvidia-ml-py",
        Status.WARNING,
        "no clocks, throttle reasons and ECC",
        "pip install nvidia-ml-py",
    )
    yield _kernels(machine)
    yield _benchmark(machine)
    remedy = "pip install nvtx (there is no wheel for macOS)"
    yield _package(
        machine, "NVTX", "nvtx", Status.WARNING, "no named ranges in Nsight tools", remedy
    )
    lost = "page faults, migrations and calls are not counted, and limits on the peak of memory are UNDECIDED"
    yield _of_major(machine, "CUPTI", "cupti-python", major, "cupti", Status.WARNING, lost)
    for name, distribution, program in GUESTS:
        if (version := machine.version(distribution)) is not None:
            yield _guest(
                machine, name, distribution, version, program if facts is not None else None
            )


def tools(machine: Machine, facts: DeviceFacts | None) -> Iterator[Check]:
    """Checks of the Nsight tools and of the permission to read hardware counters."""
    yield _profiler(machine, NSYS, "no profiles with Nsight Systems")
    yield _profiler(machine, NCU, "no profiles with Nsight Compute, no counted traffic")
    if facts is not None:
        yield _counters(machine)


def _benchmark(machine: Machine) -> Check:
    check = _package(
        machine,
        "pytest-benchmark",
        "pytest-benchmark",
        Status.FAILURE,
        "nothing can be measured or stored",
        "pip install pytest-benchmark",
    )
    version, of_pytest = machine.version("pytest-benchmark"), machine.version("pytest")
    if (
        version is None
        or of_pytest is None
        or _release(of_pytest) < (9, 2)
        or _release(version) >= (5, 3)
    ):
        return check
    why = f"{version} does not work with pytest {of_pytest}, whatever the plugin; pytest-benchmark 5.3 does"
    return Check("pytest-benchmark", Status.FAILURE, why, "pip install 'pytest-benchmark>=5.3'")


def _release(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _install(extra: str, major: int | None) -> str:
    """The command that installs an extra for a major version of CUDA; None if the version is unknown."""
    if major is None:
        return f"pip install 'pytest-gpumem[{extra}13]' (driver 580 or newer) or 'pytest-gpumem[{extra}12]'"
    return f"pip install 'pytest-gpumem[{extra}{min(max(major, 12), 13)}]'"


def _guest(
    machine: Machine, name: str, distribution: str, version: str, program: str | None
) -> Check:
    """Whether a library that is installed launches a kernel, with a GPU: versions that do not go together fail at the first launch only."""
    if program is not None and (reason := machine.fails(program)) is not None:
        remedy = f"install versions of {distribution} and of what it needs that go together, such as NumPy"
        return Check(name, Status.WARNING, f"{version} launches no kernel: {reason}", remedy)
    return Check(name, Status.OK, version)


def _cupy(machine: Machine, supported: int | None) -> Check:
    found = {name: version for name in CUPY if (version := machine.version(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check(
            "CuPy", Status.FAILURE, "no GPU can be used without it", _install("cuda", supported)
        )
    remedy = f"pip uninstall -y {' '.join(found)}; {_install('cuda', supported)}"
    if len(found) > 1:
        return Check("CuPy", Status.WARNING, f"{listed} overwrite each other", remedy)
    major = CUPY[next(iter(found))]
    if major is not None and supported is not None and supported < major:
        return Check(
            "CuPy",
            Status.FAILURE,
            f"{listed} needs a driver for CUDA {major}; this one supports CUDA {supported}",
            remedy,
        )
    return Check("CuPy", Status.OK, listed)


def _of_major(
    machine: Machine,
    name: str,
    distribution: str,
    major: int | None,
    extra: str,
    without: Status,
    lost: str,
) -> Check:
    """Check of a package that has to be of CuPy's major version of CUDA."""
    check = _package(machine, name, distribution, without, lost, _install(extra, major))
    version = machine.version(distribution)
    if major is not None and version is not None and version.partition(".")[0] != str(major):
        return Check(
            name,
            Status.WARNING,
            f"{check.detail} is not for CUDA {major}, which CuPy uses",
            _install(extra, major),
        )
    return check


def _package(
    machine: Machine, name: str, distribution: str, without: Status, lost: str, remedy: str
) -> Check:
    version = machine.version(distribution)
    return (
        Check(name, without, lost, remedy)
        if version is None
        else Check(name, Status.OK, f"{distribution} {version}")
    )


def _kernels(machine: Machine) -> Check:
    try:
        folder = machine.kernels()
    except sources.SourceMissing as missing:
        return Check(
            "kernels",
            Status.FAILURE,
            str(missing),
            "pip install --force-reinstall --no-deps pytest-gpumem",
        )
    count = len(list(folder.glob("*.cu")))
    return Check("kernels", Status.OK, f"{count} source files in {folder}")


def _profiler(machine: Machine, tool: Tool, lost: str) -> Check:
    name = tool.program
    try:
        found = machine.tool(tool)
    except ToolMissing as missing:
        what, _, remedy = str(missing).partition("; looked on")[0].partition(": ")
        remedy = remedy or f"install {tool.title} ({tool.source}), or correct {tool.variable}"
        return Check(name, Status.WARNING, f"{lost}: {what}", remedy, missing=True)
    if machine.which(name):
        return Check(name, Status.OK, str(found))
    return Check(
        name, Status.WARNING, f"{found} is not on PATH", f'export PATH="{found.parent}:$PATH"'
    )


def _counters(machine: Machine) -> Check:
    parameters = machine.read("/proc/driver/nvidia/params") or ""
    restricted = re.search(r"^RmProfilingAdminOnly:\s*([01])", parameters, re.MULTILINE)
    remedy = f"load the module with NVreg_RestrictProfilingToAdminUsers=0, or measure as root: {COUNTERS_DOCUMENT}"
    if machine.administrator():
        return Check(
            "counters",
            Status.OK,
            "this user is root, who may read hardware counters unless a container withholds SYS_ADMIN",
        )
    if restricted is None:
        return Check(
            "counters",
            Status.WARNING,
            "unknown: the driver does not say who may read hardware counters",
            remedy,
        )
    if restricted[1] == "1":
        return Check(
            "counters",
            Status.WARNING,
            "hardware counters are for administrators only: ncu fails",
            remedy,
        )
    return Check("counters", Status.OK, "this user may read hardware counters")
