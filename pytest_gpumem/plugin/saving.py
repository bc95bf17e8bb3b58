"""The end of a session with `--gpumem-save`: its rows become a run of the baseline."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pytest_gpumem.baselines.acceptances import changes_of, command
from pytest_gpumem.baselines.forks import untrusted
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.session import GpuSession


def save(session: GpuSession, *, complete: bool) -> Iterator[str]:
    """Save the rows of a session; yield lines about what is stored and what is not.

    `complete`: the session ran all that it was to run.
    Raises `BaselineError`: the run cannot be stored.
    """
    if not complete:
        yield "the session was interrupted, nothing is stored"
        return
    # Of tests that failed before they measured anything, pytest reports the failure.
    rows = [row for row in session.rows if row.measured_something]
    if not rows:
        yield "nothing was measured, nothing is stored"
        return
    fork = untrusted(os.environ)
    if fork is not None:
        yield f"nothing is stored of code that is not ours: {fork}"
        return
    revision = entries.revision(session.config)
    saved = session.store.save(rows, revision, session.settings.to_json(), session.baseline)
    if saved.path is not None:
        place = session.store.storage
        yield f"{len(saved.accepted)} of {counted(len(rows), 'row')} stored in {place}"
    elif saved.refused:
        yield "no row was accepted, nothing is stored"
    else:
        full = counted(len(saved.full), "row")
        yield f"nothing is stored: the reference of {full} is full, and nothing became faster"
    changed = []
    for row, why in saved.refused:
        yield f"refused {row.key}: {why}"
        # The session's last lines have the command for rows that fail.
        if any(changes_of(row)) and not is_failure(row.verdict, session.settings.strict):
            changed.append(row)
    if changed:
        more = f"; so for {len(changed) - 1} more" if len(changed) > 1 else ""
        yield f"to accept a change on purpose: {command(changed[0])}{more}"
