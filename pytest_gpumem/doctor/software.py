"""Checks of packages and tools: the installed version, or the features that are lost without it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gpumem.doctor.gpu import INSTALL
from pytest_gpumem.doctor.machine import Machine
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.kernels import sources
from pytest_gpumem.nsight.tools import COUNTERS_DOCUMENT, NCU, NSYS, Tool, ToolMissing
from pytest_gpumem.records.device import DeviceFacts

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Distributions of CuPy: wheels for two CUDA majors, and a build from source or conda."""
GUESTS = (("PyTorch", "torch"), ("Triton", "triton"), ("Numba", "numba"))
"""Libraries whose code can be measured, with their distributions."""


def packages(machine: Machine, facts: DeviceFacts | None) -> Iterator[Check]:
    """Checks of the packages that pip installs."""
    yield _cupy(machine)
    yield _package(machine, "CUDA bindings", "cuda-bindings", Status.FAILURE, "no GPU can be used without it", INSTALL)
    yield _package(machine, "NVML", "nvidia-ml-py", Status.WARNING, "no clocks, throttle reasons and ECC", "pip install nvidia-ml-py")
    yield _kernels(machine)
    yield _package(
        machine, "pytest-benchmark", "pytest-benchmark", Status.FAILURE, "nothing can be measured or stored", "pip install pytest-benchmark"
    )
    remedy = "pip install nvtx (there is no wheel for macOS)"
    yield _package(machine, "NVTX", "nvtx", Status.WARNING, "no named ranges in Nsight tools", remedy)
    yield _cupti(machine, facts)
    for name, distribution in GUESTS:
        version = machine.version(distribution)
        yield Check(name, Status.OK, version if version else f"not installed: {name} code cannot be measured here")


def tools(machine: Machine, facts: DeviceFacts | None) -> Iterator[Check]:
    """Checks of the Nsight tools and of the permission to read hardware counters."""
    yield _profiler(machine, NSYS, "no profiles with Nsight Systems")
    yield _profiler(machine, NCU, "no profiles with Nsight Compute, no counted traffic")
    if facts is not None:
        yield _counters(machine)


def _cupy(machine: Machine) -> Check:
    found = {name: version for name in CUPY if (version := machine.version(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("CuPy", Status.FAILURE, "no GPU can be used without it", INSTALL)
    if len(found) > 1:
        return Check("CuPy", Status.WARNING, f"{listed} overwrite each other", "uninstall all of them and install one")
    return Check("CuPy", Status.OK, listed)


def _package(machine: Machine, name: str, distribution: str, without: Status, lost: str, remedy: str) -> Check:
    version = machine.version(distribution)
    return Check(name, without, lost, remedy) if version is None else Check(name, Status.OK, f"{distribution} {version}")


def _kernels(machine: Machine) -> Check:
    try:
        folder = machine.kernels()
    except sources.SourceMissing as missing:
        return Check("kernels", Status.FAILURE, str(missing), "pip install --force-reinstall pytest-gpumem")
    count = len(list(folder.glob("*.cu")))
    return Check("kernels", Status.OK, f"{count} source files in {folder}")


def _cupti(machine: Machine, facts: DeviceFacts | None) -> Check:
    check = _package(
        machine,
        "CUPTI",
        "cupti-python",
        Status.WARNING,
        "page faults and migrations cannot be counted in a run",
        "pip install 'pytest-gpumem[cupti]'",
    )
    major = facts.cuda.partition(".")[0] if facts is not None and facts.cuda else None
    version = machine.version("cupti-python")
    if major is not None and version is not None and version.partition(".")[0] != major:
        detail = f"{check.detail} is of another major version than CUDA {facts.cuda if facts else ''}"
        return Check("CUPTI", Status.WARNING, detail, f"pip install 'cupti-python=={major}.*'")
    return check


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
