"""Examines what this machine can measure, what is missing, and what else uses the GPU.

It runs no kernel and creates no CUDA context.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from msgspec import to_builtins

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.memory.managed import no_migration
from pytest_gpumem.nsight import tools
from pytest_gpumem.options import device_choice
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.reporting.terminal import device_text, hanging, wrapped
from pytest_gpumem.units import QuantityError, short_bytes

SCHEMA = 3  # of the JSON's layout


Status = Literal["OK", "warning", "failure"]
OK: Final = "OK"
WARNING: Final = "warning"  # it works with a restriction, or few features need what is missing
FAILURE: Final = "failure"  # until this is repaired, a GPU cannot be measured reliably

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # distributions of CuPy; the last one of any CUDA
PACKAGES: tuple[tuple[str, str, Status, str], ...] = (
    ("cuda-bindings", "cuda", FAILURE, "no GPU can be used without it"),
    ("cupti-python", "cupti", WARNING, "page faults, migrations and peaks are not counted"),
    ("nvidia-ml-py", "", WARNING, "no clocks, throttle reasons and other processes"),
    ("nvtx", "", WARNING, "no named ranges in Nsight's tools"),
)
"""Distribution, our extra for each CUDA, status without it, and what is lost."""
COUNTERS = Path("/proc/driver/nvidia/params")  # says who may read hardware counters
_UNKNOWN = "the driver does not say"


@dataclass(frozen=True)
class Fact:
    """What this machine has, or lacks."""

    name: str
    status: Status
    detail: str  # the state, or the features that are lost
    remedy: str = ""  # what repairs it; empty if the status is OK


def gpu_checks(
    facts: DeviceFacts | None, reason: str, card: Card | None, unseen: str
) -> Iterator[Fact]:
    """Checks of the GPU. `facts`: as CUDA has it; if None, `reason` says why. `card`: as NVML has
    it; if None, `unseen` says why."""
    if facts is None:
        yield _missing_gpu(reason, card)
    else:
        yield Fact("GPU", OK, device_text(facts))
        yield from _abilities(facts)
    if card is not None:
        yield _throttling(card)
        yield _processes(card)
    elif facts is not None:
        detail = f"clocks, throttling and other processes cannot be read: {unseen}"
        remedy = "pip install nvidia-ml-py; in a container: NVIDIA_DRIVER_CAPABILITIES=utility"
        yield Fact("state of the GPU", WARNING, detail, remedy)


def _missing_gpu(reason: str, card: Card | None) -> Fact:
    remedy = "install what the lines below name as missing"
    if card is None:
        remedy = "install the driver; in a container, start it with GPU access (--gpus all)"
    elif card.mig:
        remedy = "name a MIG instance in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)"
    return Fact("GPU", FAILURE, reason, remedy)


def _abilities(facts: DeviceFacts) -> Iterator[Fact]:
    if facts.mps:
        detail = "a server runs: its other clients disturb every measurement"
        remedy = "stop it while measuring: echo quit | nvidia-cuda-mps-control"
        yield Fact("MPS", WARNING, detail, remedy)
    if facts.persists:
        most = short_bytes(facts.persisting_l2_max_bytes)
        yield Fact("persisting L2", OK, f"up to {most} can be set aside")
    else:
        detail = "not on this GPU: tests of persisting_stream skip"
        remedy = "measure it on a whole GPU of compute capability 8.0 or newer"
        yield Fact("persisting L2", WARNING, detail, remedy)
    why = no_migration(facts)
    if why is None:
        yield Fact("managed memory", OK, "pages migrate on demand, prefetch works")
    else:
        remedy = "measure managed memory on bare Linux, on a GPU that can"
        yield Fact("managed memory", WARNING, f"{why}; its tests skip", remedy)


def _throttling(card: Card) -> Fact:
    if card.throttle_reasons is None:
        return Fact("throttling", OK, _UNKNOWN)
    if not card.throttle_reasons:
        return Fact("throttling", OK, "none")
    detail = f"slowed now by {', '.join(card.throttle_reasons)}"
    remedy = "wait until the GPU is idle and cool; for hw_ reasons check cooling and power supply"
    return Fact("throttling", WARNING, detail, remedy)


def _processes(card: Card) -> Fact:
    if card.processes is None:
        return Fact("other processes", OK, _UNKNOWN)
    if not card.processes:
        return Fact("other processes", OK, "none")
    names = []
    for process in card.processes:
        details = [process.name or "unknown program"]
        if process.memory_bytes:
            details.append(short_bytes(process.memory_bytes))
        names.append(f"pid {process.pid} ({', '.join(details)})")
    detail = f"on the GPU: {', '.join(names)}; rows measured beside them are UNDECIDED"
    remedy = "end them, or measure on another GPU (--gpumem-device=cuda:N)"
    return Fact("other processes", WARNING, detail, remedy)


def package_checks(versions: Mapping[str, str]) -> Iterator[Fact]:
    """Checks of the packages that pip installs. `versions`: of those that are installed."""
    cupy = [name for name in CUPY if name in versions]
    listed = ", ".join(f"{name} {versions[name]}" for name in cupy)
    major = ""  # of CUDA: "13" of cupy-cuda13x, empty of cupy
    if len(cupy) == 1:
        major = cupy[0].removeprefix("cupy").removeprefix("-cuda").removesuffix("x")
        yield Fact("CuPy", OK, listed)
    elif cupy:
        remedy = f"pip uninstall -y {' '.join(cupy)}; {_install('cuda', '')}"
        yield Fact("CuPy", FAILURE, f"{listed} overwrite each other", remedy)
    else:
        detail = "no GPU can be used without it"
        yield Fact("CuPy", FAILURE, detail, _install("cuda", ""))
    for name, extra, status, lost in PACKAGES:
        version = versions.get(name)
        remedy = _install(extra, major) if extra else f"pip install {name}"
        if version is None:
            yield Fact(name, status, lost, remedy)
        elif extra and major and version.partition(".")[0] != major:
            detail = f"{version} is not for CUDA {major}, which CuPy uses"
            yield Fact(name, WARNING, detail, remedy)
        else:
            yield Fact(name, OK, version)


def _install(extra: str, major: str) -> str:
    """The command that installs an extra. `major`: version of CUDA, if it is known."""
    what = f"'.[{extra}13]' (driver 580 or newer) or '.[{extra}12]'"
    if major:
        what = f"'.[{extra}{major}]'"
    return f"in the clone: pip install -e {what}"


def tool_checks(environment: Mapping[str, str]) -> Iterator[Fact]:
    """Nsight's tools, and the permission to read counters."""
    for tool in (tools.NSYS, tools.NCU):
        try:
            yield Fact(tool.program, OK, str(tools.find(tool, environment)))
        except NoAnswer:
            remedy = f"install {tool.title} ({tool.source}), or give its path in {tool.variable}"
            wanted = environment.get(tool.variable) or tool.program
            yield Fact(tool.program, WARNING, f"{wanted} was not found", remedy)
    if re.search(r"(?m)^RmProfilingAdminOnly:\s*1", _read(COUNTERS)):
        remedy = (
            f"load the module with NVreg_RestrictProfilingToAdminUsers=0: {tools.COUNTERS_DOCUMENT}"
        )
        yield Fact("counters", WARNING, "for administrators only: ncu fails", remedy)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Report:
    checks: tuple[Fact, ...]
    summary: str  # what this machine can measure
    device: DeviceFacts | None = None  # the GPU as CUDA describes it; None if none can be used
    card: Card | None = None  # the card as the driver (NVML) describes it; None without an answer

    def to_json(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "simulated_only": self.device is None,
            "summary": self.summary,
            "checks": to_builtins(self.checks),
            "device": None if self.device is None else device_to_json(self.device),
            "card": to_builtins(self.card),
        }


def examine() -> Report:
    """Run all checks. A missing or broken component is a finding and raises nothing."""
    facts, reason = find(os.environ.get("GPUMEM_DEVICE", "").strip())
    card, unseen = _look(facts)
    # Of a name, the first counts.
    versions = {each.name: each.version for each in reversed([*metadata.distributions()])}
    checks = [
        *gpu_checks(facts, reason, card, unseen),
        *package_checks(versions),
        *tool_checks(os.environ),
    ]
    return Report(tuple(checks), _summary(facts, checks), facts, card)


def find(wanted: str) -> tuple[DeviceFacts | None, str]:
    """Return the GPU that GPUMEM_DEVICE names, else the first, or None and the reason."""
    prefix = f"GPUMEM_DEVICE={wanted}: " if wanted else ""
    try:
        facts = opening.choose(device_choice(wanted or "cuda")).facts
        if facts.simulated:
            prefix = ""
            facts = opening.choose("cuda").facts
        return facts, ""
    except (NoDevice, QuantityError) as missing:
        return None, f"{prefix}{missing}"
    except Exception as broken:  # a broken CuPy or driver raises anything while it is loaded
        return None, f"looking for a GPU failed with {broken!r}"


def _look(facts: DeviceFacts | None) -> tuple[Card | None, str]:
    try:
        return opening.look(facts.pci_bus_id if facts is not None else None), ""
    except NoDevice as missing:
        return None, str(missing)
    except Exception as broken:  # such as a library of another version than the package
        return None, repr(broken)


def _summary(facts: DeviceFacts | None, checks: list[Fact]) -> str:
    if facts is None:
        return (
            "Nothing can be measured here: tests run on the simulated device, "
            "whose times come from a model."
        )
    failures = ", ".join(check.name for check in checks if check.status == FAILURE)
    if failures:
        return f"{facts.name} cannot be measured reliably until this is repaired: {failures}"
    return f"This machine can measure on {facts.name}."


def text(report: Report, width: int) -> list[str]:
    """The report for people: a line for each check, its remedy below; the summary."""
    names = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        first = f"{check.status:<7}  {check.name:<{names}}  "
        lines += hanging(first, printable(check.detail), width)
        if check.remedy:
            lines += hanging(" " * len(first) + "→ ", printable(check.remedy), width)
    summary = wrapped(printable(report.summary), width, indent="")
    return [*summary, "", *lines] if report.device is None else [*lines, "", *summary]
