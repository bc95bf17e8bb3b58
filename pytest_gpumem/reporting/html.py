"""One self-contained HTML page of a run: nothing from the network, all text escaped.

A content security policy names its script and its style sheet by their digests: a browser runs
nothing else, whatever a name or a file contains.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpumem.judging.finding import mark
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Past
from pytest_gpumem.reporting.charts import of_saved_runs, of_tests
from pytest_gpumem.reporting.conclusion import Run, run_lines
from pytest_gpumem.reporting.details import details
from pytest_gpumem.reporting.row import RowView, headings_of, views, worst_first
from pytest_gpumem.reporting.table import counts_text
from pytest_gpumem.reporting.terminal import header

TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 120  # columns of the conclusion
_CLASSES = {Outcome.PASS: "pass", Outcome.FAIL: "fail", Outcome.MEASURED: "measured"}


def anchor(key: str) -> str:
    """The element of a row, by `Row.key`: the same in every page, so that links stay valid."""
    return f"t-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:12]}"


def page(run: Run) -> str:
    rows, facts, past = printable((list(run.rows), run.facts, dict(run.past)))
    shown = views(worst_first(rows), facts)
    headings = headings_of(shown)
    simulated = facts.simulated or any(view.simulated for view in shown)
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    counts = Counter((view.outcome.rank, view.verdict, _css(view)) for view in shown)
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        title=f"{facts.name}{mark(simulated)}",
        simulated=simulated,
        taken=printable(f"{run.utc[:16].replace('T', ' ')} UTC, revision {run.revision}"),
        header=header(facts, run.settings),
        counts=[(verdict, count, css) for (_, verdict, css), count in sorted(counts.items())],
        headings=headings,
        conclusion="\n".join(run_lines(run, WIDTH)),
        summary=counts_text(rows),
        rows=[_line(view, headings) for view in shown],
        charts=of_tests(views(rows, facts)),
        sections=[_section(view, facts, past.get(view.row.key, ())) for view in shown],
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _css(view: RowView) -> str:
    return _CLASSES.get(view.outcome, "doubt")


def _line(view: RowView, headings: Sequence[str]) -> dict[str, object]:
    """A row of the table of results, with values to sort by."""
    cells = []
    for heading in headings:
        text, value = "", ""
        if heading in view.figures:
            text, value = view.figures[heading].text, f"{view.figures[heading].value:.6g}"
        cells.append((heading, text, value))
    checked = view.row.measurement is None or view.row.measurement.checked
    return {
        "name": view.name,
        "target": anchor(view.row.key),
        "figures": cells,
        "verdict": view.verdict,
        "style": _css(view),
        "unchecked": not checked,
    }


def _section(view: RowView, facts: DeviceFacts, past: Sequence[Past]) -> dict[str, object]:
    terms = [("test", view.row.key), ("verdict", view.row.verdict.reason)]
    terms += details(view.row, facts)
    return {
        "target": anchor(view.row.key),
        "name": view.name,
        "verdict": view.verdict,
        "style": _css(view),
        "details": terms,
        "chart": of_saved_runs(view.row, past),
    }
