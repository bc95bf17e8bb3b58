"""What a session collects: its tests with their limits, and what options and plugins leave out.

`results.Endings` finds what nothing judged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT, of_the_test
from pytest_gpumem.plugin.adoption import adopts
from pytest_gpumem.plugin.marks import (
    BENCHMARK_FIXTURE,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    keywords_of,
    uses,
)
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.settings import SELECTION, Settings, SettingsError, marker_limits, merge_limits

if TYPE_CHECKING:
    from pytest_gpumem.records.row import How

_OPTIONS = {  # by pytest's function or file that deselects: the option's name, and its flag
    "deselect_by_keyword": ["keyword", "-k"],
    "deselect_by_mark": ["markexpr", "-m"],
    "main.py": ["deselect", "--deselect"],
    "cacheprovider.py": ["lf", "--lf"],
    "stepwise.py": ["stepwise", "--sw"],
}
PLUGIN, PROJECT = "plugin", ""  # whose hook deselects; no option's name


class ExpectationFeature(Feature):
    """Notes the tests before any is deselected, with what a session has to judge of them."""

    name = "expectations"

    def __init__(self, session: GpuSession, workers: Workers) -> None:
        self._session = session
        self.limits: dict[str, Limits | None] = {}
        """By node id, before any test was deselected: its limits; None if nobody relies on it."""
        self.idle: set[str] = set()  # node ids of tests without a fixture that measures
        self.left_out: dict[str, list[str]] = {}
        """By node id of a deselected test: name and flag of the option, or whose hook and file."""
        self.modules: dict[str, tuple[How, str]] = {}
        """By node id of what was not collected: whether it failed or skipped, and why."""
        self.to_run: set[str] = set()  # node ids of the selected tests
        self.no_verdict: set[str] = set()
        """Of these, where a session only collects, those that a mark skips or expects to fail."""
        self.failures: dict[str, str] = {}  # as `Selection.failures`
        # The file for what is selected; not of a session that a test starts.
        self.writes = os.environ.pop(SELECTION, None)
        workers.carry("collected", self._seen, self._take)

    @property
    def exist(self) -> bool:
        """True if something may be expected by the baseline, by BASE, or by a limit on a test."""
        gpu = self._session
        return gpu.has_past or self.writes is not None or any(self.limits.values())

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        """Wait until it is known what BASE selects."""
        if not session.config.option.collectonly:
            _ = self._session.base
        yield

    # What was collected

    def note(self, items: Iterable[pytest.Item]) -> None:
        """Take tests before any is deselected."""
        for item in items:
            measures = uses(item, BENCHMARK_FIXTURE) or uses(item, MEMORY_FIXTURE)
            if not measures:
                self.idle.add(item.nodeid)
            limits = _limits_of(item, self._session.settings)
            relied_on = limits is not None and (measures or limits.origin)
            self.limits[item.nodeid] = limits if relied_on else None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed or not report.nodeid:
            return
        how: How = "not collected"
        reason = "its collection failed"
        if isinstance(report.longrepr, tuple):
            how, reason = "left out", report.longrepr[2].removeprefix("Skipped: ")
        else:
            last_line = str(report.longrepr).strip().rpartition("\n")[2]
            self.failures[report.nodeid] = last_line.removeprefix("E").strip() or reason
        self.modules[report.nodeid] = how, f"{report.nodeid} {report.outcome} ({reason})"

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.note(item for item in items if item.nodeid not in self.limits)
        by = _deselecting()
        for item in items:
            self.left_out[item.nodeid] = by

    def selected(self, session: pytest.Session) -> None:
        only_collects = session.config.option.collectonly and self.writes is not None
        for item in session.items:
            self.to_run.add(item.nodeid)
            if only_collects and _has_no_verdict(item):
                self.no_verdict.add(item.nodeid)

    def _seen(self) -> list[Any]:
        to_run, idle, unrun = sorted(self.to_run), sorted(self.idle), self._session.unrun
        limits = msgspec.to_builtins(self.limits)
        return [limits, self.left_out, self.modules, to_run, idle, unrun]

    def _take(self, seen: list[Any]) -> None:
        """Take what a worker has collected; each collects the same."""
        limits, self.left_out, self.modules, to_run, idle, unrun = seen
        self.limits.update(msgspec.convert(limits, dict[str, Limits | None]))
        self.to_run.update(to_run)
        self.idle.update(idle)
        self._session.unrun.update(unrun)

    # What became of it

    def logged(self, report: pytest.TestReport) -> None:
        if self.writes is not None and report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr or "") if crash is None else crash.message
            first_line = text.strip().partition("\n")[0].removeprefix("Failed: ")
            self.failures.setdefault(report.nodeid, first_line or "failed")


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
        about = about or of_the_test(limits.origin.get(name))
        if about and getattr(limits, name) is not None:
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
            return _OPTIONS.get(function) or _OPTIONS.get(file.name, [file.stem, file.stem])
        return [PLUGIN if "site-packages" in file.parts else PROJECT, file.name]
    return [PROJECT, "a hook"]
