"""One test from setup to its report: device memory, ranges, verdicts."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from _pytest.warnings import catch_warnings_for_item

from pytest_gpumem.devices.protocol import PLENTY, ContextLost, DeviceError, Unsupported
from pytest_gpumem.measuring.bound import BadCall, NoSuchKernel
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import BadBuffer
from pytest_gpumem.memory.l2 import BadWindow, LeftoverWarning
from pytest_gpumem.plugin.judging import explained, judge_test, unmeasured, why_text
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, KERNELS_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.replay import NotOurTimer, attach_timer
from pytest_gpumem.plugin.reported import BY_LIMITS_ATTRIBUTE, ROWS_ATTRIBUTE, Attempts, broken_limits, failure_texts, short_texts
from pytest_gpumem.plugin.result import NoTraffic
from pytest_gpumem.plugin.state import ROWS, TEST, GpuSession
from pytest_gpumem.plugin.tracing import memory_texts
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import phase
from pytest_gpumem.records.device import UnknownPeak
from pytest_gpumem.records.schema import row_to_json
from pytest_gpumem.reporting.exports import PROPERTY
from pytest_gpumem.settings import ANNOUNCE, SettingsError, switched_off
from pytest_gpumem.units import QuantityError

_PACKAGE = Path(__file__).resolve().parent.parent


def _frames(traceback: TracebackType | None, test_file: Path, root: Path) -> Iterator[tuple[TracebackType, Path, bool]]:
    """The frames of a traceback from the outermost one, with their files, and whether the code is the user's own."""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        theirs = file.is_relative_to(root) and "site-packages" not in file.parts and not file.is_relative_to(_PACKAGE)
        yield traceback, file, theirs or file == test_file
        traceback = traceback.tb_next


def where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's own line that led to an error; empty if there is none."""
    found = ""
    for frame, file, theirs in _frames(traceback, test_file, root):
        if theirs:
            found = f"{file.relative_to(root) if file.is_relative_to(root) else file}:{frame.tb_lineno}: "
    return found


def theirs_alone(traceback: TracebackType | None, test_file: Path, root: Path) -> TracebackType | None:
    """A traceback without the frames of this package through which the user's code was called; those that the user's code called stay."""
    kept: TracebackType | None = None
    called = False  # True outside of the user's innermost frame
    for frame, file, theirs in reversed([*_frames(traceback, test_file, root)]):
        called = called or theirs
        if not called or not file.is_relative_to(_PACKAGE):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


MISTAKES = (
    BadCall,
    NoSuchKernel,
    BadBuffer,
    BadWindow,
    NoTraffic,
    NotOurTimer,
    SettingsError,
    QuantityError,
    DeviceError,
    UnknownPeak,
)
"""Errors whose message is made for the user: shown with the line that led to them instead of a traceback through this package."""


ATTEMPTS: pytest.StashKey[Attempts] = pytest.StashKey()  # on `item.stash`


class RunningHooks:
    """The hooks around a test; registered only with `--gpumem`."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        with self._session.ranges.test(self._session.names.unique(item.nodeid), item.nodeid):
            try:
                return (yield)
            finally:
                # Also of a test that was skipped, whose fixtures were never set up.
                if self._session.ledger is not None:
                    self._session.ledger.ended(item.nodeid)
                item.stash[TEST] = None  # pytest keeps the item to the end, and the test would keep its streams
                self._session.between_tests()
                if nextitem is None or not uses(nextitem, TEST_FIXTURE):
                    self._session.make_room()
                elif not uses(nextitem, KERNELS_FIXTURE):
                    self._session.make_room(unless_free=PLENTY)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        # A rerun of the test starts anew, but for what has failed.
        item.stash.setdefault(ATTEMPTS, Attempts()).begin(item.stash.setdefault(ROWS, []))
        item.user_properties[:] = [p for p in item.user_properties if not p[0].startswith(PROPERTY)]
        item.stash[ROWS] = []
        if uses(item, BENCHMARK_FIXTURE):
            attach_timer(item)
        with self._session.ranges.range(phase(self._session.names.unique(item.nodeid), "setup")):
            try:
                return (yield)
            except Exception as error:
                replaced = _replaced(error, item)
                if replaced is error:
                    raise error  # not `raise`: before Python 3.11 that has the whole traceback
                raise replaced from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.stash.get(TEST, None) is not None:
            self._session.limit("the test's body")
        try:
            result = yield
            self._wait(item)
            if (caught := _caught(item)) is not None:
                raise caught
        except (KeyboardInterrupt, pytest.exit.Exception):
            test = item.stash.get(TEST, None)
            if test is not None and test.replay is not None:  # no report follows; a warning that is an error would cost the summary
                test.replay.excuse()
            raise
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            replaced = _replaced(error, item)
            try:
                self._wait(item)
            except DeviceError as left:
                if isinstance(replaced, pytest.skip.Exception):  # any other failure is the test's already
                    replaced = _replaced(left, item)
            if isinstance(replaced, pytest.skip.Exception) and (caught := _caught(item)) is not None:
                replaced = _replaced(caught, item)
            judge_test(item, self._session, replaced)
            if replaced is error:
                raise error
            raise replaced from None
        failing = judge_test(item, self._session, None)
        if failing and not self._session.is_further:
            failing = [explained(row, self._session) for row in failing]
            by_key = {row.key: row for row in failing}
            item.stash[ROWS] = [by_key.get(row.key, row) for row in item.stash[ROWS]]
            # A gate's screen is not final, and its duet is about to decide.
            final = ANNOUNCE not in switched_off(os.environ)
            texts = [*failure_texts(failing, self._session.facts), *memory_texts(failing, self._session)] if final else short_texts(failing)
            raise broken_limits(failing, [*texts, *filter(None, map(why_text, failing))])
        return result

    def _wait(self, item: pytest.Item) -> None:
        """Wait for the work of a test. Of one without our fixtures, only the loss of the context is its failure."""
        try:
            self._session.wait(item.nodeid)
        except ContextLost:
            raise
        except DeviceError:  # such as a capture that is still open
            if item.stash.get(TEST, None) is not None:
                raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.stash.get(TEST, None) is not None:
            self._session.limit("the test's teardown")
        with self._session.ranges.range(phase(self._session.names.unique(item.nodeid), "teardown")):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        with_end = call.when == "teardown" and any(row.footprint is not None for row in item.stash.get(ROWS, []))
        shown = yield
        crash = getattr(shown.longrepr, "reprcrash", None)
        if crash is not None and Path(crash.path).is_relative_to(_PACKAGE):
            crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1  # --tb=line shows it
        if call.excinfo is not None and hasattr(call.excinfo.value, BY_LIMITS_ATTRIBUTE):
            if crash is not None:
                crash.message = getattr(call.excinfo.value, BY_LIMITS_ATTRIBUTE)  # pytest's begins with "Failed: "
            setattr(shown, BY_LIMITS_ATTRIBUTE, True)
        ours = uses(item, TEST_FIXTURE) or item.stash.get(TEST, None) is not None
        if ours and shown.skipped and not hasattr(shown, "wasxfail") and self._session.settings.strict:
            shown.outcome = "failed"
            shown.longrepr = f"gpumem: --gpumem-strict fails a skip: {call.excinfo.value if call.excinfo else ''}"
        test = item.stash.get(TEST, None)
        if shown.when == "call" and test is not None and not test.judged:
            # The report of a subtest: the body goes on.
            test.subtest_failed = test.subtest_failed or shown.failed
            return shown
        ended = shown.when == "call" or (shown.when == "setup" and not shown.passed)
        if ended and not shown.failed and (why := self._session.failure_elsewhere(item.nodeid)) is not None:
            shown.outcome, shown.longrepr = "failed", why
            vars(shown).pop("wasxfail", None)
        if ended:
            item.stash[ROWS], failing = item.stash.setdefault(ATTEMPTS, Attempts()).judged(item.stash.setdefault(ROWS, []))
            if failing and not shown.failed:
                shown.outcome, shown.longrepr = "failed", "\n\n".join(failure_texts(failing, self._session.facts))
                setattr(shown, BY_LIMITS_ATTRIBUTE, True)
                vars(shown).pop("wasxfail", None)
        if test is not None and test.replay is not None:
            raised = shown.when == "call" and test.replay.called and not test.measurements
            if raised or not shown.passed or hasattr(shown, "wasxfail"):
                test.replay.excuse()
        if shown.when == "setup" and shown.failed and uses(item, BENCHMARK_FIXTURE):
            error = call.excinfo.value if call.excinfo is not None else None
            item.stash[ROWS] = [unmeasured(item.nodeid, self._session.names.unique(item.nodeid), self._session, error)]
        if ended or with_end:
            rows = item.stash.get(ROWS, [])
            if self._session.reports_elsewhere:
                setattr(shown, ROWS_ATTRIBUTE, [row_to_json(row) for row in rows])
            else:
                self._session.rows.add(item.nodeid, rows)
        return shown


def _caught(item: pytest.Item) -> WrongResult | None:
    """The failure of a test that caught the error of a wrong result; None if no result was wrong, or a subtest has failed by it."""
    test = item.stash.get(TEST, None)
    if test is None or test.wrong is None or test.subtest_failed:
        return None
    return WrongResult(f"{test.wrong} (the test caught this error)")


def _replaced(error: BaseException, item: pytest.Item) -> BaseException:
    """The exception that replaces an error of ours: a skip, or a failure of one line with the place. Other errors stay, and lose the frames
    of this package through which the user's code was called.
    """
    if isinstance(error, Unsupported):
        return pytest.skip.Exception(str(error), _use_item_location=True)
    if isinstance(error, (WrongResult, *MISTAKES)):
        place = printable(where(error.__traceback__, item.path, item.config.rootpath))
        return pytest.fail.Exception(f"{place}{type(error).__name__}: {error}", pytrace=False)
    if not item.config.getoption("fulltrace"):
        error.__traceback__ = theirs_alone(error.__traceback__, item.path, item.config.rootpath)
    return error


_ENDS = (KeyboardInterrupt, pytest.exit.Exception)  # exceptions that end the session; no other may replace them


class LeftoverHooks:
    """Looks before and after each test once the device is open; registered only with `--gpumem`, and opens nothing itself.
    A change by a fixture of a wider scope than one test stays until that fixture ends.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._running: pytest.Item | None = None  # the test that has begun and was not looked at since

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item
        if self._session.watch is not None:
            self._session.watch.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after every fixture's own teardown
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            result = yield
        except _ENDS:
            raise  # the session's end looks
        except BaseException:
            try:
                self._settle(item)
            except pytest.fail.Exception as also:  # beside the error that is there already
                item.add_report_section("teardown", "gpumem", str(also))
            raise
        self._settle(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        watch = self._session.watch
        if watch is not None and fixturedef.scope == "function":
            return (yield)
        before = None if watch is None else watch.look()
        # Finalizers run in reverse order: this one after the fixture's own teardown, the other one ahead of it.
        fixturedef.addfinalizer(partial(self._ended, fixturedef))
        result = yield
        if watch is not None and before is not None:
            watch.keep(fixturedef, before)
        fixturedef.addfinalizer(partial(self._ending, fixturedef))
        return result

    def end(self, session: pytest.Session) -> None:
        """Tear down a test that was interrupted, as pytest is about to, and look at it."""
        session._setupstate.teardown_exact(None)
        if (item := self._running) is None:
            return
        recorded = session.config.pluginmanager.hasplugin("warnings")
        recording = catch_warnings_for_item(session.config, item.ihook, "runtest", item) if recorded else nullcontext()
        with recording, suppress(LeftoverWarning, pytest.fail.Exception):  # where warnings are errors: the session ends anyway
            self._settle(item)

    def _ending(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ending(fixturedef)

    def _ended(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ended(fixturedef)

    def _settle(self, item: pytest.Item) -> None:
        """Restore the state that the test changed, and warn of it.
        Raises `pytest.fail.Exception`: the test lost the context since its body ended; the state cannot be put back, under
        `--gpumem-strict`; or warnings of the class are errors.
        """
        self._running = None
        try:
            self._session.wait(item.nodeid)
        except ContextLost as lost:
            raise pytest.fail.Exception(f"ContextLost: {lost}", pytrace=False) from None
        except DeviceError:  # such as a capture that is still open
            pass
        if self._session.lost_in is not None:
            return
        left = None if self._session.watch is None else self._session.watch.settle()
        if left is None:
            return
        text = f"{item.nodeid} left {left.text}"
        if not left.repaired and self._session.settings.strict:
            raise pytest.fail.Exception(f"gpumem: --gpumem-strict: {text}", pytrace=False)
        try:
            item.warn(LeftoverWarning(text))
        except LeftoverWarning:
            raise pytest.fail.Exception(f"LeftoverWarning: {text}", pytrace=False) from None
