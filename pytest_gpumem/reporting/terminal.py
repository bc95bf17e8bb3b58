"""The header of a session, and what its terminal can show."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TextIO

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import format_bytes, format_rate


def header(
    facts: DeviceFacts,
    settings: Mapping[str, object],
    baseline: str = "",
    *,
    fallback_reason: str | None = None,
) -> list[str]:
    """Lines about the device, the settings that are not the default, and the baseline.
    `fallback_reason`: why the device is simulated, if nobody chose that."""
    device = device_text(facts)
    if facts.simulated:
        why = f" ({fallback_reason})" if fallback_reason else ""
        device = f"SIMULATED {facts.name}: no GPU is measured, times come from a model{why}"
    plan = _plan(settings)
    if baseline:
        plan += f"; baseline: {baseline}"
    lines = [f"gpumem: {device}"]
    if plan:
        lines.append(f"  {plan}")
    return printable(lines)


def device_text(facts: DeviceFacts) -> str:
    parts = [
        facts.name,
        f"driver {facts.driver or 'unknown'}",
        f"CUDA {facts.cuda or 'unknown'}",
        f"peak {format_rate(facts.dram_peak) if facts.dram_peak else 'unknown'}",
        f"{facts.memory_bytes / 2**30:.1f} GiB",
        f"L2 {format_bytes(facts.l2_bytes)}",
    ]
    if facts.mig_profile:
        parts.append(f"MIG {facts.mig_profile}")
    if facts.ecc is False:
        parts.append("ECC off")
    if facts.mps:
        parts.append("MPS on")
    if facts.link:
        parts.append(facts.link)
    return ", ".join(parts)


_PLAN = (
    *("mode", "sampler", "placements", "precision", "budget", "total_budget", "processes"),
    *("max_regression", "min_bandwidth", "max_latency", "strict"),
)


def _plan(settings: Mapping[str, object]) -> str:
    usual = Settings().to_json()
    parts = []
    for name in _PLAN:
        value = settings.get(name)
        if value is not None and (name == "mode" or value != usual.get(name)):
            parts.append(f"{name} {value}".removesuffix(" True"))
    return ", ".join(parts)


def columns() -> int:
    """The columns of the terminal; 120 where the output is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """True on a terminal, unless NO_COLOR is set (https://no-color.org) or it is dumb."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
