"""Two sides of result files: the second is judged against the first as in a session.

A side is a file of --benchmark-json, a saved run, or several of them.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from datetime import timezone
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pytest_gpumem.baselines.history import Baseline, assemble
from pytest_gpumem.baselines.saved import PastRow, SavedRow, SavedRun, memory_of, read, times_of
from pytest_gpumem.baselines.verdicts import judged, screened
from pytest_gpumem.judging.expectations import lost
from pytest_gpumem.judging.finding import counted, worst
from pytest_gpumem.judging.judge import comparable, conditions, failing_in_themselves
from pytest_gpumem.judging.verdict import UNLIMITED, with_verdict
from pytest_gpumem.limits import LIMITS, of_the_test
from pytest_gpumem.outcomes import Code, Exit, Outcome, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import LOST, ROW, UNJUDGED, LimitResult, Omission, Row
from pytest_gpumem.result_files import FileError, content, document_in, parsed, revision_of, time_of

OPTION = "--max-regression"
SHOWN = 3  # most folders that an error names
FAILED = "its test failed"  # by an assertion or an error of its own


class LeftOut(NamedTuple):
    """A row of a file that can be no baseline."""

    row: Row
    why: str


@dataclass
class Side:
    """All processes of a side."""

    name: str  # as it was given
    paths: dict[str, Path] = field(default_factory=dict)  # of its files, by the id of their runs
    runs: list[SavedRun] = field(default_factory=list)  # newest last
    baseline: Baseline = field(default_factory=Baseline)  # of all runs
    left_out: dict[str, LeftOut] = field(default_factory=dict)  # rows of no run, by key
    missing: dict[tuple[str, str], Omission] = field(default_factory=dict)
    """What its runs themselves did not judge, by key and by what it is."""

    @property
    def devices(self) -> dict[str, DeviceFacts]:
        """The measured devices by key."""
        return {run.device.key: run.device for run in self.runs}


# Reading a side


def side(given: str) -> Side:
    """Read a file, a folder of files, or a quoted pattern such as "base-*.json".

    Raises `UserError`: no file, a file that cannot be used, a copy, or nothing was measured.
    """
    read_side = Side(given)
    for path in _paths(given):
        try:
            run = _read(path, read_side)
        except (FileError, RecursionError) as error:
            raise UserError(f"{path}: {' '.join(str(error).split())}") from None
        if run.id in read_side.paths:
            raise UserError(f"{path}: the same as {read_side.paths[run.id]}: a copy")
        read_side.paths[run.id] = path
        read_side.runs.append(run)
    read_side.runs.sort(key=lambda run: (run.utc, run.id))
    read_side.baseline = assemble(read_side.runs)
    for key in read_side.baseline.rows:
        read_side.left_out.pop(key, None)
    if not (read_side.baseline.rows or read_side.left_out):
        raise UserError(f"{given}: nothing was measured")
    return read_side


def _paths(given: str) -> list[Path]:
    path = Path(os.path.expanduser(given))  # unchanged where there is no such user
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if files:
            return files
        # Such as `.benchmarks`, which has a folder for each GPU.
        below = sorted({str(file.parent) for file in path.rglob("*.json")})
        hint = f"; there are some in {', '.join(below[:SHOWN])}" if below else ""
        raise UserError(f"{given}: a folder without a .json file{hint}")
    if path.exists():
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not files:
        raise UserError(f"{given}: no such file, folder or pattern")
    return files


def _read(path: Path, into: Side) -> SavedRun:
    """Return the run of a file, and add to a side what else it has. Raises `FileError`."""
    text = content(path)
    value = parsed(text)
    if isinstance(value, dict) and "schema" in value and "gpumem" not in value:
        return read(text)
    if not isinstance(value, dict) or "gpumem" not in value:
        raise FileError(
            "neither a --benchmark-json file of a session with --gpumem nor a saved run"
        )
    document = document_in(value)
    # A test that fails by a limit was timed correctly; an assertion may have ended anything.
    failing = failing_in_themselves(document.rows, bool(document.settings.get("strict")))
    keys = set[str]()
    rows = []
    for row in document.rows:
        if row.key in keys:
            raise FileError(f"holds {row.key} twice")
        keys.add(row.key)
        times = row.measurement
        why = "" if times is None else ", ".join(conditions(times))
        if row.nodeid in failing or (row.failed and not row.measured_something):
            why = FAILED
        if why:
            into.left_out[row.key] = LeftOut(row, why)
        elif row.measured_something:
            # Not reduced: the judge needs more of a run than a baseline keeps.
            rows.append(SavedRow(row.nodeid, row.label, times, row.footprint, row.limits))
    for omission in document.missing:
        into.missing[omission.key, omission.what] = omission
    mode = document.settings.get("mode")
    return SavedRun(
        id=hashlib.sha256(text).hexdigest(),
        utc=time_of(value.get("datetime"), path).astimezone(timezone.utc),
        device=document.device,
        revision=revision_of(value.get("commit_info")),
        mode=mode if isinstance(mode, str) else None,
        rows=tuple(rows),
    )


# Comparing two


class Pair(NamedTuple):
    """A row of the second side, and its newest run of the first."""

    row: Row  # judged against the first side
    before: SavedRow | None
    """None if the first side has no such row, or measured it in another way only."""


@dataclass(frozen=True)
class SidesCompared:
    """The result of a comparison."""

    pairs: tuple[Pair, ...]
    missing: tuple[Omission, ...]
    """Rows of the first side that the second lacks, and limits that its run did not judge."""

    @property
    def rows(self) -> list[Row]:
        """The judged rows of the second side."""
        return [pair.row for pair in self.pairs]

    @property
    def no_verdict(self) -> str | None:
        """Why the comparison decides nothing; None if it does."""
        if not any(pair.before is not None for pair in self.pairs):
            return "no row is on both sides"
        if not any(limited(row) for row in self.rows):
            return f"no row has a limit; {OPTION} sets one for all"
        unjudged = [omission.status for omission in self.missing].count(UNJUDGED)
        return f"{counted(unjudged, 'limit')} judged by nothing" if unjudged else None

    def exit_code(self, *, strict: bool) -> int:
        """Return the exit code, as `outcomes.EXIT_CODES` of `compare`.

        `strict`: every row needs a limit and a PASS of a real GPU.
        """
        if worst([row.verdict for row in self.rows]) is Outcome.FAIL or lost(self.missing):
            return Exit.FAILED
        if self.no_verdict is not None:
            return Exit.NO_VERDICT
        for row in self.rows:
            if strict and (row.verdict.outcome is not Outcome.PASS or row.verdict.simulated):
                return Exit.NO_VERDICT
        return Exit.FINE


def limited(row: Row) -> bool:
    """True if a row has a limit. A pass without one is none."""
    return any(getattr(row.limits, name) is not None for name in LIMITS)


def compare_sides(base: Side, head: Side, max_regression: str | None) -> SidesCompared:
    """Judge every row of `head` against `base`.

    `base`: the side that serves as the baseline.
    `max_regression`: allowed slow-down of rows whose test sets none, as written; None: as `head`.
    Raises `UserError`: the sides are not comparable, or share a file.
    Raises `QuantityError`: a limit that cannot be read.
    """
    _refuse_incomparable(base, head)
    (facts,) = head.devices.values()
    rows = [_merged(runs, max_regression) for runs in head.baseline.rows.values()]
    siblings: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        if row.measurement is not None:
            siblings.setdefault(row.nodeid, {})[row.label] = row.measurement
    judged_rows = []
    for row in rows:
        note = f"not in {base.name}"
        if row.key in base.left_out:
            note += f": {base.left_out[row.key].why}"
        baseline = with_fields(base.baseline, note=note)
        of_test = siblings.get(row.nodeid, {})
        judged_rows.append(judged(row, baseline, facts, siblings=of_test, strict=False))
    for row, why in head.left_out.values():
        reason = f"mend the machine: {why}; no limit was judged"
        finding = LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, reason)
        if why == FAILED:
            finding = LimitResult("", Outcome.FAIL, None, f"{FAILED} in {head.name}")
        limits = _limits(row.limits, max_regression)
        spoilt = replace(row, limits=limits, failed=why == FAILED, differences=())
        judged_rows.append(with_verdict(spoilt, [finding], comparison=None))
    pairs = []
    for row in screened(judged_rows, base.baseline):
        pairs.append(_pair(row, base.baseline))
    return SidesCompared(tuple(pairs), tuple(_missing(base, head)))


def _merged(runs: Sequence[PastRow], max_regression: str | None) -> Row:
    """Return the row of the newest run, with the figures of the other runs as further ones."""
    newest = runs[-1]
    measurement = footprint = None
    for run in reversed(runs):
        times, memory = run.measurement, run.footprint
        if measurement is None:
            measurement = times
        elif times is not None and comparable(measurement, times):
            further = (*measurement.further, times.repeat, *times.further)
            measurement = replace(measurement, further=further)
        if footprint is None:
            footprint = memory
        elif memory is not None:
            repeats = (*footprint.further, memory.repeat, *memory.further)
            footprint = replace(footprint, further=repeats)
    limits = _limits(newest.limits, max_regression)
    row = Row(newest.nodeid, limits, UNLIMITED, measurement, newest.label)
    return replace(row, footprint=footprint)


def _limits(limits: Limits, max_regression: str | None) -> Limits:
    """Return the limits of a row, with the option's slow-down unless its test sets or lifts it."""
    if max_regression is None or of_the_test(limits.origin.get("max_regression")):
        return limits
    origin = {**limits.origin, "max_regression": OPTION}
    return replace(limits, max_regression=max_regression, origin=origin)


def _pair(row: Row, baseline: Baseline) -> Pair:
    """Return a judged row with its newest run of the first side."""
    runs = baseline.reference_runs(row) if row.measurement is not None else ()
    times, memory = times_of(runs), memory_of(baseline.saved(row))
    if not times and not memory:
        return Pair(row, None)
    measurement = times[-1][1] if times else None
    footprint = memory[-1] if memory else None
    return Pair(row, SavedRow(row.nodeid, row.label, measurement, footprint))


def _missing(base: Side, head: Side) -> list[Omission]:
    """Return the rows of the first side that the second lacks, and limits that its runs alone
    did not judge."""
    expected = base.baseline.expected(head.runs[-1].mode)
    for key, runs in base.baseline.rows.items():
        # A row with times too is expected in the mode of its times.
        if not times_of(runs):
            expected[key] = runs[-1]
    missing = []
    for key, saved in expected.items():
        if key not in head.baseline.rows and key not in head.left_out:
            lacks = Omission(saved.nodeid, saved.label, LOST, f"not in {head.name}")
            missing.append(head.missing.get((key, ROW), lacks))
    for what, omission in head.missing.items():
        if omission.status == UNJUDGED and what not in base.missing:
            missing.append(omission)
    return missing


def _refuse_incomparable(base: Side, head: Side) -> None:
    """Raise `UserError`: the sides share a file, or are not of one kind of GPU."""
    for identity, path in head.paths.items():
        if identity in base.paths:
            other = base.paths[identity]
            raise UserError(f"{path}: the same file as {other} on the other side")
    devices = {**base.devices, **head.devices}
    if len({facts.simulated for facts in devices.values()}) > 1:
        raise UserError("simulated results are never compared with a GPU's")
    if len(devices) > 1:
        raise UserError(
            f"{base.name} is of {', '.join(base.devices)}, {head.name} of "
            f"{', '.join(head.devices)}: results of different GPUs are not comparable"
        )
