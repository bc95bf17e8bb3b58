"""One self-contained HTML page of a run: no network, light and dark, everything escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.traffic import account
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.reporting.cells import COALESCED, HEADINGS, access_interval, cells_of, names_of, sectors
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import format_time

TEMPLATES = Path(__file__).with_name("templates")


def page(rows: Sequence[Row], facts: DeviceFacts, settings: Mapping[str, object], *, utc: str) -> str:
    """The page.

    Args:
        rows: in the order in which they are shown; failed ones too.
        facts: the device that was measured.
        settings: plain values that the run was taken under.
        utc: when, as ISO 8601.
    """
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    counts = Counter(row.verdict.outcome.value for row in rows)
    return environment.get_template("report.html").render(
        title=f"{facts.name}{' (simulated)' if facts.simulated else ''}",
        header=header(facts, settings),
        simulated=facts.simulated,
        utc=utc,
        counts=[(outcome.value, counts[outcome.value]) for outcome in Outcome if counts[outcome.value]],
        headings=HEADINGS,
        rows=[_shown(row, facts, name) for row, name in zip(rows, names_of(rows), strict=True)],
    )


def _shown(row: Row, facts: DeviceFacts, name: str) -> dict[str, object]:
    cells = cells_of(row, facts, name)
    outcome = Outcome.FAIL if row.failed else cells.outcome
    details: list[tuple[str, str]] = [("test", row.key), ("verdict", row.verdict.reason)]
    measurement = row.measurement
    if measurement is not None:
        details += [
            ("method", f"{measurement.mode}, {measurement.sampler}: {measurement.sampler_reason}"),
            ("placements", ", ".join(format_time(median) for median in measurement.medians)),
            ("samples", f"{len(measurement.samples)}, {measurement.discarded} discarded"),
            *((("access pattern", f"{asked} ({COALESCED} where coalesced)"),) if (asked := sectors(measurement)) else ()),
            *((("95 % interval", interval),) if (interval := access_interval(measurement)) else ()),
            *(("note", note) for note in measurement.notes),
        ]
        if (said := account(measurement, facts)) is not None:
            details.append(("traffic", said.sentence))
    return {
        "name": name,
        "figures": cells.figures,
        "verdict": cells.verdict,
        "kind": {Outcome.PASS: "pass", Outcome.FAIL: "fail"}.get(outcome, "doubt"),
        "details": details,
    }
