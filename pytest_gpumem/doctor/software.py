"""Checks of packages and tools: the installed version, or the features that are lost without it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gpumem.doctor.machine import Machine
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.kernels import sources
from pytest_gpumem.nsight.tools import COUNTERS_DOCUMENT, NCU, NSYS, Tool, ToolMissing
from pytest_gpumem.records.device import Card, DeviceFacts

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
    yield _of_major(machine, "CUDA bindings", "cuda-bindings", major, "cuda", Status.FAILURE, "no GPU can be used without it")
    yield _package(machine, "NVML", "nvidia-ml-py", Status.WARNING, "no clocks, throttle reasons and ECC", "pip install nvidia-ml-py")
    yield _kernels(machine)
    yield _benchmark(machine)
    remedy = "pip install nvtx (there is no wheel for macOS)"
    yield _package(machine, "NVTX", "nvtx", Status.WARNING, "no named ranges in Nsight tools", remedy)
    lost = "page faults and migrations cannot be counted in a run"
    yield _of_major(machine, "CUPTI", "cupti-python", major, "cupti", Status.WARNING, lost)
    for name, distribution, program in GUESTS:
        yield _guest(machine, name, distribution, program if facts is not None else None)


def tools(machine: Machine, facts: DeviceFacts | None) -> Iterator[Check]:
    """Checks of the Nsight tools and of the permission to read hardware counters."""
    yield _profiler(machine, NSYS, "no profiles with Nsight Systems")
    yield _profiler(machine, NCU, "no profiles with Nsight Compute, no counted traffic")
    if facts is not None:
        yield _counters(machine)


def _benchmark(machine: Machine) -> Check:
    check = _package(
        machine, "pytest-benchmark", "pytest-benchmark", Status.FAILURE, "nothing can be measured or stored", "pip install pytest-benchmark"
    )
    version, of_pytest = machine.version("pytest-benchmark"), machine.version("pytest")
    if version is None or of_pytest is None or _release(of_pytest) < (9, 2) or _release(version) >= (5, 3):
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


def _guest(machine: Machine, name: str, distribution: str, program: str | None) -> Check:
    """Whether a library is there and, with a GPU, launches a kernel: versions that do not go together fail at the first launch only."""
    version = machine.version(distribution)
    if version is None:
        return Check(name, Status.OK, f"not installed: {name} code cannot be measured here")
    if program is not None and (reason := machine.fails(program)) is not None:
        remedy = f"install versions of {distribution} and of what it needs that go together, such as NumPy"
        return Check(name, Status.WARNING, f"{version} launches no kernel: {reason}", remedy)
    return Check(name, Status.OK, version)


def _cupy(machine: Machine, supported: int | None) -> Check:
    found = {name: version for name in CUPY if (version := machine.version(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("CuPy", Status.FAILURE, "no GPU can be used without it", _install("cuda", supported))
    remedy = f"pip uninstall -y {' '.join(found)}; {_install('cuda', supported)}"
    if len(found) > 1:
        return Check("CuPy", Status.WARNING, f"{listed} overwrite each other", remedy)
    major = CUPY[next(iter(found))]
    if major is not None and supported is not None and supported < major:
        return Check("CuPy", Status.FAILURE, f"{listed} needs a driver for CUDA {major}; this one supports CUDA {supported}", remedy)
    return Check("CuPy", Status.OK, listed)


def _of_major(machine: Machine, name: str, distribution: str, major: int | None, extra: str, without: Status, lost: str) -> Check:
    """Check of a package that has to be of CuPy's major version of CUDA."""
    check = _package(machine, name, distribution, without, lost, _install(extra, major))
    version = machine.version(distribution)
    if major is not None and version is not None and version.partition(".")[0] != str(major):
        return Check(name, Status.WARNING, f"{check.detail} is not for CUDA {major}, which CuPy uses", _install(extra, major))
    return check


def _package(machine: Machine, name: str, distribution: str, without: Status, lost: str, remedy: str) -> Check:
    version = machine.version(distribution)
    return Check(name, without, lost, remedy) if version is None else Check(name, Status.OK, f"{distribution} {version}")


def _kernels(machine: Machine) -> Check:
    try:
        folder = machine.kernels()
    except sources.SourceMissing as missing:
        return Check("kernels", Status.FAILURE, str(missing), "pip install --force-reinstall --no-deps pytest-gpumem")
    count = len(list(folder.glob("*.cu")))
    return Check("kernels", Status.OK, f"{count} source files in {folder}")


def _profiler(machine: Machine, tool: Tool, lost: str) -> Check:
    name = tool.program
    try:
        found = machine.tool(tool)
    except ToolMissing as missing:
        what, _, remedy = str(missing).partition(": ")
        remedy = remedy or f"install {tool.title} ({tool.source}), or correct {tool.variable}"
        return Check(name, Status.WARNING, f"{lost}: {what}", remedy, missing=True)
    if machine.which(name):
        return Check(name, Status.OK, str(found))
    return Check(name, Status.WARNING, f"{found} is not on PATH", f'export PATH="{found.parent}:$PATH"')


def _counters(machine: Machine) -> Check:
    parameters = machine.read("/proc/driver/nvidia/params") or ""
    restricted = re.search(r"^RmProfilingAdminOnly:\s*([01])", parameters, re.MULTILINE)
    remedy = f"load the module with NVreg_RestrictProfilingToAdminUsers=0, or measure as root: {COUNTERS_DOCUMENT}"
    if machine.administrator():
        return Check("counters", Status.OK, "this user is root, who may read hardware counters unless a container withholds SYS_ADMIN")
    if restricted is None:
        return Check("counters", Status.WARNING, "unknown: the driver does not say who may read hardware counters", remedy)
    if restricted[1] == "1":
        return Check("counters", Status.WARNING, "hardware counters are for administrators only: ncu fails", remedy)
    return Check("counters", Status.OK, "this user may read hardware counters")
