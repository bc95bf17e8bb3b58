"""Lines of a session in a terminal: its header, counts, and what was not judged."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TextIO

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.row import (
    ACCEPTED,
    DID_NOT_RUN,
    LOST,
    NOT_REACHED,
    NOT_RUN,
    ROW,
    TEST,
    UNJUDGED,
    Omission,
    Row,
)
from pytest_gpumem.reporting.details import conditions_text
from pytest_gpumem.reporting.row import mark
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import format_bytes, format_rate

MOST = 20  # lost measurements that are listed; the results have all
REMEDY = "to remove a measurement on purpose: gpumem accept TEST --scope removed"


def header(
    facts: DeviceFacts,
    settings: Mapping[str, object],
    baseline: str = "",
    *,
    fallback_reason: str | None = None,
    conditions: Conditions | None = None,
) -> list[str]:
    """Lines about the device and the settings, by option, that are not the default.

    `baseline`: one sentence about it.
    `fallback_reason`: why the device is simulated, if nobody chose that.
    `conditions`: at the start; printed where they disturb.
    """
    device = device_text(facts)
    if facts.simulated:
        why = f" ({fallback_reason})" if fallback_reason else ""
        device = f"SIMULATED {facts.name}: no GPU is measured, times come from a model{why}"
    elif conditions is not None and (conditions.throttle_reasons or conditions.other_processes):
        device += f"; {conditions_text(conditions)}"
    plan = _plan(settings)
    if baseline:
        plan += f"; baseline: {baseline}"
    return printable([f"gpumem: {device}", f"  {plan}"] if plan else [f"gpumem: {device}"])


def device_text(facts: DeviceFacts) -> str:
    """The GPU in one line."""
    parts = [
        f"{facts.name} MIG {facts.mig_profile}" if facts.mig_profile else facts.name,
        f"driver {facts.driver or 'unknown'}",
        f"CUDA {facts.cuda or 'unknown'}",
        f"peak {format_rate(facts.dram_peak)}" if facts.dram_peak else "peak unknown",
        f"{facts.memory_bytes / 2**30:.1f} GiB",
        f"L2 {format_bytes(facts.l2_bytes)}",
    ]
    if facts.ecc is not None:
        parts.append(f"ECC {'on' if facts.ecc else 'off'}")
    if facts.mps:
        parts.append("MPS on")
    if facts.link:
        parts.append(facts.link)
    return ", ".join(parts)


_PLAN = ("mode", "sampler", "placements", "precision", "budget", "total_budget", "processes")
_LIMITS = ("max_regression", "min_bandwidth", "max_latency", "strict")


def _plan(settings: Mapping[str, object]) -> str:
    """The mode, and the settings that are not the default."""
    usual = Settings().to_json()
    parts = []
    for name in (*_PLAN, *_LIMITS):
        value = settings.get(name)
        if value is not None and (name == "mode" or value != usual.get(name)):
            parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


def baseline_line(processes: int, where: str) -> str:
    """One sentence about a baseline. `processes`: that it holds for this device."""
    if processes == 0:
        return f"none in {where}; --gpumem-save makes one"
    return f"{counted(processes, 'process')} in {where}"


def columns() -> int:
    """The columns of the terminal; 120 where the output is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """True on a terminal, unless NO_COLOR is set (https://no-color.org) or it is dumb."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def one_place(stream: TextIO, other: TextIO) -> bool:
    """True if two streams write to the same terminal, file or pipe."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # closed, or no stream of the operating system
        return False


def counts_text(rows: Sequence[Row]) -> str:
    """Such as "9 rows (simulated): 1 FAIL, 2 PASS; 1 test failed without a measurement"."""
    measured = [row for row in rows if row.measured_something]
    simulated = mark(any(row.verdict.simulated for row in rows))
    counts = Counter(row.verdict.outcome for row in measured)
    outcomes = []
    for outcome in sorted(counts, key=lambda outcome: outcome.rank):
        outcomes.append(f"{counts[outcome]} {outcome.word}")
    colon = ": " if outcomes else ""
    parts = [f"{counted(len(measured), 'row')}{simulated}{colon}{', '.join(outcomes)}"]
    by_error = {row.nodeid for row in measured if row.test_error is True}
    if by_error:
        parts.append(f"{counted(len(by_error), 'test')} failed by an assertion or an error")
    nothing = {row.nodeid for row in rows if not row.measured_something}
    if nothing:
        parts.append(f"{counted(len(nothing), 'test')} failed without a measurement")
    return "; ".join(parts)


def missing_lines(missing: Sequence[Omission], remedy: str = REMEDY) -> list[str]:
    """Lines about what was not judged: each lost measurement, each limit on a test that measured
    nothing, and how many were not run.

    `remedy`: what to do about lost measurements.
    """
    names = {LOST: "lost", ACCEPTED: "removed", UNJUDGED: "not judged"}
    crashed: dict[str, set[str]] = {}
    not_run: dict[str, Counter[str]] = {}
    listed: dict[str, list[str]] = {name: [] for name in names.values()}
    for omission in missing:
        if omission.status == NOT_RUN:
            thing = {ROW: "measurement", TEST: "test"}.get(omission.what, "limit")
            not_run.setdefault(thing, Counter())[omission.reason] += 1
        elif omission.status == LOST and omission.reason == NOT_REACHED:
            why = "not reached, because the session ended before"
            crashed.setdefault(why, set()).add(omission.nodeid)
        elif omission.status == LOST and DID_NOT_RUN in omission.reason:
            why = f"did not run because {omission.reason.partition(DID_NOT_RUN)[2]}"
            crashed.setdefault(why, set()).add(omission.nodeid)
        else:
            limit = "" if omission.what in (ROW, TEST) else f", {omission.what}"
            listed[names[omission.status]].append(f"{omission.key}{limit}: {omission.reason}")
    lines = []
    for why, tests in crashed.items():
        count = counted(len(tests), "test")
        lines.append(f"lost: {count} {why}; --gpumem-isolate runs them all the same")
    for name, entries in listed.items():
        lines += [f"{name}: {entry}" for entry in entries[:MOST]]
        if len(entries) > MOST:
            lines.append(f"{name}: {len(entries) - MOST} further")
    if any(omission.may_be_meant for omission in missing):
        lines.append(remedy)
    for thing, reasons in not_run.items():
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        of = " of the baseline" if thing == "measurement" else ""
        lines.append(f"not run: {counted(reasons.total(), thing)}{of} ({counts})")
    return lines


def profiled_lines(rows: Sequence[Row]) -> list[str]:
    """Lines about a session under a profiler, whose times are not comparable with others."""
    tests = {row.nodeid: None for row in rows if row.measurement is not None}
    count = counted(len(tests), "test")
    names = [f"  {printable(test)}" for test in tests]
    return [f"profiled: {count}; times under a profiler are not judged", *names]
