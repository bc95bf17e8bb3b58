"""One self-contained HTML page of a run: nothing from the network, light and dark, all text escaped.

Its script and its style sheet are files of this package, without any text of the run. A content security policy names them by their
digests, so that a browser runs nothing else, whatever a name or a file contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import failing_in_themselves, is_failure
from pytest_gpumem.judging.latencies import base_latency
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Past, Row
from pytest_gpumem.reporting.concerns import worst_first
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.families import caption_of, colours, curve, families
from pytest_gpumem.reporting.footprints import growths, site_lines
from pytest_gpumem.reporting.groups import FINE, SLOWER, attention, behaviours, function_of, ordered
from pytest_gpumem.reporting.plots.bars import MOST, Delta, Rung, forest, ladder, timeline
from pytest_gpumem.reporting.plots.memory import MOST as MOST_TESTS
from pytest_gpumem.reporting.plots.memory import BytesOfTest, legend, memory_bars, memory_course
from pytest_gpumem.reporting.plots.runs import Load, history, roofline, strip, trend, turns
from pytest_gpumem.reporting.plots.svg import TEMPLATES, static
from pytest_gpumem.reporting.row_facts import OF_MEMORY, RowFacts, row_facts, short, shown_headings
from pytest_gpumem.reporting.run import Run
from pytest_gpumem.reporting.summary import counts_text, remedies
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import QuantityError, format_time, parse_margin, short_bytes

DIFFERENCES = 3  # of a row that needs a look


def anchor(key: str) -> str:
    """The element of a row, by `Row.key`: the same in every page, of letters and digits, so that links to it stay valid."""
    return f"t-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:12]}"


@dataclass(frozen=True)
class _Figure:
    """A plot with its caption, legend and notes."""

    caption: str
    plot: Markup
    legend: tuple[tuple[str, str], ...] = ()  # class of a colour, and the name of its series
    target: str = ""  # element of the page that the caption links to
    notes: tuple[str, ...] = ()


def page(run: Run) -> str:
    """The page."""
    rows, facts, past, footprints = printable(
        (list(run.rows), run.facts, dict(run.past), dict(run.footprints))
    )
    groups = ordered(rows, facts)
    shown = row_facts(worst_first(rows, footprints), facts)
    counts = Counter((one.outcome.rank, one.verdict, one.css) for one in shown)
    kinds = behaviours(rows, facts)
    headings = shown_headings(shown)
    simulated = facts.simulated or any(one.simulated for one in shown)
    style, script = static("report.css"), static("report.js")
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        title=f"{facts.name} (simulated)" if simulated else facts.name,
        simulated=simulated,
        taken=_taken(run),
        header=header(facts, run.settings),
        counts=[(verdict, count, css) for (_, verdict, css), count in sorted(counts.items())],
        kinds=[(kind.value, len(of)) for kind, of in groups],
        headings=headings,
        remarks=printable(list(run.remarks)),
        summary=counts_text(rows),
        remedies=remedies(rows, reasons=False),
        concerns=list(_concerns(shown, bool(run.settings.get("strict")))),
        rows=[
            _line(one, kinds[function_of(one.row)].value, headings, footprints.get(one.row.key))
            for one in shown
        ],
        figures=[*_of_suite(shown, facts, past), *_figures(shown, facts, footprints)],
        sections=[
            _section(one, past.get(one.row.key, ()), footprints.get(one.row.key)) for one in shown
        ],
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _taken(run: Run) -> str:
    """When the run was, to the minute, and the start of its revision."""
    utc = re.sub(r"T(\d\d:\d\d).*(\+00:00|Z)$", r" \1 UTC", run.utc)
    revision = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", printable(run.revision or ""))
    return f"{utc}, revision {revision}" if revision else utc


def _concerns(
    rows: Sequence[RowFacts], strict: bool
) -> Iterator[tuple[str, str, str, str, Sequence[str], str]]:
    """What needs a look, worst first: verdict, its class, test or row, reason, differences, and element of the page."""
    errors = failing_in_themselves([one.row for one in rows], strict)
    failed = Counter(
        one.row.nodeid
        for one in rows
        if one.row.nodeid in errors and one.row.verdict.outcome is not Outcome.FAIL
    )
    for one in rows:
        row, how_soon = one.row, attention(one.row)
        if row.nodeid in failed and row.verdict.outcome is not Outcome.FAIL:
            if count := failed[row.nodeid]:
                verdicts = (
                    "the verdict on its measurement"
                    if count == 1
                    else f"the verdicts on {count} measurements"
                )
                yield (
                    "TEST FAILED",
                    one.css,
                    row.nodeid,
                    f"the test failed by something else than {verdicts}",
                    (),
                    anchor(row.key),
                )
            failed[row.nodeid] = 0
        elif how_soon < FINE and (
            is_failure(row.verdict, strict) or not row.failed
        ):  # else another row fails the test
            verdict, css = ("SLOWER", "doubt") if how_soon == SLOWER else (one.verdict, one.css)
            yield (
                verdict,
                css,
                row.key,
                row.verdict.reason,
                why_lines(row)[:DIFFERENCES],
                anchor(row.key),
            )


def _line(
    one: RowFacts, kind: str, headings: Sequence[str], before: Footprint | None
) -> dict[str, object]:
    """One row of the table of results. Its figures have a text, a value to sort by, and what it was in the baseline."""
    was = {"change": _base_text(one.row), **dict(_memory_before(one.row.footprint, before))}
    share = one.figures["of peak"].value
    return {
        "name": one.name,
        "target": anchor(one.row.key),
        "kind": kind,
        "figures": [
            (
                heading,
                figure.text,
                "" if figure.value is None else f"{figure.value:.6g}",
                was.get(heading, ""),
            )
            for heading, figure in one.figures.items()
            if heading in headings
        ],
        "share": "" if share is None else f"{min(share, 1.0) * 40:.0f}",
        "verdict": one.verdict,
        "style": one.css,
        "unchecked": one.row.measurement is not None and not one.row.measurement.checked,
    }


def _base(row: Row) -> float | None:
    """Seconds of the baseline that a change is against."""
    measurement, comparison = row.measurement, row.verdict.comparison
    if (
        measurement is None or comparison is None or comparison.delta <= -1
    ):  # a damaged file may have such a change
        return None
    return base_latency(measurement, comparison)


def _base_text(row: Row) -> str:
    base, accesses = (
        _base(row),
        None if row.measurement is None else row.measurement.accesses_per_launch,
    )
    if base is None:
        return ""
    return f"{format_time(base / accesses)}/access" if accesses else format_time(base)


def _memory_before(now: Footprint | None, before: Footprint | None) -> Iterator[tuple[str, str]]:
    """By heading: the bytes of the baseline where they differ."""
    for heading, name in zip(OF_MEMORY, ("peak", "kept"), strict=True):
        if now is not None and before is not None and getattr(now, name) != getattr(before, name):
            yield heading, short_bytes(getattr(before, name))


def _section(one: RowFacts, past: Sequence[Past], before: Footprint | None) -> dict[str, object]:
    """The section of one row."""
    figures = []
    now = one.row.footprint
    changed = (
        [("since the baseline", line) for line in growths(before, now)]
        if before is not None and now is not None
        else []
    )
    measurement = one.row.measurement
    if measurement is not None:
        figures.append(
            _Figure("samples and medians", strip(measurement.placements, measurement.medians))
        )
        if past:
            figures.append(
                _Figure(
                    f"history: {counted(len(past), 'earlier run')}",
                    history(past, measurement.latency, measurement.half_width),
                )
            )
        if measurement.overlap is not None:
            figures.append(
                _Figure(
                    "parts alone and together", timeline(measurement.overlap, measurement.latency)
                )
            )
    if now is not None and now.timeline:
        caption = f"memory in use over the test, at most {short_bytes(now.peak)}"
        notes = tuple(site_lines(now, before))
        figures.append(_Figure(caption, memory_course(now), legend(now), notes=notes))
    return {
        "target": anchor(one.row.key),
        "name": one.name,
        "verdict": one.verdict,
        "style": one.css,
        "details": [
            ("test", one.row.key),
            ("verdict", one.row.verdict.reason),
            *one.facts(),
            *changed,
        ],
        "figures": figures,
    }


def _figures(
    rows: Sequence[RowFacts], facts: DeviceFacts, footprints: Mapping[str, Footprint]
) -> Iterator[_Figure]:
    """The plots over several rows."""
    if deltas := [delta for one in rows if (delta := _delta(one)) is not None]:
        most = f": the {MOST} of {len(deltas)} rows that changed most" if len(deltas) > MOST else ""
        yield _Figure(f"changes against the baseline{most}", forest(deltas))
    targets = {function_of(one.row): anchor(one.row.key) for one in reversed(rows)}
    drawn = list(families([one.row for one in rows if one.device == facts], facts))
    functions = list(dict.fromkeys(family.function for family in drawn))
    names = dict(zip(functions, short(functions), strict=True))
    for family in drawn:
        plot = curve(
            family.series,
            family.x_unit,
            family.unit,
            family.ceilings,
            caption_of(family),
            family.y_name,
        )
        legend = tuple(
            (f"{colour}{' predicted' if one.predicted else ''}", one.name)
            for one, colour in zip(family.series, colours(family.series), strict=True)
        )
        yield _Figure(
            f"{names[family.function]}: {caption_of(family)}",
            plot,
            legend,
            targets[family.function],
        )
    if len(rungs := [rung for one in rows if (rung := _rung(one)) is not None]) > 1:
        yield _Figure("latency of one access", ladder(rungs))
    yield from _memory(rows, footprints)


def _memory(rows: Sequence[RowFacts], before: Mapping[str, Footprint]) -> Iterator[_Figure]:
    """The tests that take most memory, and those that keep some."""
    note = ("The mark is the baseline.",)
    watched = [
        (one, one.row.footprint)
        for one in rows
        if one.row.footprint is not None and not one.row.label
    ]
    for caption, name in (
        ("most memory in use at once", "peak"),
        ("memory kept after the test", "kept"),
    ):
        was = {key: getattr(footprint, name) for key, footprint in before.items()}
        taken = [
            BytesOfTest(
                one.name, anchor(one.row.key), getattr(footprint, name), was.get(one.row.key)
            )
            for one, footprint in watched
        ]
        if taken := [one for one in taken if one.nbytes > 0]:
            most = f": {MOST_TESTS} of {len(taken)} tests" if len(taken) > MOST_TESTS else ""
            marked = any(one.before not in (None, one.nbytes) for one in taken)
            yield _Figure(f"{caption}{most}", memory_bars(taken), notes=note if marked else ())


def _of_suite(
    rows: Sequence[RowFacts], facts: DeviceFacts, past: Mapping[str, Sequence[Past]]
) -> Iterator[_Figure]:
    """The plots of the whole suite."""
    rows = [one for one in rows if one.device == facts]  # the peak and the history are of one GPU
    now = {
        one.row.key: one.row.measurement.latency for one in rows if one.row.measurement is not None
    }
    if len(now) > 1 and (earlier := turns(past, now)):
        note = "A line spans all rows, its dot is the median. Below zero, the run was faster than this one."
        rows_of_all = "all" if earlier[0].rows == len(now) else f"{earlier[0].rows} of {len(now)}"
        yield _Figure(
            f"{rows_of_all} rows over {counted(len(earlier), 'earlier run')}",
            trend(earlier),
            notes=(note,),
        )
    if len(loads := [load for one in rows if (load := _load(one, facts)) is not None]) > 1:
        legend = (
            (("s0", "served by DRAM"), ("s1", "footprint within reach of L2"))
            if len({load.dram for load in loads}) > 1
            else ()
        )
        yield _Figure(
            "bandwidth over the bytes of a launch", roofline(loads, facts.dram_peak or None), legend
        )


def _load(one: RowFacts, facts: DeviceFacts) -> Load | None:
    """A row of the roofline; None where bytes are unknown, cross the link, move as pages, or are asked for repeatedly."""
    measurement = one.row.measurement
    if (
        measurement is None
        or measurement.moved_bytes is None
        or not measurement.bandwidth
        or measurement.moved_bytes.total <= 0
    ):
        return None
    repeated = measurement.asked_bandwidth is not None or measurement.accesses_per_launch
    if (
        measurement.moved_bytes.link
        or measurement.managed
        or measurement.overlap is not None
        or repeated
    ):
        return None
    return Load(
        one.name,
        measurement.moved_bytes.total,
        measurement.bandwidth,
        measurement.not_of_dram(facts) is None,
    )


def _delta(one: RowFacts) -> Delta | None:
    row, past = one.row, one.row.verdict.comparison
    if past is None:
        return None
    margin, base = None, _base(row)
    if row.limits.max_regression is not None and base is not None:
        try:
            margin = parse_margin(row.limits.max_regression).over(base)
        except QuantityError:  # in a file that somebody else wrote: the verdict stays as it is
            margin = None
    reach = past.reach or 0.0
    low, high = past.delta - reach, past.delta + reach
    return Delta(one.name, anchor(one.row.key), past.delta, low, high, one.css, margin)


def _rung(one: RowFacts) -> Rung | None:
    measurement = one.row.measurement
    if (
        measurement is None
        or measurement.latency_per_access is None
        or not measurement.accesses_per_launch
    ):
        return None
    half = (
        measurement.half_width / measurement.accesses_per_launch
        if measurement.half_width is not None
        else None
    )
    return Rung(one.name, anchor(one.row.key), measurement.latency_per_access, half)
