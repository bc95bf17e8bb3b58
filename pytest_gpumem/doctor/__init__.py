"""Examines what this machine can measure and what is missing for the rest.

This process runs no kernel; each library of other code is tried in a process of its own. It creates a CUDA context only under MPS, where
only a context tells how much of L2 the server has set aside.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.doctor import gpu
from pytest_gpumem.doctor.machine import Machine, packages, pinned, tools
from pytest_gpumem.doctor.report import Check, Report, Status, text
from pytest_gpumem.records.device import DeviceFacts

__all__ = ["Check", "Machine", "Report", "Status", "examine", "text"]


def examine(machine: Machine | None = None) -> Report:
    """Run all checks. A missing or broken component is a finding and raises nothing."""
    machine = machine or Machine()
    chosen, reason = gpu.find(machine)
    facts = chosen.facts if chosen is not None else None
    card, unseen = gpu.look(machine, facts)
    checks = [*gpu.identity(machine, facts, reason, card, unseen)]
    if chosen is not None:
        checks += gpu.abilities(machine, chosen)
    if card is not None:
        checks += gpu.state(card)
    elif facts is not None:
        remedy = "pip install nvidia-ml-py; in a container, let the driver's utilities in (NVIDIA_DRIVER_CAPABILITIES)"
        checks.append(
            Check(
                "state of the GPU",
                Status.WARNING,
                f"clocks, throttling, ECC and processes cannot be read: {unseen}",
                remedy,
            )
        )
    checks += [pinned(machine), *packages(machine, facts, card), *tools(machine, facts)]
    return Report(tuple(checks), facts is None, _summary(facts, checks), facts, card)


def _summary(facts: DeviceFacts | None, checks: Sequence[Check]) -> str:
    if facts is None:
        return "This machine can run the suite on the simulated device only: its times come from a model and say nothing about a GPU."
    by_name = {check.name: check for check in checks}
    can = ["latency and bandwidth"]
    for name, words in (("set-aside", "L2 persistence"), ("managed memory", "managed memory")):
        can += [words] if by_name[name].status is Status.OK else []
    listed = ", ".join(can[:-1]) + (" and " if len(can) > 1 else "") + can[-1]
    there = [tool for tool in ("nsys", "ncu") if not by_name[tool].missing]
    profiled = f", and its tests can be profiled with {' and '.join(there)}" if there else ""
    failures = [check.name for check in checks if check.status is Status.FAILURE]
    unreliable = (
        f" Its measurements are unreliable until this is repaired: {', '.join(failures)}."
        if failures
        else ""
    )
    return f"This machine can measure {listed} on {facts.name}{profiled}.{unreliable}"
