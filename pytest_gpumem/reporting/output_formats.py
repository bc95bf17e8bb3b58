"""Rows for other programs: as CSV (RFC 4180), and for github-action-benchmark.

CSV has SI units, shares as fractions, and empty fields where unknown. In JSON every name ends with
the key of the GPU: no line of a chart mixes GPUs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.row import EXACT, OF_TIME, figures

if TYPE_CHECKING:
    from pytest_gpumem.reporting.conclusion import Run

_ABOUT = "utc revision gpu simulated key nodeid label verdict code failed mode sampler samples"
HEADINGS = (*_ABOUT.split(), "placements", *OF_TIME, *EXACT, "change", "reach", "reason")


def as_csv(run: Run) -> str:
    """A line for each row. A figure that a test added has a column at the end."""
    extra: dict[str, None] = {}
    for row in run.rows:
        extra.update(dict.fromkeys(row.extra))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_field(name) for name in (*HEADINGS, *extra)])
    for row in run.rows:
        known = {
            **figures(row, run.facts),
            "utc": run.utc,
            "revision": run.revision,
            "key": row.key,
            "nodeid": row.nodeid,
        }
        if row.verdict.code is not None:
            known["code"] = row.verdict.code.value
        values = [known.get(name) for name in HEADINGS]
        values += [row.extra.get(name) for name in extra]
        writer.writerow([_field(value) for value in values])
    return text.getvalue()


def _field(value: object) -> object:
    """A field of CSV: what a spreadsheet would take for a formula begins with an apostrophe."""
    if not isinstance(value, str):
        return value
    plain = printable(value)
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) else plain


def as_json(run: Run) -> str:
    """A JSON list of latencies in microseconds, bytes and counts, as github-action-benchmark's tool
    `customSmallerIsBetter` reads it."""
    entries: list[dict[str, object]] = []
    for row in run.rows:
        profiled = row.measurement is not None and row.measurement.profiled
        # The figures of a test that failed by itself mean nothing, nor those under a profiler.
        if not row.test_error and not profiled:
            entries += _entries(row, run.facts)
    return json.dumps(printable(entries), indent=1) + "\n"


def _entries(row: Row, facts: DeviceFacts) -> Iterator[dict[str, object]]:
    measured, known = row.measurement, figures(row, facts)
    about = [facts.name]
    if facts.driver:
        about.append(f"driver {facts.driver}")
    if measured is not None:
        about.append(measured.mode)
        entry: dict[str, object] = {
            "name": f"{row.key} latency @ {facts.key}",
            "unit": "us",
            "value": 1e6 * measured.latency,
        }
        if measured.half_width is not None:
            entry["range"] = f"± {1e6 * measured.half_width:.4g}"
        yield {**entry, "extra": ", ".join(about)}
    for name in EXACT:
        if name in known:
            yield {
                "name": f"{row.key} {name} @ {facts.key}",
                "unit": "bytes" if name.endswith("_bytes") else "count",
                "value": known[name],
                "extra": ", ".join(about),
            }
