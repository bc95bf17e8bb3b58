"""The expectations of this session, and the end of each: the measurements of the baseline, the limits on each test, the tests of BASE."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import pytest
from msgspec.structs import replace

from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.expectations import (
    Ending,
    Expectation,
    ExpectedTest,
    Selection,
    against_base,
    discharge,
    of_base,
)
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT
from pytest_gpumem.plugin import running
from pytest_gpumem.plugin.adoption import adopts
from pytest_gpumem.plugin.marks import (
    BENCHMARK_FIXTURE,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    marks_of,
    uses,
)
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import given, is_part
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import ACCEPTED, LOST, ROW, TEST, Omission, selects
from pytest_gpumem.records.schema import from_plain, to_plain
from pytest_gpumem.settings import (
    BASE_SELECTION,
    SELECTION,
    Settings,
    SettingsError,
    by_marker,
    marker_keywords,
    marker_limits,
    merge_limits,
)

IN_BASE = "base"  # what a part is given: what BASE selects
_DESELECTED_BY = {
    "deselect_by_keyword": "-k",
    "deselect_by_mark": "-m",
}  # by pytest's function, the option
_SHORT = ("-k", "-m")  # options whose value may follow at once: "-kname"


class CollectedTests(TypedDict):
    """What a process collected, as plain values."""

    tests: dict[str, dict[str, Any] | None]
    """By node id of each test that pytest saw, before any was deselected: a `ExpectedTest` as plain values; None if nobody relies on it."""
    left_out: dict[
        str, list[str]
    ]  # by node id of a deselected test: the option, or the file of the hook, that deselected it
    files: dict[str, str]  # by the path of a test file in node ids, its SHA-256
    modules: dict[
        str, str
    ]  # by node id of a module or package: why its collection failed or skipped


class ExpectationFeature(Feature):
    """Notes each expectation, and finds at the session's end those that nothing met. They fail a strict session."""

    name = "expectations"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._seen: CollectedTests = {"tests": {}, "left_out": {}, "files": {}, "modules": {}}
        self._selected: set[str] = set()  # node ids that were to run
        # of them, those that a mark skips or expects to fail; of a session that only collects
        self._no_verdict: set[str] = set()
        self._writes = os.environ.pop(
            SELECTION, None
        )  # the file for what is selected; not of a session that a test starts
        self._in_gate = self._writes is not None or session.in_gate

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        """Wait until it is known what BASE selects."""
        if not session.config.option.collectonly:
            _ = self._session.base
        yield

    # What was collected

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        relied_on = _relied_on(item, self._session.settings)
        self._seen["tests"][item.nodeid] = None if relied_on is None else to_plain(relied_on)
        file = item.nodeid.partition("::")[0]
        if self._in_gate and file not in self._seen["files"]:
            with suppress(OSError):  # a test of no file
                self._seen["files"][file] = hashlib.sha256(item.path.read_bytes()).hexdigest()

    def collected(self, report: pytest.CollectReport) -> None:
        if report.passed or not report.nodeid:
            return
        reason = (
            report.longrepr[2] if isinstance(report.longrepr, tuple) else "its collection failed"
        )
        self._seen["modules"][report.nodeid] = (
            f"{report.nodeid} {report.outcome} ({reason.removeprefix('Skipped: ')})"
        )

    def deselected(self, items: Sequence[pytest.Item]) -> None:
        by = _deselecting()
        for item in items:
            self._seen["left_out"][item.nodeid] = list(by)

    def selected(self, session: pytest.Session) -> None:
        self._selected.update(item.nodeid for item in session.items)
        if session.config.option.collectonly and self._writes is not None:
            self._no_verdict.update(item.nodeid for item in session.items if _has_no_verdict(item))

    def select(self, nodeids: Iterable[str]) -> None:
        """Take the tests that are to run, where another process collects them."""
        self._selected.update(nodeids)

    @property
    def seen(self) -> CollectedTests:
        """What this process has collected so far."""
        return self._seen

    def take(self, collected: CollectedTests) -> None:
        """Take what another process collected for this one; each collects the same."""
        self._seen = collected

    # What became of it

    def write_selection(self) -> None:
        """Write what this session selects, if somebody asked for it."""
        if self._writes is not None:
            write_whole(Path(self._writes), json.dumps(to_plain(self._selection())))

    def _selection(self) -> Selection:
        """What this session selects. What an installed plugin left out counts too: it is for another runner."""
        plugins = {
            nodeid: name
            for nodeid, (kind, name) in self._seen["left_out"].items()
            if kind == "plugin"
        }
        chosen = [
            nodeid
            for nodeid in self._seen["tests"]
            if nodeid in self._selected or nodeid in plugins
        ]
        tests = {
            nodeid: one
            for nodeid in chosen
            if nodeid not in self._no_verdict and (one := self._relied_on(nodeid)) is not None
        }
        return Selection(
            tests,
            tuple(
                nodeid
                for nodeid in chosen
                if nodeid not in tests and nodeid not in self._no_verdict
            ),
            tuple(sorted({*self._no_verdict, *self._seen["modules"]})),
            tuple(sorted({*plugins.values()})),
            self._seen["files"],
        )

    def _relied_on(self, nodeid: str) -> ExpectedTest | None:
        plain = self._seen["tests"].get(nodeid)
        return None if plain is None else from_plain(plain, ExpectedTest)

    def _expected(self) -> list[Expectation]:
        """Measurements before tests, and these before limits: the first one that is lost speaks for its test."""
        gpu = self._session
        expected = []
        for key, row in gpu.baseline.expected(gpu.settings.mode).items():
            if gpu.merged.why_gone(key) is None:
                expected.append(Expectation(row.nodeid, label=row.label))
        own = {nodeid: self._relied_on(nodeid) for nodeid in self._seen["tests"]}
        if gpu.base is not None:
            expected += of_base(
                gpu.base, {nodeid: one is not None and one.measures for nodeid, one in own.items()}
            )
        for nodeid, one in own.items():
            limits = gpu.held(nodeid, Limits() if one is None else one.limits)
            for name in LIMITS:
                # A limit of the session is about the GPU, which a benchmark of the host does not use.
                free = nodeid in gpu.without_gpu and not by_marker(limits, name)
                if getattr(limits, name) is not None and not free:
                    expected.append(Expectation(nodeid, name))
        return expected

    def discharged(self, *, complete: bool) -> Iterator[Omission]:
        """What this session did not judge, of all that was to be judged. `complete`: it collected all that it was asked for."""
        gpu = self._session
        ends, lost = dict[str, Ending](), set[str]()
        for one in self._expected():
            if one.what != ROW and one.nodeid in lost:
                continue
            if one.nodeid not in ends:
                ends[one.nodeid] = self._ended(one.nodeid, complete=complete)
            ended = ends[one.nodeid]
            if gpu.base is not None:
                ended = against_base(ended, one, gpu.base, gpu.base_name)
            missing = discharge(one, gpu.rows.of(one.nodeid), ended)
            if missing is not None:
                lost.update([one.nodeid] if one.what in (ROW, TEST) else [])
                reason = gpu.added.why_gone(missing.key)
                if missing.status == LOST and reason is not None:
                    missing = replace(missing, status=ACCEPTED, reason=reason)
                yield missing

    def _ended(self, nodeid: str, *, complete: bool) -> Ending:
        """How a test ended, and who left it out."""
        rows, words = self._session.rows, Words(self._session.config)
        end = rows.end(nodeid)
        if end is not None:
            how: Any = end
            return Ending(
                how,
                self._session.why_unrun if nodeid in self._session.unrun else rows.explain(nodeid),
            )
        if (by := self._seen["left_out"].get(nodeid)) is not None:
            kind, name = by
            of_words = words.deselect(kind, nodeid)
            whose = "" if of_words or kind in ("plugin", "project") else " of the ini file"
            return Ending(
                "left out",
                f"deselected by {name}{whose}",
                of_words,
                plugin=name if kind == "plugin" else "",
            )
        if nodeid in self._selected:
            return Ending("not reached", "not reached")
        module = next(
            (
                why
                for within, why in self._seen["modules"].items()
                if within == nodeid or selects(within, nodeid)
            ),
            None,
        )
        if module is not None:
            return Ending("left out", module)
        if not complete:
            return Ending("not reached", "not reached")
        if not any(name == "." or selects(name, nodeid) for name in words.tests):
            return Ending(
                "not asked for",
                "not named" if words.name_tests else "outside of testpaths",
                words.name_tests,
            )
        if words.selects_earlier(nodeid):
            return Ending("left out", "deselected by --deselect", by_words=True)
        if words.ignored(nodeid):
            return Ending("left out", "ignored", words.ignore)
        return Ending("gone")


class BaseOfGate:
    """What BASE selects, which the gate finds while its screen collects."""

    def __init__(self, known: str | dict[str, Any]) -> None:
        """`known`: as plain values, or the file that will have them."""
        self._known = known

    @cached_property
    def plain(self) -> dict[str, Any]:
        """As plain values, as soon as they are known. Ends the session if they never will be."""
        if not isinstance(self._known, str):
            return self._known
        file, gate = Path(self._known), os.getppid()
        while not file.exists():
            if os.getppid() != gate:
                pytest.exit("gpumem: the gate has ended", pytest.ExitCode.INTERRUPTED)
            time.sleep(0.01)
        plain: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8"))
        if plain is None:
            pytest.exit(
                "gpumem: the tests of BASE cannot be collected", pytest.ExitCode.INTERRUPTED
            )
        return plain

    def selection(self) -> Selection:
        return from_plain(self.plain, Selection)

    def given(self, here: bool) -> object:
        """For a worker. `here`: on this machine."""
        return self._known if here else self.plain


def base_of_gate(config: pytest.Config) -> BaseOfGate | None:
    """What BASE selects, in the screen of a gate and in its workers; None in other sessions, such as one that a test of a gate starts."""
    known = given(config, IN_BASE) if is_part(config) else os.environ.pop(BASE_SELECTION, None)
    return None if known is None else BaseOfGate(known)


def _relied_on(item: pytest.Item, settings: Settings) -> ExpectedTest | None:
    """The limits that somebody relies on for a test: those of its marker, and those of the session
    that its fixtures are about. None for a test without limits that does not measure."""
    try:
        marker = marker_limits(marker_keywords(marks_of(item)))
        adopted = adopts(item, settings)
    except SettingsError:  # reported where the marker is read
        return None
    limits = merge_limits(None, marker, settings, LIMITS)
    about = {
        name
        for name in LIMITS
        if uses(item, TEST_FIXTURE if name in OF_FOOTPRINT else BENCHMARK_FIXTURE)
    }
    if adopted:
        about.update(OF_MEASUREMENT)
    if settings.footprint == "off":
        about.difference_update(OF_FOOTPRINT)
    names = [
        name
        for name in LIMITS
        if getattr(limits, name) is not None and (name in about or by_marker(limits, name))
    ]
    measures = uses(item, BENCHMARK_FIXTURE) or uses(item, MEMORY_FIXTURE)
    if not names and not measures:
        return None
    kept = Limits(
        **{name: getattr(limits, name) for name in names},
        origin={name: limits.origin[name] for name in names},
    )
    return ExpectedTest(kept, measures)


def _has_no_verdict(item: pytest.Item) -> bool:
    """True for a test that a mark skips or expects to fail on this machine."""
    from _pytest.skipping import (
        evaluate_skip_marks,
        evaluate_xfail_marks,
    )  # there is no public way to ask

    try:
        return evaluate_skip_marks(item) is not None or evaluate_xfail_marks(item) is not None
    except pytest.fail.Exception:  # a condition that cannot be evaluated fails the test
        return False


def _deselecting() -> tuple[str, str]:
    """The option that deselects tests just now, or the kind and the name of the hook that does."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if file.parent.name == "pluggy" or str(file) in (__file__, running.__file__):
            continue
        if (option := _DESELECTED_BY.get(frame.f_code.co_name)) is not None:
            return option, option
        if "_pytest" in file.parts:
            option = {
                "main.py": "--deselect",
                "cacheprovider.py": "--lf",
                "stepwise.py": "--sw",
            }.get(file.name, file.stem)
            return option, option
        return ("plugin" if "site-packages" in file.parts else "project"), file.name
    return "project", "a hook"


class Words:
    """The words of the command line, with those of PYTEST_ADDOPTS, as whoever started the session wrote them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._words = [
            *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
            *map(str, config.invocation_params.args),
        ]
        self.name_tests = any(argument in self._words for argument in config.args)
        """True if they name the tests; else the ini file does, or the folder is searched."""
        self.tests = [
            self._nodeid(argument) for argument in config.args
        ]  # what is asked for, as node ids
        self.ignore = self._has("--ignore", "--ignore-glob")

    def _has(self, *options: str) -> bool:
        return any(
            word == option
            or word.startswith(f"{option}=")
            or (option in _SHORT and word.startswith(option))
            for word in self._words
            for option in options
        )

    def deselect(self, by: str, nodeid: str) -> bool:
        """True if these words deselected a test, by an option or a plugin; a hook of the project is none of them."""
        if by == "--deselect":
            return self.selects_earlier(nodeid)
        return by == "plugin" or self._has(
            by, *{"--lf": ("--last-failed",), "--sw": ("--stepwise",)}.get(by, ())
        )

    def selects_earlier(self, nodeid: str) -> bool:
        """True if `--deselect` among these words names a test, also one that is no longer there."""
        values = [word.partition("=")[2] for word in self._words if word.startswith("--deselect=")]
        values += [
            value
            for word, value in zip(self._words, self._words[1:], strict=False)
            if word == "--deselect"
        ]
        return any(nodeid.startswith(value) for value in values)

    def ignored(self, nodeid: str) -> bool:
        """True if pytest does not look for tests in the test's file."""
        config = self._config
        file = config.rootpath / nodeid.partition("::")[0]
        within = [file, *(folder for folder in file.parents if config.rootpath in folder.parents)]
        return any(
            config.hook.pytest_ignore_collect(collection_path=path, config=config)
            for path in within
        )

    def _nodeid(self, argument: str) -> str:
        """An argument of the command line as a node id, which begins at the root folder."""
        path, *names = argument.split("::")
        file = os.path.relpath(self._config.invocation_params.dir / path, self._config.rootpath)
        return "::".join((Path(file).as_posix(), *names))
