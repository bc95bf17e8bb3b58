"""What an examination found: checks, each OK or with its remedy, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.schema import device_to_json

SCHEMA = 2
"""Version of the JSON report."""


class Status(str, Enum):
    OK = "OK"
    WARNING = "warning"
    """It works, with a restriction; or what is missing is only needed for some of it."""
    FAILURE = "failure"
    """A GPU cannot be measured, or not reliably, before this is mended."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    """What was found, or what cannot be done without it."""
    remedy: str = ""
    """What to do about it; empty if it is OK."""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) == bool(self.remedy):
            raise ValueError(f"{self.name} is {self.status.value} with the remedy {self.remedy!r}: a finding has one, what is OK has none")


@dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]
    simulated_only: bool
    """No GPU can be used: every result of this machine is simulated."""
    summary: str
    """One sentence: what this machine can measure."""
    device: DeviceFacts | None = None
    """What CUDA says of the GPU; None if it cannot be used."""
    card: Card | None = None
    """What the driver says of it; None if it says nothing."""

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
        return {
            "schema": SCHEMA,
            "simulated_only": self.simulated_only,
            "summary": self.summary,
            "checks": [{"name": c.name, "status": c.status.value, "detail": c.detail, "remedy": c.remedy} for c in self.checks],
            "device": None if self.device is None else device_to_json(self.device),
            "card": None if self.card is None else asdict(self.card),
        }


def text(report: Report) -> list[str]:
    """The report for people: a line for each check, and the summary."""
    names = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{check.status.value:<7}  {check.name:<{names}}  {check.detail}{remedy}")
    return printable([*lines, "", report.summary])


def in_one_line(error: Exception) -> str:
    """An error's class and the first line of what it says."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"
