"""The results of a session: its summary, its files and its saved rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pytest_gpumem.baselines.acceptances import absolute_limits, changes_of, command
from pytest_gpumem.baselines.store import untrusted
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.judging.finding import is_failure
from pytest_gpumem.options import BY_NAME
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import rows_of_table
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting import markdown
from pytest_gpumem.reporting.conclusion import (
    Conclusion,
    Run,
    advice,
    conclusion_lines,
    failing_text,
    missing_lines,
)
from pytest_gpumem.reporting.row import worst_first
from pytest_gpumem.reporting.table import profiled_lines
from pytest_gpumem.reporting.terminal import columns
from pytest_gpumem.revisions import DIRTY
from pytest_gpumem.units import counted, format_time


def write(gpu: GpuSession, report: Path | None, *, complete: bool) -> bool:
    """Save and write all files; False if that fails. `complete`: all its tests ran."""
    written = True
    if gpu.settings.save:
        try:
            for line in _save(gpu, complete=complete):
                gpu.remark(f"--gpumem-save: {line}")
        except UserError as error:
            gpu.remark(f"--gpumem-save: {error}")
            written = False
    if report is not None and not _write_report(gpu, report):
        written = False
    if os.environ.get("GITHUB_STEP_SUMMARY") and gpu.announces:
        failed = markdown.summarise(markdown.page(_run(gpu)), os.environ)
        if failed is not None:
            gpu.remark(failed)
    return written


def _write_report(gpu: GpuSession, path: Path) -> bool:
    if not len(gpu.rows):
        gpu.remark(f"nothing was measured: {path} is not written")
        return True
    from pytest_gpumem.reporting import html

    try:
        write_whole(path, html.page(_run(gpu)))
    except OSError as error:
        gpu.remark(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
        return False
    if gpu.announces:  # a gate names its files
        gpu.remark(f"--gpumem-report: wrote {path}")
    return True


def _run(gpu: GpuSession) -> Run:
    return Run(
        rows=list(gpu.rows),
        facts=gpu.facts,
        settings=gpu.settings.to_json(),
        utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        revision=entries.revision(gpu.config),
        past={row.key: gpu.baseline.past(row) for row in gpu.rows},
        remarks=missing_lines(gpu.missing),
        conclusion=_conclusion(gpu),
    )


def summarise(gpu: GpuSession, writer: pytest.TerminalReporter) -> None:
    """Print the results, the conclusion of a session that fails, and annotations."""
    rows = rows_of_table(gpu)
    lines: list[str] = []
    if rows and gpu.ranges.tool_attached():
        lines += profiled_lines(rows)
    elif rows:
        from pytest_gpumem.reporting.table import table

        drawn = table(
            rows,
            gpu.facts,
            width=columns(),
            colour=writer._tw.hasmarkup,
            every=writer.verbosity > 0,
            saved=gpu.settings.save or gpu.in_gate,
            memory=gpu.settings.footprint == "on",
        )
        lines += drawn.splitlines()
    ledger = gpu.ledger
    if ledger is not None and ledger.spent:  # workers keep accounts
        spent, total = format_time(ledger.spent), format_time(ledger.total)
        lines.append(f"budget: {spent} of {total} spent on measuring")
    # Not wrapped: some end with a command to copy.
    lines += [*missing_lines(gpu.missing), *gpu.remarks]
    conclusion = _conclusion(gpu) if gpu.announces else None
    if conclusion is not None:
        lines += conclusion_lines(conclusion, columns())
    if lines:
        simulated = " (simulated)" if gpu.facts.simulated else ""
        writer.ensure_newline()  # so that the section's heading has no blank line below
        writer.section(f"gpumem: {printable(gpu.facts.name)}{simulated}")
    for line in lines:  # pytest escapes all of a text that the output cannot encode
        writer.write_line(printable(line) if "\x1b" not in line else line)
    if os.environ.get("GITHUB_ACTIONS") == "true" and gpu.announces:
        places = markdown.places_of(gpu.config.rootpath, gpu.rows.places)
        writer.ensure_newline()
        for line in markdown.workflow_commands(gpu.rows, places):
            writer.write_line(line)


def _conclusion(gpu: GpuSession) -> Conclusion | None:
    """The conclusion of a session that fails by its verdicts; None of any other."""
    strict = gpu.settings.strict
    failing = []
    for row in gpu.rows:
        if row.measured_something and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, rows_of_table(gpu)))
    unjudged = open_under_strict(gpu.missing) if strict else []
    if unjudged:
        causes.append(f"{len(unjudged)} not judged (--gpumem-strict)")
    if not causes:
        return None
    steps: list[tuple[str, str]] = []
    failing = worst_first(failing)
    if failing:
        accept, limits = list[str](), list[str]()
        for row in failing:
            limits += absolute_limits(row)
            if any(changes_of(row)) and not accept:
                accept.append(command(row))
        steps = advice(_again(failing[0], gpu), accept, limits=limits)
    code = Exit.NO_VERDICT if gpu.broken and not failing else Exit.FAILED
    return Conclusion(code, causes, failing, gpu.missing, advice=steps)


def _again(row: Row, gpu: GpuSession) -> list[str]:
    config = gpu.config
    words = ["pytest"]
    for word in config.invocation_params.args:
        if word not in (*config.option.file_or_dir, BY_NAME["save"].flag):
            words.append(str(word))
    return [*words, row.nodeid]


def _save(gpu: GpuSession, *, complete: bool) -> Iterator[str]:
    """Save the rows of a session; yield lines about it. Raises `UserError`."""
    if not complete:
        yield "the session was interrupted, nothing is stored"
        return
    # Of tests that failed before they measured anything, pytest reports the failure.
    rows = [row for row in gpu.rows if row.measured_something]
    if not rows:
        yield "nothing was measured, nothing is stored"
        return
    fork = untrusted(os.environ)
    if fork is not None:
        yield f"nothing is stored of code that is not ours: {fork}"
        return
    revision = entries.revision(gpu.config)
    saved = gpu.store.save(rows, revision, gpu.settings.mode, gpu.baseline)
    if saved.path is not None:
        line = f"{saved.saved} of {counted(len(rows), 'row')} stored in {gpu.store.place}"
        if str(revision).endswith(DIRTY):
            line += " with uncommitted changes: no gate uses it"
        yield line
    elif saved.refused:
        yield "no row is stored"
    else:
        full = counted(saved.full, "row")
        yield f"nothing is stored: the reference of {full} is full, and nothing became faster"
    for row, why in saved.refused:
        yield f"refused {row.key}: {why}"
