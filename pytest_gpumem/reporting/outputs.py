"""The files that a run can write besides its results. A new format needs its own module, an entry here, and an option of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting import markdown
from pytest_gpumem.reporting.concerns import Place, code_quality, concerns
from pytest_gpumem.reporting.plots.samples import Past


@dataclass(frozen=True)
class Run:
    """A run as its outputs see it."""

    rows: Sequence[Row]
    facts: DeviceFacts
    settings: Mapping[str, object]
    """Plain values that the run was taken under, by the names of the options."""
    utc: str
    """Time of the run, ISO 8601."""
    revision: str | None
    """Of the code that was measured; None if unknown."""
    past: Mapping[str, Sequence[Past]]
    """By `Row.key`, measurements of earlier runs, oldest first."""
    sweeps: Sequence[tuple[str, Sweep]]
    """Of persisting L2, each with its test's id."""
    places: Mapping[str, Place]
    """Where tests are defined, by node id."""
    remarks: Sequence[str]
    """Sentences about the run as a whole, such as lost measurements."""


def job_summary(run: Run) -> str:
    """The run in Markdown."""
    return markdown.page(run.rows, run.facts, run.settings, remarks=run.remarks)


def _report(run: Run) -> str | None:
    if not run.rows:
        return None
    from pytest_gpumem.reporting import html  # here: most runs write no report, and Jinja2 takes long to import

    return html.page(run.rows, run.facts, run.settings, utc=run.utc, past=run.past, sweeps=run.sweeps, revision=run.revision)


def _code_quality(run: Run) -> str:
    return code_quality(concerns(run.rows), run.places)


OUTPUTS: Mapping[str, Callable[[Run], str | None]] = MappingProxyType(
    {"report": _report, "markdown": job_summary, "code_quality": _code_quality}
)
"""By the setting that names the file: the file's text, or None if a run without rows writes no such file."""
