"""Examines what this machine can measure, what is missing, and what else uses the GPU.

It runs no kernel and creates no CUDA context.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

from msgspec import to_builtins

from pytest_gpumem.devices import opening
from pytest_gpumem.doctor.checks import Check, Status, gpu_checks, package_checks, tool_checks
from pytest_gpumem.options import device_choice
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.reporting.columns import hanging, wrapped
from pytest_gpumem.units import QuantityError

SCHEMA = 3  # version of the layout of the JSON


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]
    summary: str  # what this machine can measure
    device: DeviceFacts | None = None  # the GPU as CUDA describes it; None if none can be used
    card: Card | None = None  # the card as the driver (NVML) describes it; None without an answer

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
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
    checks = [
        *gpu_checks(facts, reason, card, unseen),
        *package_checks(_installed()),
        *tool_checks(os.environ),
    ]
    return Report(tuple(checks), _summary(facts, checks), facts, card)


def find(wanted: str) -> tuple[DeviceFacts | None, str]:
    """Return the GPU that tests would run on, or None and the reason.

    `wanted`: the value of GPUMEM_DEVICE. Where tests would run simulated, the first GPU counts.
    """
    simulated = wanted in ("", "auto") or wanted.startswith("sim")
    prefix = "" if simulated else f"GPUMEM_DEVICE={wanted}: "
    try:
        choice = "cuda" if simulated else device_choice(wanted)
        return opening.choose(choice).facts, ""
    except (opening.NoDevice, QuantityError) as missing:
        return None, f"{prefix}{missing}"
    except Exception as broken:  # a broken CuPy or driver raises anything while it is loaded
        return None, f"looking for a GPU failed with {broken!r}"


def _look(facts: DeviceFacts | None) -> tuple[Card | None, str]:
    """Return the card as NVML describes it, or None and the reason."""
    try:
        return opening.look(facts.pci_bus_id if facts is not None else None), ""
    except opening.NoDevice as missing:
        return None, str(missing)
    except Exception as broken:  # such as a library of another version than the package
        return None, repr(broken)


def _installed() -> dict[str, str]:
    versions = {}
    for distribution in metadata.distributions():
        versions[distribution.name] = distribution.version
    return versions


def _summary(facts: DeviceFacts | None, checks: list[Check]) -> str:
    if facts is None:
        return (
            "Nothing can be measured here: tests run on the simulated device, "
            "whose times come from a model."
        )
    failures = [check.name for check in checks if check.status is Status.FAILURE]
    if failures:
        return f"{facts.name} cannot be measured reliably until this is repaired: " + ", ".join(
            failures
        )
    return f"This machine can measure on {facts.name}."


def text(report: Report, width: int) -> list[str]:
    """The report for people: a line for each check, its remedy below; the summary."""
    names = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        first = f"{check.status.value:<7}  {check.name:<{names}}  "
        lines += hanging(first, printable(check.detail), width)
        if check.remedy:
            lines += hanging(" " * len(first) + "-> ", printable(check.remedy), width)
    summary = wrapped(printable(report.summary), width, indent="")
    return [*summary, "", *lines] if report.device is None else [*lines, "", *summary]
