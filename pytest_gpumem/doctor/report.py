"""The report of an examination: checks, each OK or with a remedy, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec import to_builtins

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.reporting.columns import hanging, wrapped

SCHEMA = 2  # version of the JSON report


class Status(str, Enum):
    OK = "OK"
    WARNING = "warning"  # it works with a restriction, or only some features need what is missing
    FAILURE = "failure"  # until this is repaired, a GPU cannot be measured reliably


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    detail: str  # the state found, or the features that are lost without it
    remedy: str = ""  # the action that repairs it; empty if the status is OK
    missing: bool = False  # True if the component is not installed

    def __post_init__(self) -> None:
        if (self.status is Status.OK) == bool(self.remedy):
            raise ValueError(
                f"{self.name} is {self.status.value} with the remedy {self.remedy!r}: a finding has one, what is OK has none"
            )

    def to_json(self) -> dict[str, str]:
        """The check for programs."""
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]
    simulated_only: (
        bool  # True if no GPU can be used, so that every result of this machine is simulated
    )
    summary: str  # one sentence that lists what this machine can measure
    device: DeviceFacts | None = None  # the GPU as CUDA describes it; None if CUDA cannot use it
    card: Card | None = None
    """The card as the driver (NVML) describes it; None if NVML does not answer."""

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
        return {
            "schema": SCHEMA,
            "simulated_only": self.simulated_only,
            "summary": self.summary,
            "checks": [check.to_json() for check in self.checks],
            "device": None if self.device is None else device_to_json(self.device),
            "card": None if self.card is None else to_builtins(self.card),
        }


def text(report: Report, width: int) -> list[str]:
    """The report for people in lines of `width` characters: the checks and the summary."""
    return [*lines(report.checks, width), "", *wrapped(printable(report.summary), width, indent="")]


def lines(checks: Sequence[Check], width: int) -> list[str]:
    """Checks for people in lines of `width` characters, a remedy that does not fit below its check."""
    names = max(len(check.name) for check in checks)
    found = []
    for check in checks:
        first, detail, remedy = (
            f"{check.status.value:<7}  {check.name:<{names}}  ",
            printable(check.detail),
            printable(check.remedy),
        )
        if remedy and len(whole := f"{first}{detail} -> {remedy}") <= width:
            found.append(whole)
            continue
        found += hanging(first, detail, width)
        found += hanging(" " * len(first) + "-> ", remedy, width) if remedy else []
    return found


def in_one_line(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"
