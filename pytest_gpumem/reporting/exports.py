"""Rows for other programs: as plain values, as CSV (RFC 4180), and as JSON for github-action-benchmark.

CSV has SI units, shares as fractions, and empty fields where unknown. In JSON every name ends with the key of the GPU, so that no line of a
chart mixes GPUs, or a simulated device with a real one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import StepKind, WhatRan
from pytest_gpumem.reporting.differences import place_of, why_lines

if TYPE_CHECKING:
    from pytest_gpumem.reporting.run import Run

_EXACT = (
    *(
        "peak_bytes",
        "kept_bytes",
        "reserved_bytes",
        "allocations",
        "kernels",
        "copies",
        "copied_bytes",
        "waits",
        "registers",
    ),
    *("spill_bytes", "moved_bytes", "gpu_page_faults", "cpu_page_faults", "migrated_bytes"),
)
"""Figures of bytes and counts. Of each, less is better."""
_HEADINGS = (
    *(
        "utc",
        "revision",
        "gpu",
        "simulated",
        "key",
        "nodeid",
        "label",
        "verdict",
        "code",
        "failed",
        "mode",
        "sampler",
        "samples",
    ),
    *(
        "placements",
        "latency_s",
        "half_width_s",
        "bandwidth_bytes_per_s",
        "share_of_peak",
        *_EXACT,
        "change",
        "reach",
        "reason",
    ),
)


def as_csv(run: Run) -> str:
    """A line for each row. Each of the figures that tests added has a column of its name behind the others."""
    extra = list(dict.fromkeys(name for row in run.rows for name in row.extra))
    return written(
        [
            (*_HEADINGS, *extra),
            *((*_fields(row, run), *map(row.extra.get, extra)) for row in run.rows),
        ]
    )


def _fields(row: Row, run: Run) -> list[object]:
    code = row.verdict.code.value if row.verdict.code is not None else None
    of_run = {"utc": run.utc, "revision": run.revision}
    found = {
        **of_run,
        "key": row.key,
        "nodeid": row.nodeid,
        "code": code,
        **figures(row, run.facts),
        "label": row.label,
    }
    return [found.get(name) for name in _HEADINGS]


def written(lines: Iterable[Sequence[object]]) -> str:
    """Lines of fields as CSV. A field that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [[_field(one) for one in line] for line in lines]
    )
    return text.getvalue()


def _field(value: object) -> object:
    if not isinstance(value, str):
        return value
    plain = printable(value)
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) else plain


def figures(row: Row, facts: DeviceFacts) -> dict[str, Any]:
    """The figures of a row without its samples, as plain values in SI units: of `extra_info`, JUnit, CSV and chart services.
    `facts`: of the run's device.
    """
    measurement, comparison = row.measurement, row.verdict.comparison
    found: dict[str, Any] = {
        "gpu": facts.key,
        "simulated": row.verdict.simulated or facts.simulated,
        "verdict": row.verdict.outcome.value,
        "reason": row.verdict.reason,
        "failed": row.failed,
        "range": row.range_name,
    }
    known: dict[str, Any] = {
        "label": row.label or None
    }  # those that are left out where they are unknown
    if measurement is not None:
        found |= {
            "target": measurement.target,
            "latency_s": measurement.latency,
            "half_width_s": measurement.half_width,
            "bandwidth_bytes_per_s": measurement.bandwidth,
            "samples": sum(map(len, measurement.placements)),
            "placements": len(measurement.placements),
            "mode": measurement.mode,
            "sampler": measurement.sampler,
            "profiled": measurement.profiled,
        }
        known["share_of_peak"] = measurement.share_of_peak(facts)
    if row.extra:
        found["extra"] = row.extra
    found |= exact_figures(row)
    if comparison is not None:
        found |= {
            "change": comparison.delta,
            "reach": comparison.reach,
            "saved_processes": comparison.processes,
            "saved_days": comparison.days,
        }
    return found | {name: value for name, value in known.items() if value is not None}


def exact_figures(row: Row) -> dict[str, int]:
    """Those of `_EXACT` that are known."""
    found: dict[str, int] = {}
    if (measurement := row.measurement) is not None:
        found |= (
            {}
            if measurement.moved_bytes is None
            else {"moved_bytes": measurement.moved_bytes.total}
        )
        if measurement.what_ran is not None and measurement.what_ran.order:
            found |= _counts(measurement.what_ran)
        if (
            measurement.migrations is not None
            and (counts := measurement.migrations.launch) is not None
        ):
            found |= {
                "gpu_page_faults": counts.gpu_faults,
                "cpu_page_faults": counts.cpu_faults,
                "migrated_bytes": counts.migrated,
            }
    return found if row.footprint is None else found | _of_test(row.footprint)


def _of_test(footprint: Footprint) -> dict[str, int]:
    found: dict[str, int] = {}
    if footprint.watched:
        found |= {"peak_bytes": footprint.peak, "allocations": footprint.allocations}
        if footprint.ended:  # until then nothing is kept, only in use
            found |= {"kept_bytes": footprint.kept, "reserved_bytes": footprint.reserved}
    if footprint.waits is not None and footprint.waits.not_read is None:
        found["waits"] = footprint.waits.count
    return found


def _counts(ran: WhatRan) -> dict[str, int]:
    found = {
        "kernels": ran.kernels,
        "copies": ran.copies,
        "copied_bytes": ran.copied_bytes,
        "waits": ran.waits,
    }
    compiled = any(step.registers is not None for step in ran.of(StepKind.KERNEL))
    return found | ({"registers": ran.registers, "spill_bytes": ran.spill} if compiled else {})


PROPERTY = "gpumem"  # name, and prefix of the names, of the JUnit properties

READABLE = (
    *("verdict", "reason", "latency_s", "half_width_s", "bandwidth_bytes_per_s", "share_of_peak"),
    *(
        "change",
        "reach",
        *_EXACT,
        "mode",
        "sampler",
        "gpu",
        "simulated",
    ),
)
"""Figures that have a JUnit property of their own."""


def properties(row: Row, facts: DeviceFacts) -> list[tuple[str, object]]:
    """JUnit properties: the figures as JSON, and those that a person looks for, each on its own.
    `facts`: of the session's device.
    """
    suffix, found = f"[{row.label}]" if row.label else "", figures(row, facts)
    why, place = why_lines(row)[:1], place_of(row)
    own = {
        "why": why[0] if why else None,
        "why_line": f"{place[0]}:{place[1]}" if place is not None else None,
    }
    return [
        (f"{PROPERTY}{suffix}", json.dumps(found)),
        *(
            (f"{PROPERTY}_{name}{suffix}", found[name])
            for name in READABLE
            if found.get(name) is not None
        ),
        *(
            (f"{PROPERTY}_{name}{suffix}", printable(value))
            for name, value in own.items()
            if value is not None
        ),
    ]


def as_json(run: Run) -> str:
    """A JSON list of the figures of which less is better, as github-action-benchmark's tool `customSmallerIsBetter` reads it: latencies in
    microseconds, bytes and counts (https://github.com/benchmark-action/github-action-benchmark).
    """
    return (
        json.dumps(
            printable(
                [one for row, known in _charted(run) for one in _entries(row, known, run.facts)]
            ),
            indent=1,
        )
        + "\n"
    )


def _entries(row: Row, known: dict[str, Any], facts: DeviceFacts) -> Iterator[dict[str, object]]:
    measured = row.measurement
    about = {
        "extra": ", ".join(
            filter(None, (facts.name, facts.driver and f"driver {facts.driver}", known.get("mode")))
        )
    }
    if measured is not None:
        interval = (
            {} if measured.half_width is None else {"range": f"± {1e6 * measured.half_width:.4g}"}
        )
        yield {
            "name": f"{row.key} latency @ {facts.key}",
            "unit": "us",
            "value": 1e6 * measured.latency,
            **interval,
            **about,
        }
    for name in _EXACT:
        if name in known:
            unit = "bytes" if name.endswith("_bytes") else "count"
            yield {
                "name": f"{row.key} {name} @ {facts.key}",
                "unit": unit,
                "value": known[name],
                **about,
            }


def _charted(run: Run) -> Iterator[tuple[Row, dict[str, Any]]]:
    """The rows whose figures mean something, with them: not of tests that failed by themselves, nor under a profiler."""
    for row in run.rows:
        if row.test_error is not True and not (
            row.measurement is not None and row.measurement.profiled
        ):
            yield row, figures(row, run.facts)
