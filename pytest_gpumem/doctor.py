"""What this machine can measure, and what is missing for the rest. Looks only: runs nothing.

No CUDA context is created but under MPS, where only a context can be asked how much of L2 the server has set aside.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.persistence import fixed_by_mps, unsupported
from pytest_gpumem.kernels import sources
from pytest_gpumem.memory.managed import no_migration
from pytest_gpumem.nsight.ncu import COUNTERS_DOCUMENT
from pytest_gpumem.nsight.tools import ToolMissing, find_ncu
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import format_bytes, format_rate

INSTALL = "pip install 'pytest-gpumem[cuda13]' (driver 580 or newer) or 'pytest-gpumem[cuda12]'"
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Distributions of CuPy: the wheels of two CUDA majors, and a build from source or conda."""

NSYS = ("/opt/nvidia/nsight-systems/*/bin/nsys", "/usr/local/cuda/bin/nsys")
"""Where installers put Nsight Systems."""


class Status(str, Enum):
    OK = "OK"
    WARNING = "warning"
    """It works, with a restriction."""
    MISSING = "missing"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    """What was found, or what cannot be done without it."""
    remedy: str = ""
    """What to do about it; empty where nothing is to be done."""


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]
    simulated_only: bool
    """No GPU can be used: every result of this machine is simulated."""
    summary: str
    """One sentence: what this machine can measure."""

    def to_json(self) -> dict[str, object]:
        """The report for programs, schema 1."""
        return {
            "schema": 1,
            "simulated_only": self.simulated_only,
            "summary": self.summary,
            "checks": [{"name": c.name, "status": c.status.value, "detail": c.detail, "remedy": c.remedy} for c in self.checks],
        }


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


def _ncu() -> Path:
    return find_ncu(os.environ)


def _glob(pattern: str) -> list[str]:
    return [str(path) for path in sorted(Path("/").glob(pattern.lstrip("/")))]


def _set_aside(chosen: opening.Chosen) -> int:
    device = chosen.open()
    try:
        return device.set_aside()
    finally:
        device.close()


@dataclass(frozen=True)
class Machine:
    """The questions that the examination asks, so that a test can answer them."""

    choose: Callable[[str], opening.Chosen] = opening.choose
    set_aside: Callable[[opening.Chosen], int] = _set_aside
    """Bytes of L2 that are set aside on a device; asked under MPS only, because it needs a context."""
    version: Callable[[str], str | None] = _version
    """Version of an installed distribution. CUDA packages are not imported to ask them."""
    which: Callable[[str], str | None] = shutil.which
    ncu: Callable[[], Path] = _ncu
    """Nsight Compute where `gpumem traffic` finds it; raises `ToolMissing`."""
    glob: Callable[[str], list[str]] = _glob
    """Paths that match an absolute pattern, in order."""
    read: Callable[[str], str | None] = _read
    """Text of a file, or None."""
    kernels: Callable[[], Path] = sources.folder
    administrator: Callable[[], bool] = lambda: hasattr(os, "geteuid") and os.geteuid() == 0


def examine(machine: Machine | None = None) -> Report:
    """Look at everything; never raises for something that is missing or broken, because that is what it is asked to find."""
    machine = machine or Machine()
    chosen, reason = _gpu(machine)
    facts = chosen.facts if chosen is not None else None
    checks = [
        _driver(machine, facts),
        Check("GPU", Status.OK, _identity(facts)) if facts else Check("GPU", Status.MISSING, reason, "tests run on the simulated device"),
    ]
    if chosen is not None:
        checks += _abilities(machine, chosen)
    checks += [
        _cupy(machine),
        _package(machine, "CUDA bindings", "cuda-bindings", "no GPU can be used without it", INSTALL),
        _package(machine, "NVML", "nvidia-ml-py", "no clocks, throttle reasons and ECC", "pip install nvidia-ml-py"),
        _kernels(machine),
        _package(machine, "pytest-benchmark", "pytest-benchmark", "nothing can be stored", "pip install pytest-benchmark"),
        _package(machine, "NVTX", "nvtx", "no named ranges in Nsight tools", "pip install nvtx (there is no wheel for macOS)"),
        _package(machine, "CUPTI", "cupti-python", "page faults can be counted with nsys only", "pip install 'pytest-gpumem[cupti]'"),
        _nsys(machine),
        _nsight_compute(machine),
    ]
    if facts is not None:
        checks.append(_counters(machine))
    guests = (("PyTorch", "torch"), ("Triton", "triton"), ("Numba", "numba"))
    checks += [_guest(machine, name, distribution) for name, distribution in guests]
    return Report(tuple(checks), facts is None, _summary(facts, checks))


def text(report: Report) -> list[str]:
    """The report for people: a line for each check, and the summary."""
    names = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{check.status.value:<7}  {check.name:<{names}}  {check.detail}{remedy}")
    return [*lines, "", report.summary]


def _gpu(machine: Machine) -> tuple[opening.Chosen | None, str]:
    try:
        return machine.choose("cuda"), ""
    except opening.NoDevice as missing:
        return None, str(missing)
    except Exception as broken:  # a broken CuPy or driver raises anything while it is loaded: that is a finding
        return None, f"looking for a GPU failed with {_in_one_line(broken)}"


def _in_one_line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _driver(machine: Machine, facts: DeviceFacts | None) -> Check:
    if facts is not None:
        return Check("driver", Status.OK, f"{facts.driver or 'version unknown'}, CUDA {facts.cuda or 'unknown'}")
    module = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", machine.read("/proc/driver/nvidia/version") or "")
    if module:
        return Check("driver", Status.WARNING, f"{module[1]} is loaded, but no GPU can be used through it")
    return Check("driver", Status.MISSING, "no NVIDIA driver is loaded", "install the driver; in a container, start it with GPU access")


def _identity(facts: DeviceFacts) -> str:
    link = f", {facts.link}" if facts.link else ""
    return (
        f"{facts.name}, {facts.arch}, {facts.sm_count} SMs, {facts.memory_bytes / 2**30:.1f} GiB, "
        f"L2 {format_bytes(facts.l2_bytes)}, peak {format_rate(facts.peak_bandwidth)}{link}"
    )


def _abilities(machine: Machine, chosen: opening.Chosen) -> list[Check]:
    facts = chosen.facts
    checks = [Check("MIG", Status.OK, f"instance {facts.mig_profile}" if facts.mig_profile else "off")]
    if facts.mps:
        checks.append(Check("MPS", Status.WARNING, "a server runs: its other clients disturb every measurement", "stop it while measuring"))
    else:
        checks.append(Check("MPS", Status.OK, "off"))
    checks.append(Check("ECC", Status.OK, {True: "on", False: "off", None: "the driver does not say"}[facts.ecc]))
    checks.append(_persisting(machine, chosen))
    if (why := no_migration(facts)) is None:
        hosts = "; ATS: host pages are read without a fault" if facts.host_page_tables else ""
        hosts = hosts or ("; HMM: plain malloc memory is visible too" if facts.pageable_memory_access else "")
        checks.append(Check("managed memory", Status.OK, f"pages migrate on demand, prefetch works{hosts}"))
    else:
        checks.append(Check("managed memory", Status.MISSING, f"{why}; tests of managed_buffer and prefetched_buffer skip"))
    return checks


def _persisting(machine: Machine, chosen: opening.Chosen) -> Check:
    facts = chosen.facts
    try:
        reason = unsupported(facts, lambda: machine.set_aside(chosen))
    except Exception as broken:  # a server that is out of order refuses a new context with anything
        reason = fixed_by_mps(f"how much that is cannot be read, {_in_one_line(broken)}")
    if reason is not None:
        return Check("set-aside", Status.MISSING, f"{reason}; tests of persisting_stream skip")
    most, step = format_bytes(facts.persisting_l2_max_bytes), format_bytes(facts.l2_step_bytes)
    window = format_bytes(facts.access_policy_max_window_bytes)
    return Check("set-aside", Status.OK, f"up to {most} of L2 in steps of {step}, windows up to {window}")


def _cupy(machine: Machine) -> Check:
    found = {name: version for name in CUPY if (version := machine.version(name)) is not None}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("CuPy", Status.MISSING, "no GPU can be used without it", INSTALL)
    if len(found) > 1:
        return Check("CuPy", Status.WARNING, f"{listed} overwrite each other", "uninstall all of them and install one")
    return Check("CuPy", Status.OK, listed)


def _package(machine: Machine, name: str, distribution: str, without: str, remedy: str) -> Check:
    version = machine.version(distribution)
    if version is None:
        return Check(name, Status.MISSING, without, remedy)
    return Check(name, Status.OK, f"{distribution} {version}")


def _kernels(machine: Machine) -> Check:
    try:
        folder = machine.kernels()
    except sources.SourceMissing as missing:
        return Check("kernels", Status.MISSING, str(missing))
    count = len(list(folder.glob("*.cu")))
    return Check("kernels", Status.OK, f"{count} source files in {folder}")


def _nsys(machine: Machine) -> Check:
    if path := machine.which("nsys"):
        return Check("nsys", Status.OK, path)
    if elsewhere := [path for pattern in NSYS for path in machine.glob(pattern)]:
        return _beside_the_path("nsys", Path(elsewhere[-1]))
    return Check("nsys", Status.MISSING, "no profiles with Nsight Systems", "install Nsight Systems (part of the CUDA Toolkit)")


def _nsight_compute(machine: Machine) -> Check:
    try:
        ncu = machine.ncu()
    except ToolMissing as missing:
        return Check("ncu", Status.MISSING, f"no profiles with Nsight Compute, no counted traffic: {missing}")
    return Check("ncu", Status.OK, str(ncu)) if machine.which("ncu") else _beside_the_path("ncu", ncu)


def _beside_the_path(command: str, found: Path) -> Check:
    return Check(command, Status.WARNING, f"{found} is not on PATH", f'export PATH="{found.parent}:$PATH"')


def _counters(machine: Machine) -> Check:
    parameters = machine.read("/proc/driver/nvidia/params") or ""
    restricted = re.search(r"^RmProfilingAdminOnly:\s*1", parameters, re.MULTILINE)
    if restricted and not machine.administrator():
        return Check("counters", Status.WARNING, "hardware counters are for administrators only: ncu fails", f"see {COUNTERS_DOCUMENT}")
    if not parameters:
        return Check("counters", Status.WARNING, "the driver does not say who may read hardware counters", f"see {COUNTERS_DOCUMENT}")
    return Check("counters", Status.OK, "this user may read hardware counters")


def _guest(machine: Machine, name: str, distribution: str) -> Check:
    version = machine.version(distribution)
    return Check(name, Status.OK, version) if version else Check(name, Status.MISSING, f"optional: {name} code cannot be measured here")


def _summary(facts: DeviceFacts | None, checks: Sequence[Check]) -> str:
    if facts is None:
        return "This machine can run the suite on the simulated device only: its times come from a model and say nothing about a GPU."
    usable = {check.name for check in checks if check.status is not Status.MISSING}
    can = ["latency and bandwidth"]
    can += [words for name, words in (("set-aside", "L2 persistence"), ("managed memory", "managed memory")) if name in usable]
    listed = ", ".join(can[:-1]) + (" and " if len(can) > 1 else "") + can[-1]
    tools = [tool for tool in ("nsys", "ncu") if tool in usable]
    profiled = f", and its tests can be profiled with {' and '.join(tools)}" if tools else ""
    return f"This machine can measure {listed} on {facts.name}{profiled}."
