"""The hooks of pytest around tests. The features of a session do the work in them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from pytest_gpumem.printable import printable

RUNNING_PLUGIN = "gpumem-running"  # name of the plugin with the hooks
_PACKAGE = Path(__file__).resolve().parent.parent

PHASES: Mapping[str, Sequence[str]] = {
    # Context managers around a part of a test. The first feature enters first, and leaves last.
    "test": (
        "verdicts",
        "exclusive use",
        "adoption",
        "outputs",
    ),  # and its reruns, (item, nextitem)
    "setup": ("verdicts", "footprint", "leftovers", "outputs"),  # (item)
    "fixture": ("footprint", "leftovers"),  # the setup of a fixture of any scope, (fixturedef)
    "call": ("footprint", "isolation", "adoption", "waits"),  # (item)
    "teardown": ("isolation", "footprint", "leftovers", "outputs"),  # (item)
    # After the body, before its report is made; `error` ended it early. (item, error)
    "judge": ("verdicts",),
    # After each report of a phase or of a subtest. (item, call, report)
    "report": ("verdicts",),
    # Context managers of the session: around what plugins do with a report, also of a worker,
    # (report), and around all tests, (session).
    "logged": ("verdicts", "isolation", "outputs"),
    "tests": ("expectations", "verdicts", "adoption"),
    # The session: it begins, (session); what was collected, (report); what somebody left out,
    # (items); what is to run, (session).
    "started": ("outputs",),
    "collected": ("expectations",),
    "deselected": ("expectations",),
    "selected": ("verdicts", "expectations", "outputs"),
    # Ctrl-C or `pytest.exit` ends it, (excinfo), or an internal error, ().
    "interrupted": ("outputs",),
    "broke": ("outputs",),
}
"""By the phase, which is a method of a feature with these arguments: the features that have it."""

ENDS = (KeyboardInterrupt, pytest.exit.Exception)
"""Exceptions that end the session; no other may replace them."""
_STOPS = (*ENDS, pytest.UsageError)  # those that a feature raises to end it
When = Literal["test", "setup", "call", "teardown", "fixture"]

NOTHING: AbstractContextManager[None] = nullcontext()
"""What a feature gives that has nothing to do in a phase. It is not entered."""


class Feature:
    """What a session does around its tests: a method for each phase that `PHASES` names it in.

    pytest's own outcomes and errors that are made for the user (`errors.MISTAKES`) fail the test.
    Any other error is a mistake of the feature. It changes no test: the feature is named in
    `broken`, takes no further part, and what it was to judge is UNDECIDED.
    """

    name = ""  # in `PHASES`


def fail(report: pytest.TestReport, why: str) -> None:
    """Make a report that of a failure, also of a test that was expected to fail."""
    report.outcome, report.longrepr = "failed", why
    vars(report).pop("wasxfail", None)


class RunningHooks:
    """The hooks; registered only with `--gpumem`."""

    def __init__(self, features: Iterable[Feature], broken: dict[str, str]) -> None:
        """`broken`: by the name of a feature that raised by mistake, the first error."""
        self.broken = broken
        by_name = {feature.name: feature for feature in features}
        self._features: dict[str, list[Feature]] = {}  # by the phase
        for phase, names in PHASES.items():
            present = [by_name[name] for name in names if name in by_name]
            self._features[phase] = [feature for feature in present if hasattr(feature, phase)]
        self._set_up: list[Feature] = []  # those that entered the setup of the test that runs
        self._not_begun: BaseException | None = None  # why a feature could not begin with it
        self._refused: BaseException | None = None  # why its fixtures are not set up
        self._unjudged: pytest.Item | None = None  # the test whose body has ended

    def join(self, feature: Feature) -> None:
        """Add a part of a feature, behind the others."""
        for phase, features in self._features.items():
            if hasattr(feature, phase):
                features.append(feature)

    def taking_part(self, phase: str) -> list[Any]:
        """The features of a phase that work."""
        return [feature for feature in self._features[phase] if feature.name not in self.broken]

    def disable(self, feature: Feature, phase: str, error: BaseException) -> None:
        """Name a feature that raised by mistake, and have it take no further part."""
        text = f"{phase}: {type(error).__name__}: {error}"
        self.broken.setdefault(feature.name, printable(text.partition("\n")[0]))

    def _each(self, phase: str, *arguments: object) -> None:
        """Have the features of a phase of the session do their part."""
        for feature in self.taking_part(phase):
            try:
                getattr(feature, phase)(*arguments)
            except _STOPS:
                raise
            except Exception as error:
                self.disable(feature, phase, error)

    @contextmanager
    def _around(self, phase: str, *arguments: object) -> Iterator[None]:
        """The same for context managers."""
        with ExitStack() as stack:
            for feature in self.taking_part(phase):
                try:
                    manager = getattr(feature, phase)(*arguments)
                    if manager is not NOTHING:
                        manager.__enter__()
                        stack.push(partial(self._left, feature, phase, manager))
                except _STOPS:
                    raise
                except Exception as error:
                    self.disable(feature, phase, error)
            yield

    def _left(
        self,
        feature: Feature,
        phase: str,
        manager: AbstractContextManager[None],
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            manager.__exit__(kind, error, traceback)
        except _STOPS:
            raise
        except Exception as raised:
            if raised is not error:
                self.disable(feature, phase, raised)

    # A test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._set_up = []
        phase = _Phase(self, item, "test")
        phase.enter(self.taking_part("test"), item, nextitem)
        self._not_begun = phase.defer()
        return (yield from phase.around())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(self, item, "setup", self._not_begun)
        self._set_up = phase.enter(self.taking_part("setup"), item)
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
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(self, request._pyfuncitem, "fixture")
        phase.enter(self.taking_part("fixture"), fixturedef)
        return (yield from phase.around())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(self, item, "call")
        phase.enter(self._of_a_set_up_test("call"), item)
        try:
            return (yield from phase.around())
        finally:
            self._unjudged = item

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        phase = _Phase(self, item, "teardown")
        phase.enter(self._of_a_set_up_test("teardown"), item)
        return (yield from phase.around())

    def _of_a_set_up_test(self, phase: str) -> list[Any]:
        """The features of a phase without those whose setup was not reached."""
        unreached = [feature for feature in self._features["setup"] if feature not in self._set_up]
        return [feature for feature in self.taking_part(phase) if feature not in unreached]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "call" and self._unjudged is item:  # else of a subtest: the body goes on
            self._unjudged = None
            self._judge(item, call)
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None and Path(crash.path).is_relative_to(_PACKAGE):
            # --tb=line shows it
            crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1
        for feature in self._of_a_set_up_test("report"):
            try:
                feature.report(item, call, report)
            except _STOPS:
                raise
            except BaseException as error:  # pytest's own outcomes are no Exceptions
                shown = _for_the_user(error, item)
                if shown is None:
                    self.disable(feature, "report", error)
                else:
                    fail(report, str(shown))
        return report

    def _judge(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Have the features judge a test, as if what they raise had ended its body."""
        phase = _Phase(self, item, "call", None if call.excinfo is None else call.excinfo.value)
        before = phase.error
        for feature in self._of_a_set_up_test("judge"):
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

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(
        self, report: pytest.TestReport
    ) -> Generator[None, object, object]:
        with self._around("logged", report):
            return (yield)

    # The session

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._each("started", session)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._each("collected", report)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._each("deselected", items)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        self._each("selected", session)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        with self._around("tests", session):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_keyboard_interrupt(
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> Generator[None, object, object]:
        self._each("interrupted", excinfo)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_internalerror(self) -> Generator[None, object, object]:
        self._each("broke")
        return (yield)


class _Phase:
    """A phase of a test: the features that entered it, and the error that ends it."""

    def __init__(
        self, hooks: RunningHooks, item: pytest.Item, when: When, error: BaseException | None = None
    ) -> None:
        self._hooks, self._item, self._when = hooks, item, when
        self._entered: list[tuple[Feature, AbstractContextManager[None]]] = []
        self.error = error

    def enter(self, features: Iterable[Feature], *arguments: object) -> list[Feature]:
        """Have features enter; return those that did. An error ends it, but in the teardown."""
        entered = []
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
        if self.error is None:
            return False
        return self._when != "teardown" or isinstance(self.error, _STOPS)

    def defer(self) -> BaseException | None:
        """What ends a later phase in place of this one; None for what ends the session."""
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
                    self.add(error)
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
        """Take an error of the test, or of a feature. A failure takes the place of a skip; beside
        another failure it becomes a section of the report."""
        if isinstance(self.error, ENDS):
            return
        if feature is not None:
            shown = _for_the_user(error, self._item)
            if shown is None:
                self._hooks.disable(feature, method or self._when, error)
                return
            error = shown
        elif self._when in ("setup", "call") and not isinstance(error, ENDS):
            error = _replaced(error, self._item)
        before, self.error = self.error, error
        if before is None or isinstance(before, pytest.skip.Exception) or isinstance(error, ENDS):
            return
        also = before
        if feature is not None:
            self.error, also = before, error
        self._item.add_report_section(self._when, "gpumem", str(also))


def _for_the_user(error: BaseException, item: pytest.Item) -> BaseException | None:
    """What a feature raises to fail a test or to end the session; None for a mistake."""
    if not isinstance(error, Exception) or isinstance(error, _STOPS):
        return error
    shown = _replaced(error, item)
    if shown is error or isinstance(shown, pytest.skip.Exception):  # only a test may skip
        return None
    return shown


def _replaced(error: BaseException, item: pytest.Item) -> BaseException:
    from pytest_gpumem.plugin.errors import replaced

    return replaced(error, item)
