"""The header of a run in a terminal: the device, the settings, the baseline, and a banner if the device is simulated."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
)
from pytest_gpumem.reporting.row_facts import conditions_text
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import format_bytes, format_rate, format_share, format_time

MOST = 20  # lost measurements that are listed. The results hold all.
_ON = {True: "on", False: "off", None: "unknown"}


def header(
    facts: DeviceFacts,
    settings: Mapping[str, object],
    baseline: str = "",
    *,
    fallback_reason: str | None = None,
    conditions: Conditions | None = None,
    short: bool = False,
) -> list[str]:
    """Lines about the device and the run, without colour.
    `settings`: by the names of the options: mode, sampler, placements, precision (a share), budget and total_budget (seconds), processes,
    max_regression, min_bandwidth, max_latency, strict. Missing names and None are left out.
    `baseline`: one sentence about the baseline, as `baseline_line` makes it.
    `fallback_reason`: why the device is simulated, if nobody chose that.
    `conditions`: clocks and throttle reasons at the start.
    `short`: two lines: the device, and the settings that are not the default with the baseline.
    """
    if short:
        usual = Settings().to_json()
        own = {
            name: value
            for name, value in settings.items()
            if name == "mode" or value != usual.get(name)
        }
        parts = [_plan(own), f"baseline: {baseline}" if baseline else ""]
        return printable(
            [
                f"gpumem: {_short_device(facts, fallback_reason, conditions)}",
                f"  {'; '.join(filter(None, parts))}",
            ]
        )
    lines = []
    if facts.simulated:  # in capitals, so that nobody mistakes a green run for a real one
        lines.append(
            f"*** SIMULATED DEVICE: no GPU is measured. Times come from a model of {facts.name}. ***"
        )
        lines += [f"*** Reason: {fallback_reason} ***"] if fallback_reason else []
    lines.append(f"gpumem: {_device(facts)}")
    if not facts.simulated:
        lines.append(f"  {_software(facts)}")
    if conditions is not None and (text := conditions_text(conditions)):
        lines.append(f"  conditions: {text}")
    if plan := _plan(settings):
        lines.append(f"  {plan}")
    if baseline:
        lines.append(f"  baseline: {baseline}")
    return printable(lines)


def _short_device(
    facts: DeviceFacts, fallback_reason: str | None, conditions: Conditions | None
) -> str:
    if facts.simulated:
        why = f" ({fallback_reason})" if fallback_reason else ""
        return f"SIMULATED {facts.name}: no GPU is measured, times come from a model{why}"
    device = f"{_name(facts)}, driver {facts.driver or 'unknown'}, CUDA {facts.cuda or 'unknown'}, {_peak(facts)}"
    disturbed = conditions is not None and (
        conditions.throttle_reasons or conditions.other_processes
    )
    return (
        f"{device}; {conditions_text(conditions)}"
        if conditions is not None and disturbed
        else device
    )


REMEDY = "to remove a measurement on purpose: gpumem accept TEST --scope removed"


def missing_lines(missing: Sequence[Omission], remedy: str = REMEDY) -> list[str]:
    """Lines about what was not judged: each lost measurement, each limit on a test that measured nothing, and how many were not run.
    `remedy`: what to do about lost measurements.
    """
    crashed = [
        one
        for one in missing
        if one.status == LOST and (one.reason == NOT_REACHED or DID_NOT_RUN in one.reason)
    ]
    lines = list(_crash_lines(crashed))
    for status, name in ((LOST, "lost"), (ACCEPTED, "removed"), (UNJUDGED, "not judged")):
        those = [one for one in missing if one.status == status and one not in crashed]
        lines += [
            f"{name}: {one.key}{'' if one.what in (ROW, TEST) else f', {one.what}'}: {one.reason}"
            for one in those[:MOST]
        ]
        if len(those) > MOST:
            lines.append(
                f"{name}: {len(those) - MOST} further {'measurements' if status != UNJUDGED else 'limits'}"
            )
    if any(one.may_be_meant for one in missing):
        lines.append(remedy)
    return [*lines, *_not_run_lines(one for one in missing if one.status == NOT_RUN)]


def _crash_lines(crashed: Sequence[Omission]) -> Iterator[str]:
    """A line for each crash, or end of a session, that kept tests from running."""
    reasons = dict[str, set[str]]()
    for one in crashed:
        lost_in = one.reason.partition(DID_NOT_RUN)[2]
        why = (
            f"did not run because {lost_in}"
            if lost_in
            else "not reached, because the session ended before"
        )
        reasons.setdefault(why, set()).add(one.nodeid)
    for why, tests in reasons.items():
        yield f"lost: {counted(len(tests), 'test')} {why}; --gpumem-isolate runs them all the same"


def _not_run_lines(missing: Iterable[Omission]) -> Iterator[str]:
    """A line each about the measurements, the tests and the limits, with their reasons counted."""
    not_run: dict[str, list[str]] = {"measurement": [], "test": [], "limit": []}
    for one in missing:
        not_run[{ROW: "measurement", TEST: "test"}.get(one.what, "limit")].append(one.reason)
    for things, reasons in not_run.items():
        if reasons:
            listed = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).items())
            yield f"not run: {counted(len(reasons), things)}{' of the baseline' if things == 'measurement' else ''} ({listed})"


def baseline_line(processes: int, catches: float | None, where: str) -> str:
    """One sentence about a baseline.
    `processes`: saved processes that it holds for this device.
    `catches`: the smallest slow-down that it catches, as a share; None if it is not known yet.
    """
    if processes == 0:
        return f"none in {where}; --gpumem-save makes one"
    stored = f"{counted(processes, 'process')} in {where}"
    return (
        stored if catches is None else f"{stored}; catches slow-downs from {format_share(catches)}"
    )


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """True on a terminal, unless NO_COLOR is set (https://no-color.org) or the terminal is dumb."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def one_place(one: TextIO, other: TextIO) -> bool:
    """True if two streams write to the same terminal, file or pipe."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # closed, or no stream of the operating system
        return False


def _device(facts: DeviceFacts) -> str:
    l2 = f"L2 {format_bytes(facts.l2_bytes)}"
    parts = [
        facts.arch,
        f"{facts.sm_count} SMs",
        f"{facts.memory_bytes / 2**30:.1f} GiB",
        l2,
        _peak(facts),
    ]
    return f"{'simulated ' if facts.simulated else ''}{_name(facts)} ({', '.join(parts)})"


def _name(facts: DeviceFacts) -> str:
    return f"{facts.name} MIG {facts.mig_profile}" if facts.mig_profile else facts.name


def _peak(facts: DeviceFacts) -> str:
    return f"peak {format_rate(facts.dram_peak)}" if facts.dram_peak else "peak unknown"


def _software(facts: DeviceFacts) -> str:
    parts = [
        f"driver {facts.driver or 'unknown'}",
        f"CUDA {facts.cuda or 'unknown'}",
        f"ECC {_ON[facts.ecc]}",
        f"MIG {facts.mig_profile or 'off'}",
        f"MPS {_ON[facts.mps]}",
    ]
    return ", ".join([*parts, facts.link] if facts.link else parts)


def _plan(settings: Mapping[str, object]) -> str:
    parts = []
    for name, form in (
        ("mode", "mode {}"),
        ("sampler", "sampler {}"),
        ("placements", "{} placements"),
        ("max_regression", "max_regression {}"),
        ("min_bandwidth", "min_bandwidth {}"),
        ("max_latency", "max_latency {}"),
    ):
        if settings.get(name) is not None:
            parts.append(form.format(settings[name]))
    if isinstance(precision := settings.get("precision"), float):
        parts.append(f"precision {format_share(precision)}")
    if isinstance(each := settings.get("budget"), (int, float)):
        parts.append(f"{format_time(each)} a measurement")
    if isinstance(total := settings.get("total_budget"), (int, float)):
        parts.append(f"{format_time(total)} in total")
    if isinstance(processes := settings.get("processes"), int) and processes > 1:
        parts.append(f"{processes} processes")
    if settings.get("strict"):
        parts.append("strict")
    return ", ".join(parts)
