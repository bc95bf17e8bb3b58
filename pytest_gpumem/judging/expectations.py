"""The measurements, limits and tests that a session must judge, and how each ends. Pure.

An expectation is a measurement of the baseline, a limit on a test, or in a gate a test that BASE
selects. It ends with the verdict of a row, or as an `Omission` with its reason.

BASE selects with the words of the gate, with BASE's ini file and conftest, on the machine of the
gate. So what a change deletes, renames, skips or leaves out by its files is lost, and a change that
loosens a limit is still judged by that of BASE.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import field
from msgspec.structs import replace

from pytest_gpumem.limits import AT_THE_END, LIMITS, MAX_WAITS, OF_FOOTPRINT, demands_more
from pytest_gpumem.records import Record, selects
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import (
    ACCEPTED,
    LOST,
    NOT_RUN,
    ROW,
    TEST,
    UNDECIDED,
    How,
    Omission,
    Row,
    Status,
)

_FAILED = ("failed", "did not run")
NO_RESULT = ("skipped", "xfailed", "xpassed")


class Expectation(NamedTuple):
    nodeid: str
    what: str = ROW  # as `Omission.what`
    label: str = ""  # of a measurement
    unmeasured: bool = False  # A row without a time; a test that measures in BASE alone


class Ending(NamedTuple):
    how: How
    reason: str = ""  # as `Omission.reason`, such as "deselected by -m of pytest.ini"
    by_words: bool = False  # as `Omission.by_words`
    plugin: str = ""  # file of the installed plugin that left it out, such as to divide the tests
    in_base: bool = False  # BASE runs the test on this machine: if it is left out, it is lost
    base_too: bool = False  # as `Omission.base_too`


# What BASE selects


class Selection(Record, frozen=True):
    """The tests that a session selects, by its words, ini file and conftest."""

    tests: dict[str, Limits] = field(default_factory=dict)
    """By node id, those that measure or have a limit: the limits of marker and session."""
    idle: tuple[str, ...] = ()  # Node ids of `tests` without a fixture that measures
    others: tuple[str, ...] = ()  # Node ids of the others
    left_out: tuple[str, ...] = ()
    """Node ids of tests that a mark skips or expects to fail, and of modules that skip or cannot be
    imported: on another machine, or with another library, they may run."""
    dividing: tuple[str, ...] = ()
    """Files of installed plugins that left out tests, which are among the selected all the same."""
    failures: dict[str, str] = field(default_factory=dict)
    """By node id of what failed in it: the first line of why."""
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By node id of a reported test: its file below `root`, and its line."""
    unrun: tuple[str, ...] = ()  # Node ids of the failures that an earlier test kept from running
    paths: tuple[str, ...] = ()  # Words of the command line that name tests
    root: str = ""  # Folder of node ids

    def has(self, nodeid: str) -> bool:
        return nodeid in self.tests or nodeid in self.others

    def leaves_out(self, nodeid: str) -> bool:
        """True if it leaves out a test that may run elsewhere."""
        return any(selects(name, nodeid) for name in self.left_out)

    def lacks(self, nodeid: str) -> bool:
        return not self.has(nodeid) and not self.leaves_out(nodeid)

    def stricter(
        self,
        nodeid: str,
        limits: Limits,
        names: Iterable[str],
        base_name: str,
        accepted: Callable[[str, str | None], bool],
    ) -> Limits:
        """Return the limits `names` of a change's test, those of BASE where they demand more.

        `accepted`: whether a looser limit, by its name and new value, is accepted.
        """
        base = self.tests.get(nodeid, Limits())
        values, origin = dict[str, str](), dict(limits.origin)
        for _, name, was, now in looser(nodeid, limits, base, names):
            if not accepted(name, now):
                values[name] = was
                origin[name] = f"{base.origin.get(name, 'limit')} of {base_name}"
        return replace(limits, **values, origin=origin)


def against_base(
    ending: Ending, expectation: Expectation, base: Selection, base_name: str
) -> Ending:
    """Return how a test of a change ended, seen from what BASE selects."""
    nodeid = expectation.nodeid
    if ending.how in ("passed", *_FAILED):
        return ending
    if base.has(nodeid):
        divided = ending.plugin in base.dividing
        return ending._replace(by_words=divided, in_base=not divided)
    if expectation.what == ROW and base.leaves_out(nodeid):
        # It was measured once: a library that this machine lacks may be the reason.
        return ending
    if not ending.by_words:
        ending = ending._replace(reason=f"left out of {base_name} too")
    return ending._replace(base_too=True)


class LooserLimit(NamedTuple):
    """A limit of a test that a change loosens."""

    key: str  # node id of the test, or the key of a row
    limit: str
    was: str
    now: str | None  # None: removed


def loosened(head: Selection, base: Selection) -> Iterator[LooserLimit]:
    """Yield the limits that a change loosens or removes, of tests that it still has."""
    for nodeid, limits in base.tests.items():
        if head.has(nodeid):
            yield from looser(nodeid, head.tests.get(nodeid, Limits()), limits)


def looser(
    key: str, limits: Limits, base: Limits, names: Iterable[str] = LIMITS
) -> Iterator[LooserLimit]:
    """Yield the limits of a test or a row that demand less than those of BASE."""
    for name in names:
        was, now = getattr(base, name), getattr(limits, name)
        if demands_more(name, was, now):
            yield LooserLimit(key, name, was, now)


# How each ended


def of_base(base: Selection, idle: Collection[str]) -> Iterator[Expectation]:
    """Yield an expectation for each test of BASE. `idle`: as of `Selection`, of the change."""
    for nodeid in base.tests:
        unmeasured = nodeid not in base.idle and nodeid in idle
        yield Expectation(nodeid, TEST, unmeasured=unmeasured)


def judged(row: Row) -> set[str]:
    """Return the limits that a row's verdict is about, or that a call or a marker lifts from it."""
    names = set()
    for name in LIMITS:
        if getattr(row.limits, name) is None and name not in row.limits.origin:
            continue
        if name in OF_FOOTPRINT:
            read = row.footprint is not None and (row.footprint.ended or name not in AT_THE_END)
        else:
            read = row.measurement is not None
            if name == MAX_WAITS and row.footprint is not None:
                read = read or row.footprint.waits is not None
        if read:
            names.add(name)
    return names


def discharge(expectation: Expectation, rows: Sequence[Row], ending: Ending) -> Omission | None:
    """Return what was not judged; None if a verdict or the failure of its test says all."""
    what = expectation.what
    failed = ending.how in _FAILED
    ran = failed or ending.how == "passed"
    if what == ROW:
        labels = [row.label for row in rows if row.measurement or expectation.unmeasured]
        met = ran and expectation.label in labels
    elif what == TEST:
        measured = any(row.measured_something for row in rows)
        met = failed or (ran and (measured or not expectation.unmeasured))
    else:
        met = failed or any(what in judged(row) for row in rows)
    if met:
        return None
    status: Status = NOT_RUN
    reason = ending.reason
    if not ending.base_too:
        status, reason = _of_limit(what, ending) if what in LIMITS else _of_row(ending)
    nodeid, label = expectation.nodeid, expectation.label
    by_words, base_too = ending.by_words, ending.base_too
    return Omission(nodeid, label, status, reason, what, by_words, base_too, ending.how)


def _of_row(ending: Ending) -> tuple[Status, str]:
    if ending.how == "passed":
        return LOST, "its test passed unmeasured"
    if ending.how == "did not run":
        return LOST, ending.reason
    if ending.how == "failed" or ending.how in NO_RESULT:
        return LOST, f"its test {ending.reason or ending.how}"
    return _not_run(ending)


def _of_limit(name: str, ending: Ending) -> tuple[Status, str]:
    if ending.how in ("passed", "xfailed", "xpassed"):
        nothing = "watched no memory" if name in OF_FOOTPRINT else "measured nothing"
        return UNDECIDED, f"the test {ending.how} and {nothing}"
    return _not_run(ending)


def _not_run(ending: Ending) -> tuple[Status, str]:
    if ending.how == "gone":
        return LOST, "its test is no longer collected"
    return LOST if ending.in_base else NOT_RUN, ending.reason or ending.how


def lost(missing: Iterable[Omission]) -> list[Omission]:
    """Return those that fail a gate: lost, or left out by other than words of the command line."""
    failing = open_under_strict(missing)
    return [omission for omission in failing if omission.status in (LOST, NOT_RUN)]


def open_under_strict(missing: Iterable[Omission]) -> list[Omission]:
    """Return those that fail a strict session."""
    failing = []
    for omission in missing:
        if omission.status != ACCEPTED and not (omission.by_words or omission.base_too):
            failing.append(omission)
    return failing


def possibly_intended(omission: Omission) -> bool:
    """True if it is lost, and no failure or crash is the reason."""
    by_failure = omission.how in ("failed", "did not run", "not collected", "not reached")
    return omission.status == LOST and not by_failure


def may_be_excused(omission: Omission) -> bool:
    # What the baseline holds, this GPU measured.
    return omission.how in NO_RESULT and not omission.base_too and omission.what != ROW


def excused(
    missing: Iterable[Omission], skipped_in_base: Collection[str], name: str
) -> list[Omission]:
    """A test that skips as it runs is no loss if BASE skips it too."""
    after = []
    for omission in missing:
        if may_be_excused(omission) and omission.nodeid in skipped_in_base:
            reason = f"skipped in {name} too"
            after.append(replace(omission, status=NOT_RUN, reason=reason, base_too=True))
        else:
            after.append(omission)
    return after
