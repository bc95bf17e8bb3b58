"""The measurements, limits and tests that a session must judge, and the end of each. Pure.

An expectation is a measurement that the baseline holds, a limit of a marker or of the session on a test, or in a gate a test that BASE
selects. Each ends in one way: a row's verdict, or a `Omission` with the reason. So a limit on a test that measures nothing, a test that was
deleted, and one that a project's own files leave out have a word, and no green session is silent about them.

BASE selects with the words of the gate and its own ini file and conftest, and on the machine of the gate. So what a change deletes,
renames, marks otherwise, skips or leaves out by its own files is lost, and a change that loosens a limit is still held to that of BASE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import field
from msgspec.structs import replace

from pytest_gpumem.judging.footprint import AT_THE_END
from pytest_gpumem.limits import LIMITS, MAX_WAITS, OF_FOOTPRINT, demands_more
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.row import (
    DID_NOT_RUN,
    ITS_TEST_FAILED,
    LOST,
    NOT_RUN,
    ROW,
    TEST,
    UNJUDGED,
    Omission,
    Row,
    Status,
    selects,
)

How = Literal[
    "passed",
    "failed",
    "skipped",
    "xfailed",
    "xpassed",
    "left out",
    "not reached",
    "gone",
    "not asked for",
]
"""How a test ended: by its reports; left out by an option, an ini file, a conftest or a module that skips; not reached before the session
ended; no longer there; or outside of what was asked for."""


class Expectation(NamedTuple):
    """One thing that is to be judged."""

    nodeid: str
    what: str = ROW  # as `Omission.what`
    label: str = ""  # of a measurement
    unmeasured: bool = False  # of a test that measures in BASE: the change's has no fixture for it


class Ending(NamedTuple):
    """How a test ended."""

    how: How
    reason: str = ""  # in words, such as "deselected by -m of pytest.ini"
    by_words: bool = False  # as `Omission.by_words`
    plugin: str = ""  # the file of an installed plugin that left it out, such as one that divides the tests among runners
    in_base: bool = False  # BASE runs the test on this machine: whatever leaves it out loses it
    base_too: bool = False  # as `Omission.base_too`


# What BASE selects


class ExpectedTest(Record, frozen=True):
    """A test that a session selects, and that somebody relies on."""

    limits: Limits  # Those of its marker and of the session
    measures: bool = False  # It has a fixture that measures


class Selection(Record, frozen=True):
    """The tests that a session selects, by its words, ini file and conftest."""

    tests: dict[str, ExpectedTest]  # By node id, those that measure or have a limit
    others: tuple[str, ...] = ()  # Node ids of the others
    left_out: tuple[str, ...] = ()
    """Node ids of tests that a mark skips or expects to fail, and of modules that skip or cannot be imported: on another machine, or with
    another library, they may run."""
    dividing: tuple[
        str, ...
    ] = ()  # Files of installed plugins that left out tests, which stand above all the same
    files: dict[str, str] = field(
        default_factory=dict
    )  # SHA-256 of test files, by their path in node ids

    def has(self, nodeid: str) -> bool:
        """True if it selects a test."""
        return nodeid in self.tests or nodeid in self.others

    def leaves_out(self, nodeid: str) -> bool:
        """True if it leaves out a test that may run elsewhere."""
        return any(within == nodeid or selects(within, nodeid) for within in self.left_out)

    def lacks(self, nodeid: str) -> bool:
        """True if it has no such test."""
        return not self.has(nodeid) and not self.leaves_out(nodeid)


def against_base(ended: Ending, one: Expectation, base: Selection, name: str) -> Ending:
    """How a test of a change ended, by what BASE selects: words leave out what they leave out of BASE too.
    `one`: what is expected of it.
    `name`: of BASE.
    """
    if ended.how in ("passed", "failed"):
        return ended
    if base.has(one.nodeid):
        if ended.plugin and ended.plugin in base.dividing:
            return ended._replace(by_words=True)
        return ended._replace(by_words=False, in_base=True)
    # What the baseline holds was measured once: a library that this machine lacks may be the reason.
    doubtful = one.what == ROW and base.leaves_out(one.nodeid)
    if doubtful:
        return ended
    return ended._replace(
        reason=ended.reason if ended.by_words else f"left out of {name} too", base_too=True
    )


def held(
    own: Limits,
    base: Limits,
    names: Iterable[str],
    name: str,
    allowed: Callable[[str, str | None], bool],
) -> Limits:
    """The limits to which a change holds a test, or those of BASE where they demand more.
    `names`: the limits that apply.
    `name`: of BASE, for the origin of its limits.
    `allowed`: whether a looser limit, by its name and new value, is accepted.
    """
    values, origin = dict[str, str | None](), dict(own.origin)
    for limit in names:
        asked, here = getattr(base, limit), getattr(own, limit)
        if demands_more(limit, asked, here) and not allowed(limit, here):
            values[limit], origin[limit] = asked, f"{base.origin.get(limit, 'limit')} of {name}"
    return replace(own, **values, origin=origin) if values else own


def edited(nodeid: str, own: Selection, base: Selection) -> bool:
    """True if a change edits the file of a test: the limits of its calls may differ, which no collection sees."""
    file = nodeid.partition("::")[0]
    return own.files.get(file) != base.files.get(file)


class LooserLimit(NamedTuple):
    """A limit of a test that a change loosens."""

    key: str  # node id of the test, or the key of a row
    limit: str
    was: str
    now: str | None  # None: removed


def loosened(own: Selection, base: Selection) -> Iterator[LooserLimit]:
    """The limits that a change loosens or removes, of tests that it still has."""
    for nodeid, test in base.tests.items():
        here = own.tests.get(nodeid)
        if here is not None or nodeid in own.others:
            yield from looser(nodeid, Limits() if here is None else here.limits, test.limits)


def looser(key: str, own: Limits, base: Limits) -> Iterator[LooserLimit]:
    """The limits of a test or a row that demand less than those of BASE."""
    for limit in LIMITS:
        was, now = getattr(base, limit), getattr(own, limit)
        if demands_more(limit, was, now):
            yield LooserLimit(key, limit, was, now)


# How each ended


def of_base(base: Selection, measures: Mapping[str, bool]) -> list[Expectation]:
    """The tests that BASE relies on.
    `measures`: by node id of each test that the change collects, whether it has a fixture that measures.
    """
    return [
        Expectation(nodeid, TEST, unmeasured=one.measures and not measures.get(nodeid, True))
        for nodeid, one in base.tests.items()
    ]


def judged(row: Row) -> set[str]:
    """The limits that a row's verdict is about, and those that a call or a marker lifts from it."""
    names = {
        name
        for name in LIMITS
        if getattr(row.limits, name) is not None or name in row.limits.origin
    }
    if row.measurement is None:
        reads_waits = row.footprint is not None and row.footprint.waits is not None
        names &= {*OF_FOOTPRINT, *((MAX_WAITS,) if reads_waits else ())}
    if row.footprint is None:
        names -= set(OF_FOOTPRINT)
    elif not row.footprint.ended:
        names -= set(AT_THE_END)
    return names


def discharge(one: Expectation, rows: Sequence[Row], ended: Ending) -> Omission | None:
    """How an expectation ended; None if the verdict of a row says so, or the test's failure.
    `rows`: of its test.
    `ended`: how its test ended.
    """
    ran = ended.how in ("passed", "failed")
    if one.what == ROW:
        if ran and any(row.label == one.label and row.measurement is not None for row in rows):
            return None
        status, reason = _of_row(ended)
    elif one.what == TEST:
        if ran and (
            ended.how == "failed"
            or not one.unmeasured
            or any(row.measured_something for row in rows)
        ):
            return None
        status, reason = _of_row(ended)
    else:
        if ended.how == "failed" or any(one.what in judged(row) for row in rows):
            return None
        status, reason = _of_limit(one.what, ended)
    skipped = ended.in_base and ended.how in ("skipped", "xfailed", "xpassed")
    return Omission(
        one.nodeid,
        one.label,
        status,
        reason,
        one.what,
        ended.by_words,
        base_too=ended.base_too,
        skipped=skipped,
    )


def _of_row(ended: Ending) -> tuple[Status, str]:
    if ended.how == "passed":
        return LOST, "its test passed without it"
    if ended.base_too:
        return NOT_RUN, ended.reason
    if ended.how == "failed" and not ended.reason.startswith(DID_NOT_RUN):
        return LOST, ITS_TEST_FAILED
    if ended.how in ("failed", "skipped", "xfailed", "xpassed"):
        return LOST, f"its test {ended.reason or ended.how}"
    return _not_run(ended, "its")


def _of_limit(name: str, ended: Ending) -> tuple[Status, str]:
    if ended.how in ("passed", "xfailed", "xpassed"):
        measured = "watched no memory" if name in OF_FOOTPRINT else "measured nothing"
        return UNJUDGED, f"the test {ended.how} and {measured}"
    return (NOT_RUN, ended.reason) if ended.base_too else _not_run(ended, "the")


def _not_run(ended: Ending, its: str) -> tuple[Status, str]:
    if ended.how == "gone":
        return LOST, f"{its} test is no longer collected"
    return LOST if ended.in_base else NOT_RUN, ended.reason or ended.how


def lost(missing: Iterable[Omission]) -> list[Omission]:
    """Those that fail a gate and a comparison of files: what is lost, and what something else than words of the command line left out."""
    return [one for one in missing if one.status in (LOST, NOT_RUN) and not one.accounted]


def open_under_strict(missing: Iterable[Omission]) -> list[Omission]:
    """Those that fail a strict session: all but what words of the command line left out or allowed."""
    return [one for one in missing if not one.accounted]
