"""One self-contained HTML page of a run: no network, light and dark, everything that comes from names and files escaped.

Its script and its styles are files of this package without a word of the run in them. A policy in the page names them by their digests,
so that a browser runs nothing else, whatever a name or a file may hold.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.reporting.cells import HEADINGS, cells_of, is_simulated, names_of
from pytest_gpumem.reporting.details import details
from pytest_gpumem.reporting.families import families, said_of
from pytest_gpumem.reporting.groups import FINE, SLOWER, attention, behaviours, function_of, ordered
from pytest_gpumem.reporting.plots.curve import colours, curve
from pytest_gpumem.reporting.plots.forest import MOST, Delta, forest
from pytest_gpumem.reporting.plots.history import Past, history, of_what
from pytest_gpumem.reporting.plots.l2_grid import l2_grid
from pytest_gpumem.reporting.plots.ladder import Rung, ladder
from pytest_gpumem.reporting.plots.strip import strip
from pytest_gpumem.reporting.plots.timeline import timeline
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import QuantityError, parse_margin


def anchor(row: Row) -> str:
    """The same in every report of the same test and label, of letters and figures alone: a link to it can be kept."""
    return f"t-{hashlib.sha256(row.key.encode(errors='surrogatepass')).hexdigest()[:12]}"


TEMPLATES = Path(__file__).with_name("templates")
TEST_FAILED = "TEST FAILED"
"""Of a row whose verdict is none of a failure, in a test that failed."""


@dataclass(frozen=True)
class _Figure:
    """A plot with what stands around it."""

    caption: str
    plot: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """Class of a colour, and what it is."""
    target: str = ""
    """Element of the page that the caption leads to."""
    notes: tuple[str, ...] = ()


def page(
    rows: Sequence[Row],
    facts: DeviceFacts,
    settings: Mapping[str, object],
    *,
    utc: str,
    past: Mapping[str, Sequence[Past]] | None = None,
    sweeps: Sequence[tuple[str, Sweep]] = (),
    revision: str | None = None,
) -> str:
    """The page.

    Args:
        rows: of the run, failed ones too.
        facts: the device that was measured.
        settings: plain values that the run was taken under.
        utc: when, as ISO 8601.
        past: by `Row.key`, what was measured in other runs, oldest first.
        sweeps: of persisting L2, each with its test's id.
        revision: of the code that was measured; None if unknown.
    """
    rows, facts, sweeps, past, revision = printable((list(rows), facts, list(sweeps), dict(past or {}), revision))
    groups = ordered(rows, facts)
    shown = [row for _, of in groups for row in of]
    names = {row.key: name for row, name in zip(shown, names_of(shown), strict=True)}
    counts = Counter(_said(row) for row in rows)
    kinds = behaviours(rows, facts)
    style, script = _static("report.css"), _static("report.js")
    # The last column is of changes, which a first run has none of.
    headings = HEADINGS if any(row.verdict.comparison is not None for row in rows) else HEADINGS[:-1]
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("report.html").render(
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        title=facts.name,
        simulated=facts.simulated or any(is_simulated(row, facts) for row in rows),
        utc=utc,
        revision=revision,
        header=header(facts, settings),
        counts=[(said, counts[said], _class_of(said)) for said in sorted(counts, key=_rank_of)],
        kinds=[(kind.value, len(of)) for kind, of in groups],
        headings=headings,
        concerns=list(_concerns(shown)),
        rows=[_line(row, facts, names[row.key], kinds[function_of(row)].value, headings) for row in shown],
        figures=list(_figures(shown, facts, names, sweeps)),
        sections=[_section(row, facts, names[row.key], past.get(row.key, ())) for row in shown],
    )


@cache
def _static(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _said(row: Row) -> str:
    """The verdict of a row in one word or two; a pass in a test that failed is none."""
    outcome = row.verdict.outcome
    return TEST_FAILED if row.failed and outcome is not Outcome.FAIL else outcome.value


def _kind(row: Row) -> str:
    return _class_of(_said(row))


def _class_of(said: str) -> str:
    return {"PASS": "pass", "FAIL": "fail", TEST_FAILED: "fail"}.get(said, "doubt")


def _rank_of(said: str) -> tuple[int, str]:
    return {"fail": 0, "doubt": 1, "pass": 2}[_class_of(said)], said


def _concerns(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    """What a reader looks at first, worst first: a word, its class, what is concerned, why, and where there is more."""
    failed: dict[str, int] = Counter(row.nodeid for row in rows if _said(row) == TEST_FAILED)
    told = set()
    for row in sorted(rows, key=attention):
        said = _said(row)
        if said == TEST_FAILED:
            if row.nodeid not in told:
                told.add(row.nodeid)
                verdicts = (
                    "the verdict on its measurement" if failed[row.nodeid] == 1 else f"the verdicts on {failed[row.nodeid]} measurements"
                )
                why = f"the test failed by something else than {verdicts}"
                yield said, "fail", row.nodeid, why, anchor(row)
        elif attention(row) == SLOWER:
            yield "SLOWER", "doubt", row.key, row.verdict.reason, anchor(row)
        elif attention(row) < FINE:
            yield said, _kind(row), row.key, row.verdict.reason, anchor(row)


def _line(row: Row, facts: DeviceFacts, name: str, kind: str, headings: Sequence[str]) -> dict[str, object]:
    """One row of the table of results; `sort` are the figures by which it is sorted, None last."""
    cells, measurement = cells_of(row, facts, name), row.measurement
    share = measurement.share_of_peak(facts) if measurement is not None and cells.share else None
    sort = (
        measurement.latency if measurement is not None else None,
        (measurement.asked_bandwidth or measurement.bandwidth) if measurement is not None else None,
        share,
        measurement.noise if measurement is not None else None,
        row.verdict.comparison.delta if row.verdict.comparison is not None else None,
    )
    return {
        "name": name,
        "target": anchor(row),
        "kind": kind,
        "figures": [
            (heading, text, "" if value is None else f"{value:.6g}")
            for heading, text, value in zip(headings, cells.figures, sort, strict=False)
        ],
        "share": "" if share is None else f"{min(share, 1.0) * 40:.0f}",
        "said": _said(row),
        "style": _kind(row),
    }


def _section(row: Row, facts: DeviceFacts, name: str, past: Sequence[Past]) -> dict[str, Any]:
    """What is shown of one row by itself."""
    figures = []
    measurement = row.measurement
    if measurement is not None:
        figures.append(_Figure("samples and medians", strip(measurement.placements, measurement.medians)))
        if past:
            figures.append(_Figure(f"history: {of_what(past)}", history(past, measurement.latency, measurement.half_width)))
        if measurement.overlap is not None:
            figures.append(_Figure("parts alone and together", timeline(measurement.overlap, measurement.latency)))
    return {
        "target": anchor(row),
        "name": name,
        "said": _said(row),
        "style": _kind(row),
        "details": list(details(row, facts)),
        "figures": figures,
    }


def _figures(rows: Sequence[Row], facts: DeviceFacts, names: Mapping[str, str], sweeps: Sequence[tuple[str, Sweep]]) -> Iterator[_Figure]:
    """The plots over several rows."""
    if deltas := [delta for row in rows if (delta := _delta(row, names[row.key])) is not None]:
        most = f": the {MOST} of {len(deltas)} rows that changed most" if len(deltas) > MOST else ""
        yield _Figure(f"changes against the baseline{most}", forest(deltas))
    targets = {function_of(row): anchor(row) for row in reversed(rows)}
    for family in families(rows, facts):
        plot = curve(family.series, family.x_unit, family.unit, family.ceilings, said_of(family))
        legend = tuple(
            (f"{colour}{' predicted' if one.predicted else ''}", one.name)
            for one, colour in zip(family.series, colours(family.series), strict=True)
        )
        yield _Figure(f"{_short(family.function)}: {said_of(family)}", plot, legend, targets[family.function])
    if len(rungs := [rung for row in rows if (rung := _rung(row, names[row.key])) is not None]) > 1:
        yield _Figure("latency of one access", ladder(rungs))
    for nodeid, sweep in sweeps:
        yield _Figure(f"{_short(nodeid)}: persisting L2 of {sweep.target}", l2_grid(sweep), notes=sweep.sentences)


def _delta(row: Row, name: str) -> Delta | None:
    past, measurement = row.verdict.comparison, row.measurement
    if past is None:
        return None
    margin = None
    if row.limits.max_regression is not None and measurement is not None:
        try:
            margin = parse_margin(row.limits.max_regression).over(measurement.latency)
        except QuantityError:  # in a file that somebody else wrote: the verdict is as it is
            margin = None
    return Delta(name, anchor(row), past.delta, past.low, past.high, _kind(row), margin)


def _rung(row: Row, name: str) -> Rung | None:
    measurement = row.measurement
    if measurement is None or measurement.latency_per_access is None or not measurement.accesses_per_launch:
        return None
    half = measurement.half_width / measurement.accesses_per_launch if measurement.half_width is not None else None
    return Rung(name, anchor(row), measurement.latency_per_access, half)


def _short(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid
