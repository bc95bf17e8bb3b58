"""The changes of tests that somebody accepted: one JSON file of `.gpumem/accepted` for a test, in the project's repository.

    {"schema": 1, "sha256": "...", "content": {
        "test", "reason", "who", "base", "changes": [{"row", "scope", "size", "limit", "old"}]}}

An acceptance raises limits up to a size, and no further:

- `time`: the slow-down, such as "8.41%";
- `memory`: the peak of the memory, such as "96 MiB", in place of a growth over the baseline;
- `kernels`: the count of a limit "base";
- `limit`: the new value of a limit that a change loosens, or "none";
- `removed`: the measurement is gone.

The digest covers the content, and the file's name has its first digits: a file cannot be edited, and an old acceptance cannot come back
under another name. Pure, apart from `acceptances` and `write`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as with_fields
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

import msgspec

from pytest_gpumem.baselines.acceptance import slower_without_limit
from pytest_gpumem.baselines.history import Baseline, Reset
from pytest_gpumem.baselines.layout import digest
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.finding import Finding
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.limits import COUNTS, relative
from pytest_gpumem.judging.reference import PLAIN
from pytest_gpumem.limits import LIMITS, count_of
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Comparison, LimitResult, Row, covers
from pytest_gpumem.records.schema import SchemaError, from_plain, other_schema
from pytest_gpumem.result_files import FileError, content, parsed
from pytest_gpumem.units import (
    QuantityError,
    format_bytes,
    format_share,
    parse_bytes,
    parse_share,
    short_bytes,
)

FOLDER = Path(".gpumem", "accepted")  # in the folder of a project's tests: pytest's root folder
SCHEMA = 1  # version of the layout
LARGEST = 2**20  # bytes of the largest file that is read
LONGEST = 60  # characters of a test's id in the name of its file
DIGITS = 12  # of the digest in the name of a file
ROUNDING = 1e-9  # of shares that are written in percent
NONE = "none"  # size of a limit that a change removes


class Scope(str, Enum):
    """What an acceptance is about."""

    TIME = "time"
    MEMORY = "memory"
    KERNELS = "kernels"
    LIMIT = "limit"
    REMOVED = "removed"


SCOPES: Mapping[str, Scope] = {
    "max_regression": Scope.TIME,
    "max_peak_regression": Scope.MEMORY,
    **dict.fromkeys(COUNTS, Scope.KERNELS),
}
"""By the name of a limit that is relative to the baseline, or may be: the scope that covers it."""
OF_FIGURES = (
    Scope.TIME,
    Scope.MEMORY,
    Scope.KERNELS,
)  # scopes of a change against earlier runs, which a saved run resets


EXACT = (Scope.MEMORY, Scope.KERNELS)  # those that no duet measures


class AcceptedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One change of a row."""

    row: str  # the row's key, or a node id that selects its test
    scope: Scope
    size: str | None = None  # the largest change; None for `removed`
    limit: str | None = None  # name of the limit, for `kernels` and `limit`
    old: str | None = None  # for `limit`: the value before, if it is known


class Acceptance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file."""

    test: str  # node id of the test, or what selects it
    reason: str  # why it is accepted
    who: str  # who accepted it
    changes: tuple[AcceptedChange, ...]
    base: str | None = None  # revision that the change was compared with; None if unknown

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return digest(msgspec.to_builtins(self))

    @property
    def file_name(self) -> str:
        """The name of its file: safe characters of the test's id, and the beginning of the digest."""
        safe = re.sub(r"[^A-Za-z0-9]+", "-", self.test).strip("-")[-LONGEST:].strip("-") or "test"
        return f"{safe}-{self.digest[:DIGITS]}.json"

    def of(self, key: str, scopes: Collection[Scope] = tuple(Scope)) -> list[AcceptedChange]:
        """Its changes of a row, by `Row.key`."""
        return [
            change for change in self.changes if change.scope in scopes and covers(change.row, key)
        ]


# Files


def text(acceptance: Acceptance) -> str:
    """The text of a file."""
    plain = msgspec.to_builtins(acceptance)
    return (
        json.dumps({"schema": SCHEMA, "sha256": digest(plain), "content": plain}, indent=1) + "\n"
    )


def read(name: str, written: bytes) -> Acceptance:
    """Read what `text` wrote. `name`: of the file. Raises `FileError`: it is something else, was edited or has another name."""
    value = parsed(written)
    if not isinstance(value, dict) or value.keys() != {"schema", "sha256", "content"}:
        raise FileError(
            "$: not an object with the keys schema, sha256 and content; gpumem accept writes such a file"
        )
    if (schema := value["schema"]) != SCHEMA or isinstance(schema, bool):
        raise FileError(other_schema(schema, SCHEMA))
    try:
        found = from_plain(value["content"], Acceptance, "$.content")
    except (SchemaError, RecursionError) as error:
        raise FileError(str(error) or "$.content: nested too deeply") from None
    for field in ("test", "reason", "who"):
        if not getattr(found, field).strip():
            raise FileError(f"$.content.{field}: empty")
    if not found.changes:
        raise FileError("$.content.changes: empty")
    for index, change in enumerate(found.changes):
        if (why := refusal(change)) is not None:
            raise FileError(f"$.content.changes[{index}].{why}")
    if digest(value["content"]) != value["sha256"]:
        raise FileError(
            "$.sha256: does not fit the content, which was edited; gpumem accept writes it anew"
        )
    if name != found.file_name:
        raise FileError(
            f"its name does not fit its content; gpumem accept named it {found.file_name}"
        )
    return found


def refusal(change: AcceptedChange) -> str | None:
    """What is wrong with a change, beginning with the field; None if nothing is."""
    if not change.row.strip():
        return "row: empty"
    named, sized = change.limit is not None, change.size is not None
    if named is not (change.scope in (Scope.KERNELS, Scope.LIMIT)):
        return f"limit: {change.limit!r}; the scope {change.scope.value} {'has none' if named else 'takes the name of a limit'}"
    if sized is (change.scope is Scope.REMOVED):
        return f"size: {change.size!r}; the scope {change.scope.value} {'has none' if sized else 'takes one'}"
    if change.old is not None and change.scope is not Scope.LIMIT:
        return f"old: {change.old!r}; the scope {change.scope.value} has none"
    known = (
        LIMITS
        if change.scope is Scope.LIMIT
        else [name for name, scope in SCOPES.items() if scope is Scope.KERNELS]
    )
    if named and change.limit not in known:
        return f"limit: {change.limit!r}; the scope {change.scope.value} takes one of {', '.join(known)}"
    try:
        _parsed(change)
    except QuantityError as error:
        return f"size: {error}"
    return None


def _parsed(change: AcceptedChange) -> float | str | None:
    """The size as a number where it is one. Raises `QuantityError`: it cannot be read."""
    size, limit = change.size or "", change.limit or ""
    if change.scope is Scope.TIME:
        return parse_share(size)
    if change.scope is Scope.MEMORY:
        return parse_bytes(size)
    if change.scope is Scope.KERNELS:
        return count_of(size)
    if change.scope is Scope.LIMIT and size != NONE:
        return LIMITS[limit].parse(size)
    return change.size


def share_text(slow_down: float) -> str:
    """The size that holds a measured slow-down, in hundredths of a percent."""
    return f"{math.ceil(max(slow_down, 0.0) * 1e4 - 1e-6) / 100:g}%"


def acceptances(root: Path) -> tuple[Acceptance, ...]:
    """The accepted changes of a project, by the names of their files. `root`: pytest's root folder.
    Raises `UserError`: a file cannot be used; one line with its name and the field.
    """
    folder, found = root / FOLDER, list[Acceptance]()
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UserError(f"{FOLDER}: {error.strerror or error}") from None
    for path in paths:
        try:
            found.append(read(path.name, content(path, LARGEST)))
        except FileError as error:
            raise UserError(
                f"{FOLDER / path.name}: {' '.join(printable(str(error)).split())}"
            ) from None
    return tuple(found)


def write(root: Path, acceptance: Acceptance) -> Path:
    """Write the file of an acceptance; its path relative to `root`. Raises `UserError`: it cannot be written."""
    path = FOLDER / acceptance.file_name
    try:
        (root / FOLDER).mkdir(parents=True, exist_ok=True)
        write_whole(root / path, text(acceptance))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return path


# What they cover


def without_accepted(
    row: Row,
    findings: Iterable[Finding | LimitResult],
    accepted: Sequence[Acceptance],
    *,
    comparison: Comparison | None,
    scopes: Collection[Scope] = OF_FIGURES,
    low: float | None = None,
) -> list[LimitResult]:
    """The findings about a row: of a limit that does not hold, and is accepted up to the row's figures, it is ACCEPTED.

    A FAIL that is of no limit stands: a failed assertion, a crash, a lost context.
    `comparison`: the change of the row against its baseline.
    `low`: the least slow-down that a duet proves, as a share, in place of that of the comparison.
    """
    results = [one.result if isinstance(one, Finding) else one for one in findings]
    sizes = _sizes(row.key, accepted, scopes)
    held = [
        one
        for one in results
        if one.outcome is Outcome.FAIL and _within(one, row, comparison, sizes, low)
    ]
    if not held:
        return results
    names = ", ".join(dict.fromkeys(one.limit for one in held))
    because = "; ".join(
        dict.fromkeys(f"{one.who}: {one.reason}" for one in accepted if one.of(row.key, scopes))
    )
    first = "; ".join(text for text in (f"{names} accepted ({because})", held[0].reason) if text)
    now = {
        one: LimitResult(
            one.limit, Outcome.ACCEPTED, one.code, first if one is held[0] else one.reason
        )
        for one in held
    }
    return [now.get(one, one) for one in results]


def _sizes(
    key: str, accepted: Iterable[Acceptance], scopes: Collection[Scope]
) -> dict[tuple[Scope, str], list[str]]:
    """By scope and limit, the accepted sizes of a row."""
    found: dict[tuple[Scope, str], list[str]] = {}
    for change in (change for one in accepted for change in one.of(key, scopes)):
        found.setdefault((change.scope, change.limit or ""), []).append(change.size or "")
    return found


def _within(
    result: LimitResult,
    row: Row,
    comparison: Comparison | None,
    sizes: Mapping[tuple[Scope, str], list[str]],
    low: float | None,
) -> bool:
    """True if the figure that breaks a limit is accepted. Of a time: if it is not beyond doubt more than what is accepted."""
    name, scope = result.limit, SCOPES.get(result.limit)
    if scope is None:
        return False
    found = sizes.get((scope, name if scope is Scope.KERNELS else ""), [])
    if not found:
        return False
    if scope is Scope.TIME:
        return _time_within(result, comparison, [parse_share(size) for size in found], low)
    if scope is Scope.MEMORY:
        return row.footprint is not None and max(peaks_of(row.footprint)) <= max(
            map(parse_bytes, found)
        )
    size = exact_size(name, row)
    return (
        size is not None
        and name in relative(row.limits)
        and count_of(size) <= max(map(count_of, found))
    )


def _time_within(
    result: LimitResult, comparison: Comparison | None, shares: Sequence[float], low: float | None
) -> bool:
    if low is None and comparison is not None:
        low = (1 + comparison.delta) / (1 + PLAIN) - 1
    return low is not None and low <= _slow_down(shares)


def _slow_down(shares: Iterable[float]) -> float:
    """The accepted slow-down: several were accepted since the last saved run, one after the other."""
    return math.prod(1 + share for share in shares) - 1 + ROUNDING


def exact_size(limit: str, row: Row) -> str | None:
    """The size of a change of kernels: the row's count; None if it is not known."""
    if row.measurement is None:
        return None
    count = COUNTS[limit](row.measurement)
    return None if isinstance(count, str) else LIMITS[limit].parse(count)


class Acceptances:
    """The accepted changes that count, without those that a saved run took over."""

    def __init__(
        self, found: Iterable[Acceptance] = (), taken_over: Collection[tuple[str, str]] = ()
    ) -> None:
        """`taken_over`: as `Baseline.taken_over`."""
        self._found = {one.digest: one for one in found}
        self._taken_over = frozenset(taken_over)

    @property
    def files(self) -> list[Acceptance]:
        """All of them."""
        return list(self._found.values())

    def of(self, key: str, scopes: Collection[Scope] = OF_FIGURES) -> list[Acceptance]:
        """The acceptances of changes of a row, by `Row.key`."""
        return [
            one
            for digest, one in self._found.items()
            if (digest, key) not in self._taken_over and one.of(key, scopes)
        ]

    def removed(self, key: str) -> Acceptance | None:
        """The acceptance of a measurement's removal; None without one."""
        return next(iter(self.of(key, (Scope.REMOVED,))), None)

    def loosens(self, key: str, limit: str, new: str | None) -> Acceptance | None:
        """The acceptance by which a test may be held to another value of a limit than base demands; None without one.
        `new`: the value; None for no limit.
        """
        for one in self.of(key, (Scope.LIMIT,)):
            for size in (
                str(change.size) for change in one.of(key, (Scope.LIMIT,)) if change.limit == limit
            ):
                if size in (NONE, new) or (new is not None and not LIMITS[limit].looser(new, size)):
                    return one
        return None

    def slow_down(self, key: str) -> float:
        """The accepted slow-down of a row, as a share."""
        changes = (change for one in self.of(key) for change in one.of(key, (Scope.TIME,)))
        return _slow_down(parse_share(str(change.size)) for change in changes)

    def other_way(self, row: Row) -> bool:
        """True if a row may be measured in another way than its baseline."""
        scopes = {change.scope for one in self.of(row.key) for change in one.of(row.key)}
        changed = [
            result for result in row.verdict.limits if result.code is Code.MEASURED_DIFFERENTLY
        ]
        return bool(changed) and all(SCOPES.get(result.limit) in scopes for result in changed)


def awaiting(baseline: Baseline, accepted: Acceptances) -> Baseline:
    """The baseline without the rows of accepted changes that no saved run followed: there is nothing to compare them with."""
    keys = {*baseline.rows, *baseline.footprints}
    found = {
        key: last
        for key in keys
        if (last := [*accepted.of(key), *accepted.of(key, (Scope.REMOVED,))][-1:])
    }
    now = datetime.now(timezone.utc)
    resets = {
        key: Reset(one.digest, key, one.reason, one.who, now, accepted=(one.digest,))
        for key, (one,) in found.items()
    }
    return with_fields(
        baseline,
        rows={key: runs for key, runs in baseline.rows.items() if key not in found},
        footprints={key: runs for key, runs in baseline.footprints.items() if key not in found},
        resets={**baseline.resets, **resets},
    )


def in_words(row: Row, change: float | None = None) -> list[str]:
    """What is accepted of a row, such as "+8.41 %". `change`: as of `changes_of`."""
    words = list[str]()
    for name in row.verdict.accepted:
        scope = SCOPES[name]
        if scope is Scope.TIME:
            measured = change if change is not None else _measured(row, row.verdict.code)
            words.append("slower" if measured is None else format_share(measured, sign=True))
        elif scope is Scope.MEMORY:
            words.append(
                "memory"
                if row.footprint is None
                else f"a peak of {short_bytes(max(peaks_of(row.footprint)))}"
            )
        else:
            words.append(f"{name} {exact_size(name, row)}")
    return words


def _measured(row: Row, code: Code | None) -> float | None:
    """The change of a row's time, as a share; None if it was not compared."""
    comparison = row.verdict.comparison
    if comparison is None:
        return None
    return comparison.delta


# What a run asks for


def changes_of(row: Row, change: float | None = None) -> Iterator[AcceptedChange]:
    """The changes of a row that its verdict asks to accept, up to its figures.
    `change`: measured by a duet, as a share, in place of that of the verdict.
    """
    comparison = row.verdict.comparison
    if comparison is not None and slower_without_limit(row):
        yield AcceptedChange(row.key, Scope.TIME, share_text(comparison.delta))
    for result in row.verdict.limits:
        other_way = result.code is Code.MEASURED_DIFFERENTLY
        scope = SCOPES.get(result.limit)
        if scope is None or not (result.outcome is Outcome.FAIL or other_way):
            continue
        if scope is Scope.KERNELS:
            if (
                result.limit in relative(row.limits)
                and (size := exact_size(result.limit, row)) is not None
            ):
                yield AcceptedChange(row.key, scope, size, result.limit)
        elif scope is Scope.MEMORY:
            if row.footprint is not None:
                yield AcceptedChange(row.key, scope, format_bytes(max(peaks_of(row.footprint))))
        else:
            measured = change if change is not None else _measured(row, result.code)
            if measured is not None or other_way:
                yield AcceptedChange(row.key, scope, share_text(measured or 0.0))


def own_limits(row: Row) -> list[str]:
    """Limits of a row that fail and whose value is the project's own: the test changes them, and no acceptance does."""
    covered = {change.limit or change.scope for change in changes_of(row)}
    failing = [
        result.limit
        for result in row.verdict.limits
        if result.outcome is Outcome.FAIL and result.limit
    ]
    return [name for name in failing if not covered & {name, SCOPES.get(name)}]


def command(row: Row) -> str:
    """The command that accepts what `changes_of` finds of a row."""
    words = ["gpumem", "accept", row.key]
    for change in changes_of(row):
        size = change.size or ""
        words += [
            "--scope",
            change.scope.value,
            "--size",
            f"{change.limit}={size}" if change.limit is not None else size,
        ]
    return f"{shlex.join(words)} --reason '...'"
