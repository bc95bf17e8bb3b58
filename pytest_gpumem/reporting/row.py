"""A row for readers: the view that terminal, HTML and Markdown draw, and figures for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from pytest_gpumem.judging.differences import shape
from pytest_gpumem.judging.finding import change, share_of_peak
from pytest_gpumem.limits import TIME
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import (
    CPU_FAULTS,
    DECLARED,
    FURTHER,
    GPU_FAULTS,
    HOST,
    MIGRATED,
    ORDER,
    Difference,
    Row,
    Value,
)
from pytest_gpumem.units import format_rate, format_time, short_bytes, sizes

EXACT = (
    *("peak_bytes", "kept_bytes", "reserved_bytes", "allocations"),
    *("kernels", "copies", "copied_bytes", "waits", "registers", "spill_bytes"),
    *("moved_bytes", "gpu_page_faults", "cpu_page_faults", "migrated_bytes"),
)
"""Figures of bytes and counts of a row. Of each, less is better."""
OF_TIME = ("latency_s", "half_width_s", "bandwidth_bytes_per_s", "share_of_peak")
READABLE = (
    *("verdict", "reason", *OF_TIME, "change", "reach", *EXACT),
    *("mode", "sampler", "gpu", "simulated"),
)
"""Figures that have a JUnit property each."""
PROPERTY = "gpumem"  # name, and prefix of the names, of the JUnit properties
REPEATED = 3  # requested over compulsory bytes, from which on caches serve most requests
HEADINGS = ("latency", "host", "bandwidth", "% of peak", "base", "change", "peak memory", "kept")
"""The columns of figures. An output leaves out those without any figure."""


@dataclass(frozen=True)
class Cell:
    """A figure of a row, in a table."""

    text: str  # with its unit
    value: float  # for sorting: seconds, bytes per second, bytes or a share


@dataclass(frozen=True)
class RowView:
    """A row as people read it."""

    row: Row
    name: str  # the key without what all rows of the report share
    verdict: str  # such as "PASS", "PASS, test failed"
    outcome: Outcome  # FAIL if the test failed, whatever the verdict
    figures: dict[str, Cell] = field(default_factory=dict)  # by heading, those that are known

    def texts(self, headings: Iterable[str]) -> list[str]:
        nothing = Cell("", 0.0)
        return [self.figures.get(heading, nothing).text for heading in headings]


def views(rows: Sequence[Row], facts: DeviceFacts, *, memory: bool = False) -> list[RowView]:
    """The rows of a report. `memory`: show every peak."""
    names = [row.key for row in rows]
    tests = [name.partition("::")[2] for name in names]
    if all(tests) and len(set(tests)) == len(names):  # unique without their files
        names = tests
    shown = []
    for row, name in zip(rows, names, strict=True):
        outcome = Outcome.FAIL if row.failed else row.verdict.outcome
        figures = _figures(row, facts, memory)
        shown.append(RowView(row, name, verdict_text(row), outcome, figures))
    return shown


def headings_of(shown: Iterable[RowView]) -> list[str]:
    known = set[str]().union(*(view.figures for view in shown))
    return [heading for heading in HEADINGS if heading in known]


def verdict_text(row: Row) -> str:
    failed = row.failed and row.verdict.outcome is not Outcome.FAIL
    return row.verdict.outcome.word + (", test failed" if failed else "")


def _figures(row: Row, facts: DeviceFacts, memory: bool) -> dict[str, Cell]:
    known = {}
    measurement = _compared(row)
    if measurement is not None:
        known["latency"] = _latency(measurement, measurement.latency)
        asked = asked_bandwidth(measurement)
        bandwidth = asked or measurement.bandwidth
        # Where each access waits for the last, bytes per second mean nothing.
        if bandwidth and not measurement.accesses_per_launch:
            rate, share = format_rate(bandwidth), share_of_peak(measurement, facts)
            if asked is not None:
                # Bytes that are requested repeatedly count once in a share: L2 would look slow.
                rate += " asked"
            elif share is not None:
                known["% of peak"] = Cell(f"{share * 100:.1f} %", share)
            known["bandwidth"] = Cell(rate, bandwidth)
    if HOST in row.extra:
        known["host"] = Cell(format_time(row.extra[HOST]), row.extra[HOST])
    delta, base = row.verdict.change, row.verdict.base
    if delta is not None:
        known["change"] = Cell(change(delta), delta)
    if base is not None and measurement is not None:
        known["base"] = _latency(measurement, base)
    known.update(_memory(row, memory))
    return known


def asked_bandwidth(measurement: Measurement) -> float | None:
    """Bytes per second that the threads request, if they request the compulsory bytes `REPEATED`
    times or more."""
    requested, moved = measurement.requested, measurement.moved_bytes
    if requested is None or moved is None or requested < REPEATED * moved.total:
        return None
    return requested / measurement.latency


def _latency(measurement: Measurement, seconds: float) -> Cell:
    if measurement.accesses_per_launch:
        access = seconds / measurement.accesses_per_launch
        return Cell(f"{format_time(access)}/access", access)
    return Cell(format_time(seconds), seconds)


def _memory(row: Row, every: bool) -> dict[str, Cell]:
    """Peak memory where it is limited or alone, and what is kept."""
    footprint, limits, known = row.footprint, row.limits, {}
    if footprint is None or not footprint.watched:
        return {}
    limited = limits.max_peak is not None or limits.max_peak_regression is not None
    if every or limited or row.measurement is None:
        known["peak memory"] = Cell(short_bytes(footprint.peak), footprint.peak)
    if footprint.ended and (footprint.kept > 0 or limits.max_kept is not None):
        known["kept"] = Cell(short_bytes(footprint.kept), footprint.kept)
    return known


def latencies_text(row: Row) -> str:
    """Such as "latency 2 us, was 1 us", or empty."""
    measurement, base = _compared(row), row.verdict.base
    if measurement is None or base is None:
        return ""
    now, was = _latency(measurement, measurement.latency), _latency(measurement, base)
    return f"latency {now.text}, was {was.text}"


def _compared(row: Row) -> Measurement | None:
    """The measurement, with the latency of a duet's head if there was one."""
    measurement, paired = row.measurement, row.verdict.paired
    if measurement is None or paired is None or paired.head is None:
        return measurement
    return structs.replace(measurement, placements=((paired.head,),))


FAILING, UNDECIDED, FINE = range(3)


def attention(row: Row) -> int:
    """How soon a row needs a look: `FAILING` first, `FINE` not at all."""
    if row.failed or row.verdict.outcome is Outcome.FAIL:
        return FAILING
    if row.verdict.outcome in (Outcome.UNDECIDED, Outcome.ACCEPTED):
        return UNDECIDED
    return FINE


def worst_first(rows: Iterable[Row]) -> list[Row]:
    def rank(row: Row) -> tuple[int, int, float]:
        return attention(row), row.verdict.outcome.rank, -(row.verdict.change or 0.0)

    return sorted(rows, key=rank)


def broken_limits(row: Row) -> list[str]:
    """A line for each broken limit of a row; of a slow-down, both latencies too."""
    lines = []
    for result in row.verdict.limits:
        if result.outcome is not Outcome.FAIL:
            continue
        if result.limit == TIME:
            lines.append(latencies_text(row))
        lines.append(result.reason)
    return [line for line in lines if line] or [row.verdict.reason]


# Differences

_OF_BYTES = (DECLARED, MIGRATED, "shared", "dynamic_shared", "local", "nbytes")
"""Kinds, and fields of a step, whose values are bytes."""
_WORDS = {
    "shared": "static shared memory",
    "dynamic_shared": "dynamic shared memory",
    "local": "local memory of a thread",
    "nbytes": "size",
    "source": "reads",
    "window": "access-policy window",
}


def why_lines(row: Row) -> list[str]:
    return [describe(difference) for difference in row.differences]


def describe(difference: Difference) -> str:
    """One difference as a sentence: "kernel triad: block 256 → 128"."""
    kind, field, was, now = difference.kind, difference.field, difference.was, difference.now
    if kind == ORDER:
        return "the same steps in another order"
    if kind == FURTHER:
        return f"{now} {kind}"
    if kind in (GPU_FAULTS, CPU_FAULTS) and was == 0:
        return f"{now} {kind} where there were none"
    subject = f"{kind} {difference.name}".rstrip()
    if difference.times > 1:
        subject = f"{difference.times} × {subject}"
    if field == "code":
        if difference.name == "reference":
            return "the simulated run's NumPy code changed"
        return f"{subject}: its module changed"
    if not field and (was is None or now is None):
        value = was or now
        what = "removed" if now is None else "added"
        return f"{subject} {what} ({value})" if value else f"{subject} {what}"
    values = " → ".join(_values(difference))
    if field.startswith("argument"):
        return f"{subject}: {field}: {values}"
    if field:
        return f"{subject}: {_WORDS.get(field, field)} {values}"
    if difference.name:
        return f"{subject}: {values}"
    return f"{subject} {values}"


def _values(difference: Difference) -> tuple[str, ...]:
    was, now = difference.was, difference.now
    of_bytes = (difference.field or difference.kind) in _OF_BYTES
    if of_bytes and isinstance(was, int) and isinstance(now, int):
        return sizes(was, now)
    return _value(was, difference.field, of_bytes), _value(now, difference.field, of_bytes)


def _value(value: Value, field: str, of_bytes: bool) -> str:
    if value is None and field == "window":
        return "none"
    if value is None:
        return "unknown"
    if isinstance(value, tuple):
        return shape(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    if of_bytes and isinstance(value, int):
        return short_bytes(value)
    return str(value)


# Figures for other programs


def figures(row: Row, facts: DeviceFacts) -> dict[str, Any]:
    measurement = row.measurement
    known: dict[str, Any] = {
        "gpu": facts.key,
        "simulated": row.verdict.simulated,
        "verdict": row.verdict.outcome.value,
        "reason": row.verdict.reason,
        "failed": row.failed,
        "range": row.range_name,
    }
    if row.label:
        known["label"] = row.label
    if measurement is not None:
        known |= {
            "target": measurement.target,
            "latency_s": measurement.latency,
            "half_width_s": measurement.half_width,
            "bandwidth_bytes_per_s": measurement.bandwidth,
            "samples": len(measurement.samples),
            "placements": len(measurement.placements),
            "mode": measurement.mode,
            "sampler": measurement.sampler,
            "profiled": measurement.profiled,
        }
        share = share_of_peak(measurement, facts)
        if share is not None:
            known["share_of_peak"] = share
    if row.extra:
        known["extra"] = row.extra
    known.update(exact_figures(row))
    comparison = row.verdict.comparison
    if comparison is not None:
        known["change"] = comparison.change
        known["saved_processes"] = comparison.processes
        known["saved_days"] = comparison.days
        if comparison.reach is not None:
            known["reach"] = comparison.reach
    return known


def exact_figures(row: Row) -> dict[str, int]:
    known = dict[str, int]()
    footprint, measurement = row.footprint, row.measurement
    if footprint is not None and footprint.watched:
        known |= {"peak_bytes": footprint.peak, "allocations": footprint.allocations}
        if footprint.ended:  # until then nothing is kept, only in use
            known |= {"kept_bytes": footprint.kept, "reserved_bytes": footprint.reserved}
    ran = None if measurement is None else measurement.what_ran
    if ran is not None and ran.order:  # a launch was watched
        for name in ("kernels", "copies", "copied_bytes", "waits"):
            known[name] = getattr(ran, name)
        if any(step.registers is not None for step in ran.of("kernel")):
            known |= {"registers": ran.registers, "spill_bytes": ran.spill}
    if footprint is not None and footprint.waits is not None and footprint.waits.not_read is None:
        known["waits"] = footprint.waits.count
    if measurement is not None and measurement.moved_bytes is not None:
        known["moved_bytes"] = measurement.moved_bytes.total
    if measurement is not None and measurement.pages is not None:
        pages = measurement.pages
        known |= {"gpu_page_faults": pages.gpu_faults, "cpu_page_faults": pages.cpu_faults}
        known["migrated_bytes"] = pages.migrated
    return known


def properties(row: Row, facts: DeviceFacts) -> Iterator[tuple[str, object]]:
    """JUnit properties: the figures as JSON, and those that a person looks for, each by itself."""
    suffix = f"[{row.label}]" if row.label else ""
    known = figures(row, facts)
    yield f"{PROPERTY}{suffix}", json.dumps(known)
    for name in READABLE:
        if known.get(name) is not None:
            yield f"{PROPERTY}_{name}{suffix}", known[name]
    for why in why_lines(row)[:1]:
        yield f"{PROPERTY}_why{suffix}", printable(why)
