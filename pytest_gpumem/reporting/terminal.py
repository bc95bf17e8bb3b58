"""A session in a terminal: header, counts, what was not judged; and the colours."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TextIO

from pytest_gpumem.judging.finding import counted, mark
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import ACCEPTED, LOST, NOT_RUN, ROW, TEST, UNDECIDED, Omission, Row
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import format_bytes, format_rate

STYLES: Mapping[Outcome, str] = {
    Outcome.FAIL: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.ACCEPTED: "magenta",
    Outcome.NEW: "cyan",
    Outcome.PASS: "green",
    Outcome.MEASURED: "dim",
}
"""Colours, as rich names them."""
MOST = 20  # lost measurements that are listed; the results have all


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


def name_and_driver(facts: DeviceFacts) -> str:
    text = f"{facts.name}{mark(facts.simulated)}"
    if facts.driver:
        text += f", driver {facts.driver}"
    return text


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


def counts_text(rows: Sequence[Row]) -> str:
    """Such as "9 rows (simulated): 1 FAIL, 2 PASS; 1 test failed without a measurement"."""
    counts: Counter[Outcome] = Counter()
    by_error, nothing, simulated = set[str](), set[str](), False
    for row in rows:
        simulated = simulated or row.verdict.simulated
        if not row.measured_something:
            nothing.add(row.nodeid)
            continue
        counts[row.verdict.outcome] += 1
        if row.test_error:
            by_error.add(row.nodeid)
    outcomes = []
    for outcome in sorted(counts, key=lambda outcome: outcome.rank):
        outcomes.append(f"{counts[outcome]} {outcome.word}")
    parts = [f"{counted(counts.total(), 'row')}{mark(simulated)}"]
    if outcomes:
        parts[0] += f": {', '.join(outcomes)}"
    if by_error:
        parts.append(f"{counted(len(by_error), 'test')} failed by an assertion or an error")
    if nothing:
        parts.append(f"{counted(len(nothing), 'test')} failed without a measurement")
    return "; ".join(parts)


def missing_lines(missing: Sequence[Omission]) -> list[str]:
    names = {LOST: "lost", ACCEPTED: "accepted", UNDECIDED: "not judged"}
    things = {ROW: "measurement of the baseline", TEST: "test"}
    crashed: dict[str, set[str]] = defaultdict(set)
    not_run: dict[str, Counter[str]] = defaultdict(Counter)
    listed: dict[str, list[str]] = defaultdict(list)
    for omission in missing:
        reason, lost = omission.reason, omission.status == LOST
        if omission.status == NOT_RUN:
            not_run[things.get(omission.what, "limit")][reason] += 1
        elif lost and omission.how == "not reached":
            crashed["not reached, because the session ended before"].add(omission.nodeid)
        elif lost and omission.how == "did not run":
            crashed[f"did not run because {reason}"].add(omission.nodeid)
        else:
            name = names[omission.status]
            limit = "" if omission.what in things else f", {omission.what}"
            listed[name].append(f"{name}: {omission.key}{limit}: {reason}")
    lines = []
    for why, tests in crashed.items():
        count = counted(len(tests), "test")
        lines.append(f"lost: {count} {why}; --gpumem-isolate runs them all the same")
    for name, entries in listed.items():
        lines += entries[:MOST]
        if len(entries) > MOST:
            lines.append(f"{name}: {len(entries) - MOST} further")
    for thing, reasons in not_run.items():
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        what, _, of = thing.partition(" ")
        lines.append(f"not run: {counted(reasons.total(), what)} {of}".rstrip() + f" ({counts})")
    return lines


def profiled_lines(rows: Sequence[Row]) -> list[str]:
    """Lines about a session under a profiler, whose times are not comparable with others."""
    tests = {row.nodeid: None for row in rows if row.measurement is not None}
    count = counted(len(tests), "test")
    names = [f"  {printable(test)}" for test in tests]
    return [f"profiled: {count}; times under a profiler are not judged", *names]
