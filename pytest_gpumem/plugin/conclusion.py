"""Why a session fails by its verdicts, and what to do."""

from __future__ import annotations

from pytest_gpumem.baselines.acceptances import absolute_limits, changes_of, command
from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.options import OptionRole, of_role
from pytest_gpumem.outcomes import Code, Exit
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.records.row import ROW, TEST, Row
from pytest_gpumem.reporting.conclusion import Conclusion, advice, failing_text
from pytest_gpumem.reporting.row import worst_first


def conclusion_of(session: GpuSession) -> Conclusion | None:
    """The conclusion of a session that fails by its verdicts; None of any other."""
    strict = session.settings.strict
    rows, failing = list(session.rows), list[Row]()
    for row in rows:
        if row.measured_something and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, rows))
    unjudged = open_under_strict(session.missing) if strict else []
    if unjudged:
        of_limits = not any(omission.what in (ROW, TEST) for omission in unjudged)
        thing = "limit" if of_limits else "expectation"
        causes.append(f"{counted(len(unjudged), thing)} not judged (--gpumem-strict)")
    if not causes:
        return None
    steps: list[tuple[str, str]] = []
    failing = worst_first(failing)
    if failing:
        acceptable, limits = [], list[str]()
        for row in failing:
            limits += absolute_limits(row)
            if row.test_error is not True and any(changes_of(row)):
                acceptable.append(row)
        accept = [command(row) for row in acceptable[:1]]
        steps = advice(_again(failing[0], session), accept, option=False, limits=limits)
    code = Exit.NO_VERDICT if session.broken and not failing else Exit.FAILED
    return Conclusion(code, causes, failing, session.missing, advice=steps)


def _again(row: Row, session: GpuSession) -> list[str]:
    """The command that measures a row again; of memory, with the lines that allocate it."""
    config = session.config
    left_out = {option.flag for option in of_role(OptionRole.SAVING)}
    words = ["pytest"]
    for word in map(str, config.invocation_params.args):
        if word not in config.option.file_or_dir and word not in left_out:
            words.append(word)
    of_memory = any(result.code is Code.TOO_MUCH_MEMORY for result in row.verdict.limits)
    if of_memory and session.settings.footprint != "trace":
        words.append("--gpumem-footprint=trace")
    return [*words, row.nodeid]
