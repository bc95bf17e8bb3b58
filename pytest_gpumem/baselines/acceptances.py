"""The accepted changes of a project: files of `.gpumem/accepted`, which `gpumem accept` writes.

    {"test", "reason", "who", "base", "gpu", "utc", "changes": [{"row", "figure", "up_to"}]}

`figure` says what is accepted, and `up_to` how far:

- `time`: a slow-down, "8.41%";
- `memory`: a peak, "96 MiB";
- `limit`: another value of a limit, "max_regression=5%", or "max_copies=none" for no limit;
- `removed`: the row is gone;
- `renamed`: the row was the row "tests/test_a.py::test_old" before;
- `measured`: the row is measured in another way, such as another mode.

A file counts as long as it is there. For a row and figure, a later file replaces an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from pytest_gpumem.files import content, parsed, write_whole
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.limits import exact_count
from pytest_gpumem.limits import EXACT, LIMITS, PEAK, TIME, demands_more, relative
from pytest_gpumem.outcomes import Code, FileError, Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records import key_of, selects
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import from_plain
from pytest_gpumem.revisions import files_at
from pytest_gpumem.units import QuantityError, format_bytes, parse_bytes, parse_margin

FOLDER = Path(".gpumem", "accepted")  # below pytest's root folder
BY_SIZE = ("time", "memory")  # figures that are accepted up to a size
NONE = "none"  # value of a limit that a change removes

Figure = Literal["time", "memory", "limit", "removed", "renamed", "measured"]
NotBlank = Annotated[str, msgspec.Meta(pattern=r"\S")]

FORGIVES: Mapping[str, Figure] = {TIME: "time", PEAK: "memory", **dict.fromkeys(EXACT, "limit")}
"""By the name of a limit that compares with earlier runs: the figure that forgives it."""


class AcceptedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One change of a row, as the module's docstring explains it."""

    row: NotBlank  # the row's key, or a node id that selects its test
    figure: Figure
    up_to: str | None = None  # None of "removed" and "measured"

    @property
    def limit(self) -> str:
        return (self.up_to or "").partition("=")[0] if self.figure == "limit" else ""

    @property
    def value(self) -> str:
        return (self.up_to or "").partition("=")[2].strip()

    @property
    def option(self) -> str:
        """The value of `--change` that accepts it."""
        what = self.up_to or self.figure
        return f"{self.figure}={what}" if self.figure in BY_SIZE else what

    def __str__(self) -> str:
        if self.figure == "limit":
            return f"limit {self.up_to}"
        if self.figure == "renamed":
            return f"renamed from {self.up_to}"
        if self.figure == "measured":
            return "another way of measuring"
        return f"{self.figure} up to {self.up_to}" if self.up_to is not None else "its removal"


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    test: NotBlank  # node id of the test, or what selects it
    reason: NotBlank
    who: NotBlank
    changes: Annotated[tuple[AcceptedChange, ...], msgspec.Meta(min_length=1)]
    base: str | None = None  # revision that the change was compared with; None without git
    gpu: str | None = None  # device that measured the change; None if nothing was measured
    utc: str = ""  # when it was accepted, ISO 8601

    @property
    def why(self) -> str:
        return f"({self.who}: {self.reason})"

    @property
    def file_name(self) -> str:
        safe = re.sub(r"[^A-Za-z0-9]+", "-", self.test).strip("-")[-60:].strip("-") or "test"
        return f"{safe}-{_digest(msgspec.to_builtins(self))}.json"


Accepted = tuple[Acceptance, AcceptedChange]
"""An accepted change, with its file."""


@dataclass(frozen=True)
class Acceptances:
    """The acceptances of a project."""

    files: Mapping[str, Acceptance] = field(default_factory=dict)  # by the name of the file
    root: Path = Path()  # folder of the project

    def of(self, row_key: str, figure: Figure, limit: str = "") -> Accepted | None:
        """Return the newest accepted change of a row. `limit`: empty for any."""
        for acceptance, change in self._newest_first():
            named = change.figure == figure and limit in ("", change.limit)
            if named and covers(change.row, row_key):
                return acceptance, change
        return None

    def forgiving(self, row_key: str, limit: str) -> Accepted | None:
        """Return the newest accepted change that forgives a broken limit."""
        figure = FORGIVES.get(limit)
        if figure is None:
            return None
        return self.of(row_key, figure, limit if figure == "limit" else "")

    def digest(self, row_key: str, figure: Figure) -> str:
        """Return what tells this acceptance of a figure from others; empty without one."""
        newest = self.of(row_key, figure)
        if newest is None:
            return ""
        acceptance, change = newest
        since = acceptance.base or acceptance.utc
        return _digest([change.row, change.figure, change.up_to, since])

    def why_gone(self, row_key: str, renamed: bool = True) -> str | None:
        """Return why a row may be missing, such as "removed (ann: obsolete)", or None.
        `renamed`: it may have another name now."""
        for acceptance, change in self._newest_first():
            if change.figure == "removed" and covers(change.row, row_key):
                return f"removed {acceptance.why}"
            if renamed and change.figure == "renamed" and covers(change.up_to or "", row_key):
                return f"renamed to {change.row} {acceptance.why}"
        return None

    def old_names(self) -> dict[str, str]:
        """Return the old names of renamed tests by their new names."""
        names = dict[str, str]()
        for _, change in self._newest_first():
            if change.figure == "renamed" and change.up_to is not None:
                names.setdefault(change.row, change.up_to)
        return names

    def allows(self, row_key: str, limit: str, value: str | None) -> bool:
        """Return whether a row may have another value of a limit, or none."""
        newest = self.of(row_key, "limit", limit)
        if newest is None:
            return False
        accepted = newest[1].value
        return accepted == NONE or not demands_more(limit, accepted, value)

    def split_at(self, revision: str) -> tuple[Acceptances, Acceptances]:
        """Return those whose files are as in a revision, and the others. Raises `RevisionError`."""
        if not self.files:
            return self, self
        names = files_at(revision, FOLDER, self.root)
        before = {name: self.files[name] for name in self.files if name in names}
        added = {name: self.files[name] for name in self.files if name not in names}
        return Acceptances(before, self.root), Acceptances(added, self.root)

    def _newest_first(self) -> Iterator[Accepted]:
        names = sorted(self.files, key=lambda name: (self.files[name].utc, name), reverse=True)
        for name in names:
            for change in self.files[name].changes:
                yield self.files[name], change


def acceptances(folder: Path) -> Acceptances:
    """Read the acceptances below pytest's root folder. Raises `UserError`: one cannot be used."""
    files = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            files[path.name] = read(content(path))
        except FileError as error:
            raise UserError(f"{FOLDER / path.name}: {printable(str(error))}") from None
    return Acceptances(files, folder)


def read(written: bytes) -> Acceptance:
    """Read a file. Raises `FileError`."""
    acceptance = from_plain(parsed(written), Acceptance)
    for index, change in enumerate(acceptance.changes):
        problem = refusal(change)
        if problem is not None:
            raise FileError(f"$.changes[{index}].up_to: {problem}")
    return acceptance


def refusal(change: AcceptedChange) -> str | None:
    """Return what is wrong with a change, or None."""
    up_to = change.up_to or ""
    if change.figure in ("removed", "measured"):
        return None if change.up_to is None else f"{change.figure} takes no value"
    if not up_to.strip():
        return f"{change.figure} needs a value"
    if change.figure == "limit" and change.limit not in LIMITS:
        return f"{change.limit!r} is no limit; accepted are {', '.join(LIMITS)}"
    try:
        if change.figure == "time":
            parse_margin(up_to)
        elif change.figure == "memory":
            parse_bytes(up_to)
        elif change.figure == "limit" and change.value != NONE:
            LIMITS[change.limit].parse(change.value)
    except QuantityError as error:
        return str(error)
    return None


def write(root: Path, acceptance: Acceptance) -> Path:
    """Write a new file. Raises `UserError`: it cannot be written."""
    path = FOLDER / acceptance.file_name
    text = json.dumps(msgspec.to_builtins(acceptance), indent=1) + "\n"
    try:
        (root / FOLDER).mkdir(parents=True, exist_ok=True)
        write_whole(root / path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def covers(name: str, key: str) -> bool:
    """True if a name is a row's key, or a node id that selects the row's test."""
    of_test = key_of(name, "")
    # A key "t.py::a[label]"; a test "t.py::a", with any label; a file, a folder, a class.
    exact = key in (name, of_test)
    return exact or key.startswith(f"{of_test}[") or selects(name, key)


def under_other_name(nodeid: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        if selects(name, nodeid):
            return other + nodeid[len(name) :]
    return nodeid


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# What a verdict asks to accept


def with_accepted_counts(row: Row, acceptances: Acceptances) -> Row:
    """Return the row with each accepted count in place of the limit "base" on it."""
    values: dict[str, str | None] = {}
    for name in relative(row.limits):
        newest = acceptances.of(row.key, "limit", name)
        if newest is not None:
            value = newest[1].value
            values[name] = None if value == NONE else value
    origin = {**row.limits.origin, **dict.fromkeys(values, "accepted")}
    return replace(row, limits=replace(row.limits, **values, origin=origin))


def changes_of(row: Row) -> Iterator[AcceptedChange]:
    """Yield the changes that the verdict of a row asks to accept; none where its test failed."""
    if row.test_error:
        return
    for result in row.verdict.limits:
        if result.code is Code.MEASURED_DIFFERENTLY:
            yield AcceptedChange(row.key, "measured")
        elif result.outcome is Outcome.FAIL and result.limit in FORGIVES:
            up_to = _measured(row, result.limit)
            if up_to is not None:
                yield AcceptedChange(row.key, FORGIVES[result.limit], up_to)


def _measured(row: Row, limit: str) -> str | None:
    if limit == TIME:
        return _slow_down(row)
    if limit == PEAK:
        return None if row.footprint is None else format_bytes(max(peaks_of(row.footprint)))
    if limit in relative(row.limits) and row.measurement is not None:
        count = exact_count(row.measurement, limit)
        if not isinstance(count, str):
            return f"{limit}={LIMITS[limit].parse(count)}"
    return None


def _slow_down(row: Row) -> str | None:
    """Return the measured slow-down, rounded up, with the limit on top, so that a duet decides."""
    verdict, written = row.verdict, row.limits.max_regression
    if written is None or row.measurement is None or verdict.change is None:
        return None
    limit = parse_margin(written).over(row.measurement.latency)
    change = (1 + verdict.change) * (1 + limit) - 1
    return f"{math.ceil(max(change, 0.0) * 1e4 - 1e-6) / 100:g}%"


def absolute_limits(row: Row) -> list[str]:
    """Return the failing limits that no acceptance forgives."""
    forgiven = ("", TIME, PEAK, *relative(row.limits))
    failing = [result.limit for result in row.verdict.limits if result.outcome is Outcome.FAIL]
    return [name for name in failing if name not in forgiven]


def command(row: Row) -> str:
    words = ["gpumem", "accept", row.key]
    for change in changes_of(row):
        words += ["--change", change.option]
    return f"{shlex.join(words)} --reason '...'"
