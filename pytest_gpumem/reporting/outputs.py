"""The files that a run writes, whether a session, `gpumem gate` or `gpumem merge` writes them; and what GitHub shows of it.

What makes their text is imported when it is needed: most runs write none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.concerns import Place, code_quality, concerns, workflow_commands

if TYPE_CHECKING:
    from pytest_gpumem.reporting.plots.runs import Past


@dataclass(frozen=True)
class Run:
    """A run as its outputs see it."""

    rows: Sequence[Row]
    facts: DeviceFacts
    settings: Mapping[str, object]  # plain values that the run was taken under, by the names of the options
    utc: str  # time of the run, ISO 8601
    revision: str | None  # of the code that was measured; None if unknown
    past: Mapping[str, Sequence[Past]] = field(default_factory=dict)  # by `Row.key`, measurements of earlier runs, oldest first
    footprints: Mapping[str, Footprint] = field(default_factory=dict)  # by `Row.key`, of the newest run of the baseline
    sweeps: Sequence[tuple[str, Sweep]] = ()  # of persisting L2, each with its test's id
    places: Mapping[str, Place] = field(default_factory=dict)  # where tests are defined, by node id
    remarks: Sequence[str] = ()  # sentences about the run as a whole, such as lost measurements

    @property
    def annotations(self) -> list[str]:
        """GitHub's annotations."""
        return workflow_commands(concerns(self.rows), self.places)


def job_summary(run: Run) -> str:
    """The run in Markdown."""
    from pytest_gpumem.reporting import markdown

    return markdown.page(run.rows, run.facts, run.settings, remarks=run.remarks)


def _report(run: Run) -> str | None:
    if not run.rows:
        return None
    from pytest_gpumem.reporting import html

    return html.page(
        run.rows,
        run.facts,
        run.settings,
        utc=run.utc,
        past=run.past,
        footprints=run.footprints,
        sweeps=run.sweeps,
        revision=run.revision,
        remarks=run.remarks,
    )


def _code_quality(run: Run) -> str:
    return code_quality(concerns(run.rows), run.places)


OUTPUTS: Mapping[str, Callable[[Run], str | None]] = MappingProxyType(
    {"report": _report, "markdown": job_summary, "code_quality": _code_quality}
)
"""By the setting that names the file: the file's text, or None if a run without rows writes no such file."""
