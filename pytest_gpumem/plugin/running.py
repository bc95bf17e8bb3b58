"""The hooks of pytest around tests. The features of a session do the work in them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from pytest_gpumem.devices.errors import Unsupported
from pytest_gpumem.printable import printable
from pytest_gpumem.units import ShownError

_PACKAGE = Path(__file__).resolve().parent.parent
ENDS = (KeyboardInterrupt, pytest.exit.Exception)  # no other error may replace them
Wrapper = Generator[None, object, object]  # what a hook returns that wraps others
_STOPS = (*ENDS, pytest.UsageError)  # what a feature raises to end the session


class Feature:
    """What a session does around its tests: methods for phases, none of which it must have.

    Context managers, which the first feature of the list enters first and leaves last, or
    functions, which are called as they would be entered:

    - `test(item, nextitem)`: a test with its reruns
    - `setup(item)`, `call(item)`, `teardown(item)`: pytest's phases of a test
    - `fixture(fixturedef)`: the setup of a fixture of any scope
    - `tests(session)`: all tests

    Functions:

    - `judge(item, error)`: after the body; `error` ended it early
    - `report(item, call, report)`: after each report of a phase or of a subtest
    - `logged(report)`: before plugins read a report, also of a worker
    - `selected(session)`: after the collection

    In `setup`, `call`, `teardown`, `fixture` and `judge`, pytest's outcomes and each `ShownError`
    but `Unsupported` end the test. Any other error, and these elsewhere, is a mistake, which
    changes no test.
    """

    name = ""


def fail(report: pytest.TestReport, why: str) -> None:
    """Make a report that of a failure, also of a test that was expected to fail."""
    report.outcome, report.longrepr = "failed", why
    vars(report).pop("wasxfail", None)


class RunningHooks:
    """The hooks; registered only with `--gpumem`."""

    def __init__(self, features: Sequence[Feature], broken: dict[str, str]) -> None:
        """`broken`: by the name of a feature that raised by mistake, the first error."""
        self._features, self._broken = features, broken

    def _taking_part(self, phase: str) -> Iterator[tuple[Feature, Any]]:
        for feature in self._features:
            method = getattr(feature, phase, None)
            if method is not None and feature.name not in self._broken:
                yield feature, method

    def _each(self, phase: str, *arguments: object) -> None:
        for feature, method in self._taking_part(phase):
            try:
                method(*arguments)
            except Exception as raised:
                self._meant_error(raised, feature, phase, None)

    def _around(self, phase: str, item: pytest.Item | None, *arguments: object) -> Wrapper:
        """Have the features enter a phase, run pytest's part of `item`, and have them leave."""
        error: BaseException | None = None
        result: object = None
        entered: list[tuple[Feature, AbstractContextManager[None]]] = []
        for feature, method in self._taking_part(phase):
            try:
                manager = method(*arguments)
                if manager is not None:
                    manager.__enter__()
                    entered.append((feature, manager))
            except BaseException as raised:
                error = self._error_after(error, raised, feature, phase, item)
                if error is not None and phase != "teardown":
                    break
        # Fixtures are torn down whatever a feature raises.
        if error is None or (phase == "teardown" and not isinstance(error, _STOPS)):
            try:
                result = yield
            except BaseException as raised:
                error = raised
                if item is not None and phase in ("setup", "call"):
                    error = _as_pytest_outcome(raised, item)
        for feature, manager in reversed(entered):
            traceback = None if error is None else error.__traceback__
            try:
                manager.__exit__(None if error is None else type(error), error, traceback)
            except BaseException as raised:
                if raised is not error:
                    error = self._error_after(error, raised, feature, phase, item)
            if error is not None:
                error.__traceback__ = traceback
        if phase == "call" and item is not None and not isinstance(error, ENDS):
            # What a feature raises ends the test as if it had ended its body.
            for feature, method in self._taking_part("judge"):
                try:
                    method(item, error)
                except BaseException as raised:
                    error = self._error_after(error, raised, feature, "judge", item)
        try:
            if error is not None:
                raise error
            return result
        finally:
            error = None  # its traceback has this frame

    def _error_after(
        self,
        before: BaseException | None,
        raised: BaseException,
        feature: Feature,
        phase: str,
        item: pytest.Item | None,
    ) -> BaseException | None:
        """The error that ends a phase: a failure replaces a skip; a second failure is a section."""
        error = self._meant_error(raised, feature, phase, item)
        if error is None or before is None:
            return before or error
        if isinstance(before, ENDS):
            return before
        if isinstance(before, pytest.skip.Exception) or isinstance(error, ENDS):
            return error
        if item is not None:
            section = "call" if phase == "judge" else phase
            item.add_report_section(section, "gpumem", str(error))
        return before

    def _meant_error(
        self, error: BaseException, feature: Feature, phase: str, item: pytest.Item | None
    ) -> BaseException | None:
        """What a feature raises to fail a test or to end the session; None for a mistake."""
        if isinstance(error, _STOPS):
            if item is None:
                raise error
            return error
        if item is not None and not isinstance(error, Exception):  # pytest's outcomes
            return error
        is_for_the_user = isinstance(error, ShownError) and not isinstance(error, Unsupported)
        if item is not None and is_for_the_user:
            return _as_pytest_outcome(error, item)
        first_line = f"{phase}: {type(error).__name__}: {error}".partition("\n")[0]
        self._broken.setdefault(feature.name, printable(first_line))
        return None

    # A test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Wrapper:
        return (yield from self._around("test", None, item, nextitem))

    # Inside of pytest's wrappers, which in the teardown rely on what they did in the setup.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Wrapper:
        __tracebackhide__ = True
        return (yield from self._around("setup", item, item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Wrapper:
        __tracebackhide__ = True
        return (yield from self._around("fixture", request._pyfuncitem, fixturedef))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Wrapper:
        __tracebackhide__ = True
        return (yield from self._around("call", item, item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Wrapper:
        __tracebackhide__ = True
        return (yield from self._around("teardown", item, item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and Path(crash.path).is_relative_to(_PACKAGE):
            # --tb=line shows it
            crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1
        self._each("report", item, call, report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Wrapper:
        self._each("logged", report)
        return (yield)

    # The session

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Wrapper:
        self._each("selected", session)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Wrapper:
        return (yield from self._around("tests", None, session))


def _as_pytest_outcome(error: BaseException, item: pytest.Item) -> BaseException:
    """A skip, or a failure of one line with the place; or the error without frames of ours."""
    root = item.config.rootpath
    shown: BaseException
    if isinstance(error, ENDS):
        return error
    if isinstance(error, Unsupported):
        shown = pytest.skip.Exception(str(error), _use_item_location=True)
    elif isinstance(error, ShownError):
        place = ""
        for frame, file, of_the_user in _frames(error.__traceback__, item.path, root):
            if of_the_user:
                path = file.relative_to(root) if file.is_relative_to(root) else file
                place = printable(f"{path}:{frame.tb_lineno}: ")
        shown = pytest.fail.Exception(f"{place}{type(error).__name__}: {error}", pytrace=False)
    else:
        if not item.config.getoption("fulltrace"):
            error.__traceback__ = _without_ours(error.__traceback__, item.path, root)
        return error
    shown.__context__, shown.__suppress_context__ = error, True  # as `raise shown from None` does
    return shown


def _frames(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> Iterator[tuple[TracebackType, Path, bool]]:
    """The frames from the outermost one, with their files, and whether the code is the user's."""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        elsewhere = "site-packages" in file.parts or file.is_relative_to(_PACKAGE)
        of_the_user = file.is_relative_to(root) and not elsewhere
        yield traceback, file, of_the_user or file == test_file
        traceback = traceback.tb_next


def _without_ours(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> TracebackType | None:
    """Drop our frames that call into the user's code; keep those that its innermost called."""
    kept: TracebackType | None = None
    outside = False
    for frame, file, of_the_user in reversed([*_frames(traceback, test_file, root)]):
        outside = outside or of_the_user
        if not outside or not file.is_relative_to(_PACKAGE):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
