"""The hooks of pytest around tests. A session's features do the work in them: a list, in one order.

Errors that are made for the user lose the traceback through this package on their way.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from pytest_gpumem.devices.protocol import DeviceError, Unsupported
from pytest_gpumem.measuring.bound import BadCall, NoSuchKernel
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.l2 import LeftoverWarning
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.window_request import BadWindow
from pytest_gpumem.plugin.result import NoTraffic
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import UnknownPeak
from pytest_gpumem.settings import SettingsError
from pytest_gpumem.units import QuantityError

RUNNING_PLUGIN = "gpumem-running"  # name of the plugin with the hooks
_PACKAGE = Path(__file__).resolve().parent.parent


def _frames(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> Iterator[tuple[TracebackType, Path, bool]]:
    """The frames of a traceback from the outermost one, with their files, and whether the code is the user's own."""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        theirs = (
            file.is_relative_to(root)
            and "site-packages" not in file.parts
            and not file.is_relative_to(_PACKAGE)
        )
        yield traceback, file, theirs or file == test_file
        traceback = traceback.tb_next


def where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's own line that led to an error; empty if there is none."""
    found = ""
    for frame, file, theirs in _frames(traceback, test_file, root):
        if theirs:
            found = f"{file.relative_to(root) if file.is_relative_to(root) else file}:{frame.tb_lineno}: "
    return found


def theirs_alone(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> TracebackType | None:
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
    LeftoverWarning,
    NoTraffic,
    SettingsError,
    QuantityError,
    DeviceError,
    UnknownPeak,
)
"""Errors whose message is made for the user: shown with the line that led to them instead of a traceback through this package."""


def replaced(error: BaseException, item: pytest.Item) -> BaseException:
    """The exception that replaces an error of ours: a skip, or a failure of one line with the place. Other errors stay, and lose the frames
    of this package through which the user's code was called.
    """
    shown: BaseException
    if isinstance(error, Unsupported):
        shown = pytest.skip.Exception(str(error), _use_item_location=True)
    elif isinstance(error, (WrongResult, *MISTAKES)):
        place = printable(where(error.__traceback__, item.path, item.config.rootpath))
        shown = pytest.fail.Exception(f"{place}{type(error).__name__}: {error}", pytrace=False)
    else:
        if not item.config.getoption("fulltrace"):
            error.__traceback__ = theirs_alone(error.__traceback__, item.path, item.config.rootpath)
        return error
    shown.__context__, shown.__suppress_context__ = error, True  # as `raise shown from None` does
    return shown


def fail(report: pytest.TestReport, why: str) -> None:
    """Make a report one of a failure, also that of a test that was expected to fail."""
    report.outcome, report.longrepr = "failed", why
    vars(report).pop("wasxfail", None)


ENDS = (
    KeyboardInterrupt,
    pytest.exit.Exception,
)  # exceptions that end the session; no other may replace them
_STOPS = (*ENDS, pytest.UsageError)  # those that a feature raises to end it
When = Literal["test", "setup", "call", "teardown", "fixture"]


NOTHING: AbstractContextManager[None] = nullcontext()
"""What a feature gives that has nothing to do at the end of a phase. It is not entered, for there are many of them in each test."""


class Feature:
    """What a session does around its tests. A subclass has those of the methods that it needs; the others do nothing.

    What a method raises fails the test: pytest's own exceptions and errors that are made for the user as they are, any other with the name
    of the feature. All other features still leave. A failure takes the place of a skip; beside another failure it becomes a section of the
    report.
    """

    # Context managers: the first feature of the list is the first to enter and the last to leave. An error of the test goes through them.

    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> AbstractContextManager[None]:
        """Around all of a test, from before its setup until its last report was given; once for all its reruns."""
        return NOTHING

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Around the setup of its fixtures."""
        return NOTHING

    def call(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Around its body. Not of a test whose setup failed."""
        return NOTHING

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Around the teardown of its fixtures. Not if the feature did not enter the setup, for one before it failed."""
        return NOTHING

    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> AbstractContextManager[None]:
        """Around the setup of one fixture, of whatever scope."""
        return NOTHING

    # The reports of the phases, and of subtests. The last feature of the list is the first to be asked.

    def judge(self, item: pytest.Item, error: BaseException | None) -> None:
        """Judge a test whose body has ended, before its report is made. Raises what then fails the test.
        `error`: what ended the body early; None if it passed.
        """

    def report(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """Complete a report that was made."""

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        """Around what plugins do with a report, also where a worker made it."""
        return NOTHING

    # The session. An error here ends it.

    def started(self, session: pytest.Session) -> None:
        """Begin, before anything is printed."""

    def collected(self, report: pytest.CollectReport) -> None:
        """Take the report of what was collected, or was not."""

    def deselected(self, items: Sequence[pytest.Item]) -> None:
        """Take the tests that somebody left out."""

    def selected(self, session: pytest.Session) -> None:
        """Take the tests that are to run."""

    def tests(self, session: pytest.Session) -> AbstractContextManager[None]:
        """Around all of them."""
        return NOTHING

    def interrupted(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Take notice that Ctrl-C or `pytest.exit` ends the session."""

    def broke(self) -> None:
        """Take notice of an internal error, before it is printed."""


class RunningHooks:
    """The hooks around tests; registered only with `--gpumem`. Where others print what they are told, a wrapper is told before them."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = [*features]
        self._set_up: Sequence[Feature] = ()  # those that entered the setup of the test that runs
        self._not_begun: BaseException | None = None  # why one of them could not begin with it
        self._refused: BaseException | None = None  # why its fixtures are not set up
        self._unjudged: pytest.Item | None = None  # the test whose body has ended

    def join(self, feature: Feature) -> None:
        """Add a feature behind the others."""
        self._features.append(feature)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._set_up = ()
        phase = _Phase(item, "test")
        phase.enter(self._features, item, nextitem)
        self._not_begun = phase.defer()
        return (yield from phase.around())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(item, "setup", self._not_begun)
        self._set_up = phase.enter(self._features, item)
        self._refused = phase.defer()
        return (yield from phase.around())

    @pytest.hookimpl(specname="pytest_runtest_setup", tryfirst=True)
    def pytest_runtest_setup_refused(self) -> None:
        """Raise inside of pytest's own wrappers, whose teardown undoes what their setup did."""
        __tracebackhide__ = True
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(item, "call")
        phase.enter(self._set_up, item)
        try:
            return (yield from phase.around())
        finally:
            self._unjudged = item

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(item, "teardown")
        phase.enter(self._set_up, item)
        return (yield from phase.around())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(request._pyfuncitem, "fixture")
        phase.enter(self._features, fixturedef)
        return (yield from phase.around())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if (
            call.when == "call" and self._unjudged is item
        ):  # else it is the report of a subtest: the body goes on
            self._unjudged = None
            self._judge(item, call)
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and Path(crash.path).is_relative_to(_PACKAGE):
            crash.path, crash.lineno = (
                str(item.path),
                (item.location[1] or 0) + 1,
            )  # --tb=line shows it
        for feature in reversed(self._set_up):
            try:
                feature.report(item, call, report)
            except _STOPS:
                raise
            except BaseException as error:  # pytest's own outcomes are no Exceptions
                fail(report, str(_named(error, feature, "report", item)))
        return report

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        for feature in (*self._features,):  # one may join
            feature.started(session)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(
        self, report: pytest.TestReport
    ) -> Generator[None, object, object]:
        with ExitStack() as stack:
            for feature in self._features:
                if (manager := feature.logged(report)) is not NOTHING:
                    stack.enter_context(manager)
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        for feature in self._features:
            feature.collected(report)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for feature in self._features:
            feature.deselected(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        for feature in self._features:
            feature.selected(session)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        with ExitStack() as stack:
            for feature in self._features:
                stack.enter_context(feature.tests(session))
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_keyboard_interrupt(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> Generator[None, object, object]:
        for feature in self._features:
            feature.interrupted(excinfo)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_internalerror(self) -> Generator[None, object, object]:
        for feature in self._features:
            feature.broke()
        return (yield)

    def _judge(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Have the features judge a test, as if what they raise had ended its body."""
        phase = _Phase(item, "call", None if call.excinfo is None else call.excinfo.value)
        before = phase.error
        for feature in reversed(self._set_up):
            try:
                feature.judge(item, phase.error)
            except BaseException as error:
                phase.add(error, feature, "judge")
        if phase.error is before or phase.error is None:
            return
        try:
            raise phase.error
        except ENDS:
            raise
        except BaseException:
            call.excinfo = pytest.ExceptionInfo.from_current()


class _Phase:
    """A phase of one test: the features that are in it, and the error that ends it."""

    def __init__(self, item: pytest.Item, when: When, error: BaseException | None = None) -> None:
        self._item, self._when = item, when
        self._entered: list[tuple[Feature, AbstractContextManager[None]]] = []
        self.error = error

    def enter(self, features: Iterable[Feature], *arguments: object) -> list[Feature]:
        """Have features enter; those that did. The first error ends it, but in the teardown."""
        entered: list[Feature] = []
        for feature in features:
            if self._over:
                break
            try:
                manager = getattr(feature, self._when)(*arguments)
                if manager is not NOTHING:
                    manager.__enter__()
                    self._entered.append((feature, manager))
            except BaseException as error:
                self.add(error, feature)
            else:
                entered.append(feature)
        return entered

    @property
    def _over(self) -> bool:
        """True if pytest's part in it is not run."""
        return self.error is not None and (
            self._when != "teardown" or isinstance(self.error, _STOPS)
        )

    def defer(self) -> BaseException | None:
        """What a feature raised when it entered, which now ends a later phase; None for what ends the session."""
        if isinstance(self.error, _STOPS):
            return None
        error, self.error = self.error, None
        return error

    def around(self) -> Generator[None, object, object]:
        """Run pytest's part, and have the features leave."""
        result: object = None
        try:
            if not self._over:
                try:
                    result = yield
                except BaseException as error:
                    own = self._when in ("setup", "call") and not isinstance(error, ENDS)
                    self.add(replaced(error, self._item) if own else error)
            self._leave()
            if self.error is not None:
                raise self.error  # not `raise`: before Python 3.11 that has the whole traceback
            return result
        finally:
            self.error = None  # its traceback has this frame

    def _leave(self) -> None:
        for feature, manager in reversed(self._entered):
            error = self.error
            kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
            try:
                manager.__exit__(kind, error, traceback)
            except BaseException as raised:
                if raised is not error:
                    self.add(raised, feature)
            if error is not None:
                error.__traceback__ = traceback

    def add(
        self, error: BaseException, feature: Feature | None = None, method: str | None = None
    ) -> None:
        """Take one more error, of a feature or of the test itself."""
        if isinstance(self.error, ENDS):
            return
        if feature is not None:
            error = _named(error, feature, method or self._when, self._item)
        before, self.error = self.error, error
        if before is None or isinstance(before, pytest.skip.Exception) or isinstance(error, ENDS):
            return
        also = before
        if feature is not None:
            self.error, also = before, error
        self._item.add_report_section(self._when, "gpumem", str(also))


def _named(error: BaseException, feature: Feature, method: str, item: pytest.Item) -> BaseException:
    """What a feature raised, as the failure of the test: with the feature's name if nobody meant to raise it."""
    if not isinstance(error, Exception) or isinstance(error, _STOPS):
        return error
    if (known := replaced(error, item)) is not error and not isinstance(
        known, pytest.skip.Exception
    ):  # it is the test that may skip
        return known
    failure = pytest.fail.Exception(
        f"gpumem: {type(feature).__name__}.{method} raised {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure
