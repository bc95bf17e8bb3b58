"""`--gpumem-explain`: what a failed row's report adds about why it got slower, by what this process saw itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gpumem.records.row import Row
from pytest_gpumem.verdicts.causes import explain
from pytest_gpumem.verdicts.causes_figures import Evidence
from pytest_gpumem.verdicts.causes_measured import slow_down
from pytest_gpumem.verdicts.causes_report import text
from pytest_gpumem.verdicts.judge import comparable

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession


def explained(rows: Sequence[Row], session: GpuSession) -> list[str]:
    """What moved since the baseline, one text for each row that has one, each with the command for what counters would add."""
    said = []
    for row in rows:
        if row.measurement is None:
            continue
        past = [past for past in session.history(row).measurements if comparable(row.measurement, past)]
        if not past:
            continue
        # The newest process of the baseline is what the newest code did; its counts need the option as well.
        base, head = Evidence(past[-1], session.facts), Evidence(row.measurement, session.facts)
        found = explain(base, head, slow_down(past, row.measurement))
        lines = ["why: " + text(row.key, found)]
        if found.not_looked_at:
            lines.append(f"  for the rest: gpumem explain --base REVISION {shlex.quote(row.nodeid)}")
        said.append("\n".join(lines))
    return said
