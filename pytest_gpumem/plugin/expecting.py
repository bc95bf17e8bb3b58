"""The expectations of this session: measurements of the baseline, limits, tests of BASE."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.expectations import (
    Ending,
    Expectation,
    Selection,
    against_base,
    discharge,
    of_base,
)
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT
from pytest_gpumem.plugin.adoption import adopts
from pytest_gpumem.plugin.entries import words_of
from pytest_gpumem.plugin.marks import (
    BENCHMARK_FIXTURE,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    keywords_of,
    uses,
)
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import ACCEPTED, LOST, ROW, TEST, UNDECIDED, How, Omission, selects
from pytest_gpumem.records.schema import from_plain, to_plain
from pytest_gpumem.settings import (
    SELECTION,
    Settings,
    SettingsError,
    by_marker,
    marker_limits,
    merge_limits,
)

_OPTIONS = {  # by pytest's function or file that deselects: the option
    "deselect_by_keyword": "-k",
    "deselect_by_mark": "-m",
    "main.py": "--deselect",
    "cacheprovider.py": "--lf",
    "stepwise.py": "--sw",
}
_VALUES = {"-k": "keyword", "-m": "markexpr", "--lf": "lf", "--sw": "stepwise"}
"""By option: the name of its value."""
_PLUGIN, _PROJECT = "plugin", "project"  # whose hook deselects, if no option does


class ExpectationFeature(Feature):
    """Notes each expectation, and finds at the session's end those that nothing met."""

    name = "expectations"

    def __init__(self, session: GpuSession, workers: Workers) -> None:
        self._session = session
        self._tests: dict[str, Limits | None] = {}
        """By node id, before any test was deselected: its limits; None if nobody relies on it."""
        self._idle: set[str] = set()  # node ids of tests without a fixture that measures
        self._left_out: dict[str, list[str]] = {}
        """By node id of a deselected test: the option, or the plugin or project and its file."""
        self._modules: dict[str, tuple[How, str]] = {}
        """By node id of what was not collected: whether it failed or skipped, and why."""
        self._files: dict[str, str] = {}  # in a gate: SHA-256 of test files, by path in node ids
        self._selected: set[str] = set()  # node ids that were to run
        self._no_verdict: set[str] = set()
        """Of these, where a session only collects, those that a mark skips or expects to fail."""
        # The file for what is selected; not of a session that a test starts.
        self._writes = os.environ.pop(SELECTION, None)
        self._failures: dict[str, str] = {}  # as `Selection.failures`
        workers.carry("collected", self._seen, self._take)

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        """Wait until it is known what BASE selects."""
        if not session.config.option.collectonly:
            _ = self._session.base
        yield

    # What was collected

    def note(self, items: Iterable[pytest.Item]) -> None:
        """Take tests before any is deselected."""
        in_gate = self._writes is not None or self._session.in_gate
        for item in items:
            measures = uses(item, BENCHMARK_FIXTURE) or uses(item, MEMORY_FIXTURE)
            if not measures:
                self._idle.add(item.nodeid)
            limits = _limits_of(item, self._session.settings)
            relied_on = limits is not None and (measures or limits.origin)
            self._tests[item.nodeid] = limits if relied_on else None
            file = item.nodeid.partition("::")[0]
            if in_gate and file not in self._files:
                with suppress(OSError):  # a test of no file
                    self._files[file] = hashlib.sha256(item.path.read_bytes()).hexdigest()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed or not report.nodeid:
            return
        how: How = "not collected"
        reason = "its collection failed"
        if isinstance(report.longrepr, tuple):
            how, reason = "left out", report.longrepr[2].removeprefix("Skipped: ")
        else:
            last_line = str(report.longrepr).strip().rpartition("\n")[2]
            self._failures[report.nodeid] = last_line.removeprefix("E").strip() or reason
        self._modules[report.nodeid] = how, f"{report.nodeid} {report.outcome} ({reason})"

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.note(item for item in items if item.nodeid not in self._tests)
        by = _deselecting()
        for item in items:
            self._left_out[item.nodeid] = by

    def selected(self, session: pytest.Session) -> None:
        only_collects = session.config.option.collectonly and self._writes is not None
        for item in session.items:
            self._selected.add(item.nodeid)
            if only_collects and _has_no_verdict(item):
                self._no_verdict.add(item.nodeid)

    def _seen(self) -> list[Any]:
        tests = {nodeid: test and to_plain(test) for nodeid, test in self._tests.items()}
        selected, idle, unrun = sorted(self._selected), sorted(self._idle), self._session.unrun
        return [tests, self._left_out, self._modules, self._files, selected, idle, unrun]

    def _take(self, seen: list[Any]) -> None:
        """Take what a worker has collected; each collects the same."""
        tests, self._left_out, self._modules, self._files, selected, idle, unrun = seen
        self._selected.update(selected)
        self._idle.update(idle)
        self._session.unrun.update(unrun)
        for nodeid, test in tests.items():
            self._tests[nodeid] = test and from_plain(test, Limits)

    # What became of it

    def logged(self, report: pytest.TestReport) -> None:
        if self._writes is not None and report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr or "") if crash is None else crash.message
            first_line = text.strip().partition("\n")[0].removeprefix("Failed: ")
            self._failures.setdefault(report.nodeid, first_line or "failed")

    def write_selection(self) -> None:
        """Write what this session selects, also for other runners, if a gate wants it."""
        if self._writes is None:
            return
        from pytest_gpumem.reporting.markdown import places_of

        tests, others, plugins = {}, [], set()
        for nodeid, test in self._tests.items():
            kind, name = self._left_out.get(nodeid, ("", ""))
            if kind == _PLUGIN:
                plugins.add(name)
            elif nodeid not in self._selected:
                continue
            if nodeid in self._no_verdict:
                continue
            if test is None:
                others.append(nodeid)
            else:
                tests[nodeid] = test
        left_out = sorted({*self._no_verdict, *self._modules})
        places = places_of(self._session.config.rootpath, self._session.rows.places)
        selection = Selection(
            tests,
            tuple(self._idle.intersection(tests)),
            tuple(others),
            tuple(left_out),
            tuple(sorted(plugins)),
            self._files,
            self._failures,
            places,
            tuple(self._session.unrun),
        )
        write_whole(Path(self._writes), json.dumps(to_plain(selection)))

    def _expected(self) -> Iterator[Expectation]:
        """Measurements, tests, limits: the first one that is lost speaks for its test."""
        gpu = self._session
        for key, row in gpu.baseline.expected(gpu.settings.mode).items():
            if gpu.merged.why_gone(key) is None:
                yield Expectation(row.nodeid, label=row.label)
        if gpu.base is not None:
            yield from of_base(gpu.base, self._idle)
        for nodeid, of_test in self._tests.items():
            limits = gpu.binding_limits(nodeid, of_test or Limits())
            for name in LIMITS:
                # A limit of the session is about the GPU; a benchmark of the host uses none.
                free = nodeid in gpu.without_gpu and not by_marker(limits, name)
                if getattr(limits, name) is not None and not free:
                    yield Expectation(nodeid, name)

    def discharged(self, *, complete: bool) -> Iterator[Omission]:
        """What this session did not judge. `complete`: it collected all that it was to collect."""
        gpu = self._session
        ends, lost = dict[str, Ending](), set[str]()
        for expectation in self._expected():
            nodeid = expectation.nodeid
            if expectation.what != ROW and nodeid in lost:
                continue
            if nodeid not in ends:
                ends[nodeid] = self._ended(nodeid, complete=complete)
            ended = ends[nodeid]
            if gpu.base is not None:
                ended = against_base(ended, expectation, gpu.base, gpu.base_name)
            missing = discharge(expectation, gpu.rows.of(nodeid), ended)
            if missing is None:
                continue
            if expectation.what in (ROW, TEST):
                lost.add(nodeid)
            why_gone = gpu.added.why_gone(missing.key)
            if missing.status == LOST and why_gone is not None:
                missing = replace(missing, status=ACCEPTED, reason=why_gone)
            yield self._blameless(missing)

    def _blameless(self, missing: Omission) -> Omission:
        """What was not judged. Where a feature raised by mistake, no test is to blame."""
        gpu, broken = self._session, ", ".join(self._session.broken)
        reports = gpu.rows.tests.get(missing.nodeid)
        ran = reports is not None and reports.end is not None
        if missing.status not in (LOST, UNDECIDED) or not broken:
            return missing
        if not ran and VerdictFeature.name not in gpu.broken:
            return missing
        why = f"UNDECIDED: {broken} raised by mistake"
        return replace(missing, status=UNDECIDED, reason=why)

    @cached_property
    def _options(self) -> Any:
        """The options of the command line, without those of the ini file."""
        config = self._session.config
        return config._parser.parse_known_args(words_of(config))

    def _deselects(self, option: str, nodeid: str) -> bool:
        if option == "--deselect":
            return nodeid.startswith(tuple(self._options.deselect or ()))
        return bool(getattr(self._options, _VALUES.get(option, ""), None))

    def _ended(self, nodeid: str, *, complete: bool) -> Ending:
        """How a test ended, and who left it out."""
        gpu, reports = self._session, self._session.rows.tests.get(nodeid)
        config, options = gpu.config, self._options
        if reports is not None and reports.end is not None:
            if nodeid in gpu.unrun:
                return Ending("did not run", gpu.unrun[nodeid])
            return Ending(reports.end, reports.explained)
        if nodeid in self._left_out:
            kind, name = self._left_out[nodeid]
            by_words = kind == _PLUGIN or self._deselects(kind, nodeid)
            reason = f"deselected by {name}"
            if not by_words and kind != _PROJECT:
                reason += " of the ini file"
            return Ending("left out", reason, by_words, plugin=name if kind == _PLUGIN else "")
        for module, (how, why) in self._modules.items():
            if nodeid not in self._selected and (module == nodeid or selects(module, nodeid)):
                return Ending(how, why)
        if nodeid in self._selected or not complete:
            return Ending("not reached", "not reached")
        names = [_as_nodeid(argument, config) for argument in config.args]
        if not any(name == "." or selects(name, nodeid) for name in names):
            by_words = bool(options.file_or_dir)
            reason = "not in the arguments" if by_words else "outside of testpaths"
            return Ending("not asked for", reason, by_words)
        if self._deselects("--deselect", nodeid):
            return Ending("left out", "deselected by --deselect", by_words=True)
        if _ignored(nodeid, config):
            by_words = bool(options.ignore or options.ignore_glob)
            return Ending("left out", "ignored", by_words)
        return Ending("gone")


def _limits_of(item: pytest.Item, settings: Settings) -> Limits | None:
    """The limits that are about a test; None where they cannot be read."""
    try:
        marker = marker_limits(keywords_of(item))
        adopted = adopts(item, settings)
    except SettingsError:  # reported where the marker is read
        return None
    limits = merge_limits(None, marker, settings, LIMITS)
    values, origin = {}, {}
    for name in LIMITS:
        if name in OF_FOOTPRINT:
            about = uses(item, TEST_FIXTURE) and settings.footprint != "off"
        else:
            about = uses(item, BENCHMARK_FIXTURE) or (adopted and name in OF_MEASUREMENT)
        if getattr(limits, name) is not None and (about or by_marker(limits, name)):
            values[name], origin[name] = getattr(limits, name), limits.origin[name]
    return Limits(**values, origin=origin)


def _has_no_verdict(item: pytest.Item) -> bool:
    """True if a mark skips a test, or expects it to fail, on this machine."""
    from _pytest.skipping import evaluate_skip_marks, evaluate_xfail_marks  # nothing public tells

    try:
        return evaluate_skip_marks(item) is not None or evaluate_xfail_marks(item) is not None
    except pytest.fail.Exception:  # a condition that cannot be evaluated fails the test
        return False


def _deselecting() -> list[str]:
    """The option that deselects tests now, or whose hook does and its file; with its name."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
        if file.parent.name == "pluggy":
            continue
        if function in _OPTIONS or "_pytest" in file.parts:
            option = _OPTIONS.get(function) or _OPTIONS.get(file.name, file.stem)
            return [option, option]
        return [_PLUGIN if "site-packages" in file.parts else _PROJECT, file.name]
    return [_PROJECT, "a hook"]


def _ignored(nodeid: str, config: pytest.Config) -> bool:
    """True if the file of a test, or a folder above it, is ignored."""
    file = config.rootpath / nodeid.partition("::")[0]
    for path in (file, *file.parents):
        if path == config.rootpath:
            break
        if config.hook.pytest_ignore_collect(collection_path=path, config=config):
            return True
    return False


def _as_nodeid(argument: str, config: pytest.Config) -> str:
    """An argument of the command line as a node id, which begins at the root folder."""
    path, *names = argument.split("::")
    file = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
    return "::".join((Path(file).as_posix(), *names))
