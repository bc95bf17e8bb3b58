"""The end of a session: what is saved, why it fails by its verdicts, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pytest_gpumem.baselines.acceptances import absolute_limits, changes_of, command
from pytest_gpumem.baselines.store import untrusted
from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.options import BY_NAME
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import rows_of_table
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.records.row import ROW, TEST, Row
from pytest_gpumem.reporting.conclusion import Conclusion, advice, failing_text
from pytest_gpumem.reporting.row import worst_first


def conclusion_of(session: GpuSession) -> Conclusion | None:
    """The conclusion of a session that fails by its verdicts; None of any other."""
    strict = session.settings.strict
    rows, failing = rows_of_table(session), list[Row]()
    for row in session.rows:
        if row.measured_something and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, rows))
    unjudged = open_under_strict(session.missing) if strict else []
    if unjudged:
        of_limits = not any(omission.what in (ROW, TEST) for omission in unjudged)
        thing = "limit" if of_limits else "measurement"
        causes.append(f"{counted(len(unjudged), thing)} not judged (--gpumem-strict)")
    if not causes:
        return None
    steps: list[tuple[str, str]] = []
    failing = worst_first(failing)
    if failing:
        acceptable, limits = [], list[str]()
        for row in failing:
            limits += absolute_limits(row)
            if any(changes_of(row)):
                acceptable.append(row)
        accept = [command(row) for row in acceptable[:1]]
        steps = advice(_again(failing[0], session), accept, option=False, limits=limits)
    code = Exit.NO_VERDICT if session.broken and not failing else Exit.FAILED
    return Conclusion(code, causes, failing, session.missing, advice=steps)


def _again(row: Row, session: GpuSession) -> list[str]:
    """The command that measures a row again."""
    config = session.config
    words = ["pytest"]
    for word in config.invocation_params.args:
        if word not in (*config.option.file_or_dir, BY_NAME["save"].flag):
            words.append(str(word))
    return [*words, row.nodeid]


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
    saved = session.store.save(rows, revision, session.settings.mode, session.baseline)
    if saved.path is not None:
        stored = f"{saved.accepted} of {counted(len(rows), 'row')}"
        yield f"{stored} stored in {session.store.place}"
    elif saved.refused:
        yield "no row is stored"
    else:
        full = counted(saved.full, "row")
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
