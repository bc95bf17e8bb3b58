"""The results of a session: what it did not judge, its summary, its files and its saved rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import (
    absolute_limits,
    changes_of,
    command,
    under_other_name,
)
from pytest_gpumem.baselines.store import Store, untrusted
from pytest_gpumem.files import revision_of, write_whole
from pytest_gpumem.judging.expectations import (
    NO_RESULT,
    Ending,
    Expectation,
    Selection,
    against_base,
    discharge,
    of_base,
    open_under_strict,
)
from pytest_gpumem.judging.finding import is_failure, mark
from pytest_gpumem.limits import LIMITS, of_the_test
from pytest_gpumem.options import BY_NAME
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.expecting import PLUGIN, PROJECT, ExpectationFeature
from pytest_gpumem.plugin.rows import rows_of_table
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.printable import printable
from pytest_gpumem.records import key_of, selects
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import ACCEPTED, LOST, ROW, TEST, UNDECIDED, Omission
from pytest_gpumem.reporting import markdown
from pytest_gpumem.reporting.conclusion import (
    Conclusion,
    Run,
    advice,
    conclusion_lines,
    counts_text,
    failing_text,
    missing_lines,
    more,
    seen_from,
    session_of,
)
from pytest_gpumem.reporting.row import worst_first
from pytest_gpumem.reporting.table import profiled_lines, table
from pytest_gpumem.reporting.terminal import columns, wrapped
from pytest_gpumem.revisions import DIRTY
from pytest_gpumem.units import counted, format_time


def finish(
    gpu: GpuSession, expectations: ExpectationFeature, report: Path | None, *, complete: bool
) -> bool:
    """Find what was not judged, save and write all files; return whether the session fails by that.
    `complete`: it collected all that it was to, and all its tests ran."""
    if expectations.writes is not None:
        _write_selection(expectations.writes, gpu, expectations)
    # A profiler forbids verdicts.
    if not gpu.config.option.collectonly and not gpu.ranges.tool_attached():
        gpu.missing.extend(Endings(gpu, expectations, complete).omissions())
    if not (gpu.rows or gpu.missing or gpu.settings.save or report):
        return False
    failed = gpu.settings.strict and bool(open_under_strict(gpu.missing))
    if gpu.settings.save:
        try:
            for line in _save(gpu, complete=complete):
                gpu.remark(f"--gpumem-save: {line}")
        except UserError as error:
            gpu.remark(f"--gpumem-save: {error}")
            failed = True
    if report and not _write_report(gpu, report):
        failed = True
    if os.environ.get("GITHUB_STEP_SUMMARY") and gpu.announces:
        why = markdown.summarise(markdown.page(_run(gpu)), os.environ)
        if why:
            gpu.remark(why)
    return failed


def _write_report(gpu: GpuSession, path: Path) -> bool:
    if not gpu.rows:
        gpu.remark(f"nothing was measured: {path} is not written")
        return True
    from pytest_gpumem.reporting import html

    try:
        write_whole(path, html.page(_run(gpu)))
    except OSError as error:
        gpu.remark(f"--gpumem-report: cannot write {path}: {error.strerror or error}")
        return False
    gpu.remark(f"--gpumem-report: wrote {path}")
    return True


def _run(gpu: GpuSession) -> Run:
    return Run(
        rows=list(gpu.rows),
        facts=gpu.facts,
        settings=gpu.settings.to_json(),
        utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        revision=revision_of(entries.commit_info(gpu.config)),
        past={row.key: gpu.baseline.past(row) for row in gpu.rows},
        remarks=missing_lines(gpu.missing),
        conclusion=_conclusion(gpu),
    )


def summarise(gpu: GpuSession, writer: pytest.TerminalReporter) -> None:
    """Print the results, the conclusion if it fails, and annotations."""
    rows = rows_of_table(gpu)
    lines: list[str] = []
    if rows and gpu.ranges.tool_attached():
        lines += profiled_lines(rows)
    elif rows:
        lines += table(
            rows,
            gpu.facts,
            width=columns(),
            colour=writer._tw.hasmarkup,
            every=writer.verbosity > 0,
            saved=gpu.settings.save or gpu.in_gate,
            memory=gpu.settings.footprint == "on",
        ).splitlines()
        lines += wrapped(counts_text(list(gpu.rows)), columns())
    ledger = gpu.ledger
    if ledger and ledger.spent:  # workers keep accounts
        spent, total = format_time(ledger.spent), format_time(ledger.total)
        lines.append(f"budget: {spent} of {total} spent on measuring")
    # Not wrapped: some end with a command to copy.
    if gpu.announces:  # else the gate does, which knows what BASE skips
        lines += missing_lines(gpu.missing)
    lines += gpu.remarks
    conclusion = _conclusion(gpu) if gpu.announces else None
    if conclusion:
        lines += conclusion_lines(conclusion, columns())
    if lines:
        writer.ensure_newline()  # so that the section's heading has no blank line below
        writer.section(f"gpumem: {printable(gpu.facts.name)}{mark(gpu.facts.simulated)}")
    for line in lines:  # pytest escapes all of a text that the output cannot encode
        writer.write_line(printable(line) if "\x1b" not in line else line)
    if os.environ.get("GITHUB_ACTIONS") == "true" and gpu.announces:
        root, places = gpu.config.rootpath, gpu.rows.places
        writer.ensure_newline()
        for line in markdown.workflow_commands(gpu.rows, root, places):
            writer.write_line(line)


def _conclusion(gpu: GpuSession) -> Conclusion | None:
    strict = gpu.settings.strict
    failing = []
    for row in gpu.rows:
        judged = row.measured_something and gpu.rows.tests[row.nodeid].end not in NO_RESULT
        if judged and is_failure(row.verdict, strict):
            failing.append(row)
    causes = []
    if failing:
        causes.append(failing_text(failing, gpu.rows))
    unjudged = open_under_strict(gpu.missing) if strict else []
    if unjudged:
        causes.append(f"{len(unjudged)} not judged (--gpumem-strict)")
    if not causes:
        return None
    failing = worst_first(failing)
    changed = [row for row in failing if any(changes_of(row))]
    limits, tests = list[str](), dict[str, None]()
    root, folder = gpu.config.rootpath, gpu.config.invocation_params.dir
    for row in failing:
        limits += absolute_limits(row)
        tests[seen_from(folder, row.nodeid, root)] = None
    accept = [command(row) + more(changed, 1) for row in changed[:1]]
    without = (*gpu.config.option.file_or_dir, BY_NAME["save"].flag)
    repeat = [session_of(tests, map(str, gpu.config.invocation_params.args), without)]
    steps = advice(repeat if failing else [], limits, accept)
    code = Exit.NO_VERDICT if gpu.broken and not failing else Exit.FAILED
    return Conclusion(
        code, causes, failing, gpu.missing, advice=steps, simulated=gpu.facts.simulated
    )


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
    if fork:
        yield f"nothing is stored of code that is not ours: {fork}"
        return
    revision = revision_of(entries.commit_info(gpu.config))
    saved = Store(gpu.place, gpu.facts).save(rows, revision, gpu.settings.mode, gpu.baseline)
    if saved.path:
        line = f"{saved.saved} of {counted(len(rows), 'row')} stored in {gpu.place}"
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


# What was not judged


def _write_selection(file: str, gpu: GpuSession, expectations: ExpectationFeature) -> None:
    tests, others, plugins = {}, [], set()
    for nodeid, test in expectations.limits.items():
        kind, name = expectations.left_out.get(nodeid, ("", ""))
        if kind == PLUGIN:
            plugins.add(name)
        elif nodeid not in expectations.to_run:
            continue
        if nodeid in expectations.no_verdict or nodeid in gpu.without_gpu:
            continue
        if test is None:
            others.append(nodeid)
        else:
            tests[nodeid] = test
    selection = Selection(
        tests,
        tuple(expectations.idle.intersection(tests)),
        tuple(others),
        tuple(sorted({*expectations.no_verdict, *expectations.modules})),
        tuple(sorted(plugins)),
        expectations.failures,
        gpu.rows.places,
        tuple(gpu.unrun),
        tuple(gpu.config.option.file_or_dir),
        str(gpu.config.rootpath),
    )
    write_whole(Path(file), json.dumps(msgspec.to_builtins(selection)))


class Endings:
    def __init__(self, gpu: GpuSession, expected: ExpectationFeature, complete: bool) -> None:
        self._session, self._expected, self._complete = gpu, expected, complete
        # The options of the command line, without those of the ini file.
        self._options: Any = gpu.config._parser.parse_known_args(entries.words_of(gpu.config))

    def _expectations(self) -> Iterator[Expectation]:
        """A lost row or test speaks for the limits of its test."""
        gpu = self._session
        for key, row in gpu.baseline.expected(gpu.settings.mode).items():
            if gpu.baseline.merged.why_gone(key) is None:
                yield Expectation(row.nodeid, label=row.label, unmeasured=not row.measurement)
        if gpu.base:
            yield from of_base(gpu.base, self._expected.idle)
        for nodeid, of_test in self._expected.limits.items():
            limits = gpu.binding_limits(nodeid, of_test or Limits())
            for name in LIMITS:
                # A limit of the session is about the GPU; a benchmark of the host uses none.
                free = nodeid in gpu.without_gpu and not of_the_test(limits.origin.get(name))
                if getattr(limits, name) is not None and not free:
                    yield Expectation(nodeid, name)

    def _omission(self, expectation: Expectation, nodeid: str) -> Omission | None:
        """`nodeid`: of its test now."""
        gpu = self._session
        ended = self._ended(nodeid)
        if gpu.base:
            ended = against_base(ended, expectation, gpu.base, gpu.base_name)
        return discharge(expectation._replace(nodeid=nodeid), gpu.rows.of(nodeid), ended)

    def omissions(self) -> Iterator[Omission]:
        gpu, lost = self._session, set[str]()
        added = gpu.baseline.added
        new_names = {old: new for new, old in added.old_names().items()}
        for expectation in self._expectations():
            nodeid = expectation.nodeid
            if expectation.what != ROW and nodeid in lost:
                continue
            missing = self._omission(expectation, nodeid)
            if not missing:
                continue
            # It may be renamed.
            now = self._omission(expectation, under_other_name(nodeid, new_names))
            if now and now.how != "gone":
                missing, nodeid = now, now.nodeid
            gone = missing.status == LOST and added.why_gone(missing.key, now is None)
            if gone:
                missing = replace(missing, status=ACCEPTED, reason=gone)
            whole = not gone or added.why_gone(key_of(nodeid, ""), now is None)
            if whole and expectation.what in (ROW, TEST):
                lost.add(nodeid)
            ran = nodeid in gpu.rows.tests and gpu.rows.tests[nodeid].end is not None
            # Where a feature raised by mistake, no test is to blame.
            to_blame = gpu.broken and (ran or VerdictFeature.name in gpu.broken)
            if to_blame and missing.status in (LOST, UNDECIDED):
                why = f"UNDECIDED: {', '.join(gpu.broken)} raised by mistake"
                missing = replace(missing, status=UNDECIDED, reason=why)
            yield missing

    def _deselects(self, option: str, nodeid: str) -> bool:
        value = getattr(self._options, option, None)
        if option == "deselect":
            return nodeid.startswith(tuple(value or ()))
        return bool(value)

    def _ended(self, nodeid: str) -> Ending:
        gpu, reports = self._session, self._session.rows.tests.get(nodeid)
        config, options, noted = gpu.config, self._options, self._expected
        if reports and reports.end:
            if nodeid in gpu.unrun:
                return Ending("did not run", gpu.unrun[nodeid])
            skipped = f"skipped ({reports.skip})" if reports.skip else "skipped"
            return Ending(reports.end, skipped if reports.end == "skipped" else reports.end)
        if nodeid in noted.left_out:
            kind, name = noted.left_out[nodeid]
            by_words = kind == PLUGIN or self._deselects(kind, nodeid)
            reason = f"deselected by {name}"
            if not by_words and kind != PROJECT:
                reason += " of the ini file"
            return Ending("left out", reason, by_words, plugin=name if kind == PLUGIN else "")
        for module, (how, why) in noted.modules.items():
            if selects(module, nodeid) and nodeid not in noted.to_run:
                return Ending(how, why)
        if nodeid in noted.to_run or not self._complete:
            return Ending("not reached", "not reached")
        root, folder = config.rootpath, config.invocation_params.dir
        names = [seen_from(root, argument, folder) for argument in config.args]
        if not any(name == "." or selects(name, nodeid) for name in names):
            by_words = bool(options.file_or_dir)
            reason = "not in the arguments" if by_words else "outside of testpaths"
            return Ending("not asked for", reason, by_words)
        if self._deselects("deselect", nodeid):
            return Ending("left out", "deselected by --deselect", by_words=True)
        plugin = config.pluginmanager.get_plugin("lfplugin")
        if getattr(plugin, "_last_failed_paths", None) and options.lf:  # else all run
            return Ending("left out", "deselected by --lf", by_words=True)
        if _ignored(nodeid, config):
            by_words = bool(options.ignore or options.ignore_glob)
            return Ending("left out", "ignored", by_words)
        return Ending("gone")


def _ignored(nodeid: str, config: pytest.Config) -> bool:
    file = Path(nodeid.partition("::")[0])
    for path in (file, *file.parents[:-1]):
        if config.hook.pytest_ignore_collect(collection_path=config.rootpath / path, config=config):
            return True
    return False
