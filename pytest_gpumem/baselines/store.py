"""Load and save the runs of a kind of device.

A run is a file, `<place>/<GPU>/gpumem/<utc>-<revision>-<id>.json`. It is written whole, never
changes, and no name is used twice: so writers need no lock.

    {"schema": 5, "sha256": "...", "content": {
        "id", "utc", "device", "revision", "mode", "written_by", "rows"}}

The sha256 covers the content as JSON with sorted keys: a formatter does not change it, an edit
does. A field with its default is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from pytest_gpumem.baselines.acceptances import Acceptances, acceptances
from pytest_gpumem.baselines.references import Baseline, SavedRow, SavedRun, assemble
from pytest_gpumem.files import content, parsed, write_whole
from pytest_gpumem.judging.limits import unreliable
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, FileError, Outcome, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import converted
from pytest_gpumem.revisions import Ancestry, ancestry
from pytest_gpumem.units import QuantityError

SUBFOLDER = "gpumem"  # below the device's key, beside the files of pytest-benchmark
_OURS = (
    "push",
    "schedule",
    "workflow_dispatch",
    "repository_dispatch",
    "merge_group",
    "release",
    "create",
)
"""Events of GitHub that only somebody with write access can cause."""
LAYOUT = 5  # version of the layout of a file
_REMEDY = "restore the file from a copy, or delete it"
_fields = cache(structs.fields)


@dataclass(frozen=True)
class SaveResult:
    path: Path | None  # the new file; None if no row was saved
    saved: int  # number of rows in it
    full: int  # number of rows that are not saved because their references are full
    refused: tuple[tuple[Row, str], ...]  # rows that may not be saved, each with the reason


class Store:
    """The baselines of a kind of device."""

    def __init__(self, place: Path, facts: DeviceFacts) -> None:
        """`place`: folder of all baselines; it need not exist. `facts`: of the session's device."""
        self.place = place
        self._facts = facts
        self.folder = place / facts.key / SUBFOLDER  # of this device's files

    def load(
        self,
        history: Callable[[frozenset[str]], Ancestry] | None = None,
        accepted: Acceptances | None = None,
    ) -> Baseline:
        """Read all saved rows of this device. Raises `UserError`: a file cannot be used.

        `history`: sorts revisions; only runs that the change is built on count. None: all count.
        """
        files = list(self.files())
        runs = [run for _, run in files if run is not None]
        counting, left_out = _counting(runs, history)
        others = len(files) - len(runs)
        if others:
            left_out.append(
                f"{others} of {len(files)} files do not count: of another version of the plugin; "
                "save anew, then delete them"
            )
        baseline = assemble(counting, self._facts, accepted or Acceptances())
        words = "; ".join(left_out) or None
        note = None if baseline.processes else self._absence(words)
        return replace(baseline, note=note, left_out=words)

    def load_with_acceptances(
        self, root: Path, base: str | None, *, counts_added: bool
    ) -> Baseline:
        """Load a baseline with the accepted changes of the project at `root`. Raises `UserError`.
        `base`: in a gate, its BASE. `counts_added`: what the change accepts counts."""
        history, accepted = None, acceptances(root)
        merged, added = accepted, Acceptances()
        if base is not None:
            history = partial(ancestry, base, folder=root)
            merged, added = accepted.split_at(history(()).merge_base)
        if not counts_added:
            added = Acceptances()
        return replace(self.load(history, accepted), merged=merged, added=added)

    def save(
        self,
        rows: Sequence[Row],
        revision: str | None,
        mode: str | None = None,
        baseline: Baseline | None = None,
    ) -> SaveResult:
        """Write rows that may be saved to a new file. Raises `UserError`.

        `revision`: of the measured code. `mode`: of the session.
        `baseline`: that they were judged against; None: load it.
        """
        if baseline is None:
            baseline = self.load()
        run = SavedRun(
            id=secrets.token_hex(8),
            utc=datetime.now(timezone.utc),
            device=self._facts,
            revision=revision,
            mode=mode,
        )
        full = 0
        refused, saved = list[tuple[Row, str]](), dict[str, SavedRow]()
        for row in rows:
            why = refusal(row, self._facts.simulated)
            if why is not None:
                refused.append((row, why))
                continue
            saved_row = _saved_row(row, baseline, run)
            if saved_row is None:
                full += 1
            else:
                saved[row.key] = saved_row
        path = None
        if saved:
            path = self._write(structs.replace(run, rows=tuple(saved.values())))
        return SaveResult(path, len(saved), full, tuple(refused))

    def unwritable(self) -> str | None:
        """Return why nothing can be stored here, or None."""
        try:
            parent = self.folder.absolute()
            while not parent.exists():
                parent = parent.parent
            # A trial: permissions do not hold for root, nor on every file system.
            with tempfile.TemporaryFile(dir=parent):
                return None
        except OSError as error:
            return f"nothing can be stored in {self.folder}: {error.strerror or error}"

    def files(self) -> Iterator[tuple[Path, SavedRun | None]]:
        """Yield every file, by name; None is of another layout. Raises `UserError`."""
        names: dict[str, str] = {}  # of files, by the id of their run
        for path in _paths(self.folder):
            try:
                if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would wait
                    raise FileError("not a file")
                run = read(content(path))
                if run is None:
                    yield path, None
                    continue
                if run.device.key != self._facts.key:
                    raise FileError(f"of {run.device.key}, this device is {self._facts.key}")
                first = names.setdefault(run.id, path.name)
                if first != path.name:
                    raise FileError(f"a copy of {first}, of the same process; delete one")
            except FileError as error:
                raise UserError(f"{path}: {error}") from None
            yield path, run

    def _write(self, run: SavedRun) -> Path:
        revision = re.sub(r"[^A-Za-z0-9.]+", "-", run.revision or "").strip("-.")[:12]
        name = f"{run.utc:%Y%m%dT%H%M%SZ}-{revision or 'unknown'}-{run.id}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, file_text(run))
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{self.folder}: cannot write the run: {why}") from None
        return self.folder / name

    def _absence(self, left_out: str | None) -> str:
        key = self._facts.key
        if left_out is not None:
            return f"no process counts for {key} in {self.place}: {left_out}"
        note = f"no baseline of {key} in {self.place}"
        others = [other for other in devices(self.place) if other != key]
        if others:
            note += f"; there are baselines of {', '.join(others)}, which do not compare"
        return note


def devices(place: Path) -> list[str]:
    keys = set[str]()
    with suppress(OSError):
        for path in place.glob(f"*/{SUBFOLDER}/*.json"):
            keys.add(path.parent.parent.name)
    return sorted(keys)


def _saved_row(row: Row, baseline: Baseline, run: SavedRun) -> SavedRow | None:
    """Return what to save of a row; None if its references are full."""
    today, digest = run.utc.date(), baseline.acceptances.digest
    times = memory = None
    if row.measurement is not None and baseline.enters(row, "time", today):
        times = reduced(row.measurement)
    footprint = row.footprint
    if footprint is not None and footprint.watched and baseline.enters(row, "memory", today):
        memory = footprint
    if times is None and memory is None:
        return None
    return SavedRow(
        row.nodeid,
        row.label,
        times,
        memory,
        row.limits,
        accepted_time=digest(row.key, "time"),
        accepted_memory=digest(row.key, "memory"),
    )


def reduced(measurement: Measurement) -> Measurement:
    """Return what a comparison needs: the median of each placement, and no notes."""
    placements = tuple((median,) for median in measurement.medians)
    return structs.replace(measurement, placements=placements, sampler_reason="", notes=())


def refusal(row: Row, simulated: bool) -> str | None:
    """Return why a row may not be saved, whatever its reference; None if it may."""
    if not row.measured_something:
        return "nothing was measured"
    if row.measurement is None and row.footprint is not None and not row.footprint.watched:
        return row.verdict.reason
    if row.failed:
        return "its test failed"
    if row.verdict.simulated != simulated:
        return "it is simulated" if row.verdict.simulated else "it is not simulated"
    if row.verdict.code is Code.CONDITIONS:
        return row.verdict.reason
    if row.measurement is not None:
        doubts = ", ".join(unreliable(row.measurement))
        if doubts:
            return f"its times are in doubt: {doubts}"
    if row.verdict.outcome is Outcome.FAIL:
        return f"FAIL: {row.verdict.reason}"
    # Slow runs are saved too: else an unchanged test's slow mode would be a regression.
    return None


def untrusted(environment: Mapping[str, str]) -> str | None:
    """Return why the results of this run may not be stored: it runs code of a fork, or may.

    A pipeline in a fork's project is not detected; it has no access to this project's storage.
    """
    ours = environment.get("CI_MERGE_REQUEST_PROJECT_ID", "")
    theirs = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "")
    if ours != theirs:
        path = environment.get("CI_MERGE_REQUEST_SOURCE_PROJECT_PATH") or theirs
        return f"a merge request from the fork {path or 'that is not named'}"
    event = environment.get("GITHUB_EVENT_NAME", "")
    if event in ("", *_OURS):
        return None
    unsaid = f"the event {event}, whose payload does not say whose code is checked out"
    if not event.startswith("pull_request"):
        return unsaid
    try:
        payload = json.loads(Path(environment.get("GITHUB_EVENT_PATH", "")).read_bytes())
        request = payload["pull_request"]
        base, head = request["base"]["repo"]["full_name"], request["head"]["repo"]["full_name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return unsaid  # such as a fork that is gone
    return None if base == head else f"a {event} event from the fork {head}"


def _paths(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        # A missing folder is an empty baseline; a dangling link is a baseline out of reach.
        for link in (folder, *folder.parents[:2]):
            if link.is_symlink() and not link.exists():
                raise UserError(f"{link}: a dangling link") from None
        return []
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None


def _counting(
    runs: Sequence[SavedRun], history: Callable[[frozenset[str]], Ancestry] | None
) -> tuple[list[SavedRun], list[str]]:
    """Return the runs that count, and what is left out, in words."""
    if history is None:
        return list(runs), []
    known = history(frozenset(run.revision for run in runs if run.revision is not None))
    counting = []
    unknown = 0
    for run in runs:
        if run.revision in known.base:
            counting.append(run)
        elif run.revision is None or run.revision in known.unknown:
            unknown += 1
    left = len(runs) - len(counting)
    if not left:
        return counting, []
    text = f"{left} of {len(runs)} files do not count: of no commit up to {known.merge_base[:12]}"
    if unknown:
        text += f"; {unknown} saved with uncommitted changes, or of no revision of this repository"
    return counting, [text]


# The text of a file


def file_text(run: SavedRun) -> str:
    """Return the text of a file, with a row a line for diffs."""
    run = structs.replace(run, written_by=f"pytest-gpumem {version('pytest-gpumem')}")
    content = _plain(run)
    lines = []
    for name, value in content.items():
        text = json.dumps(value, allow_nan=False)
        if name == "rows":
            rows = [json.dumps(row, allow_nan=False) for row in value]
            text = "[\n" + ",\n".join(rows) + "\n]"
        lines.append(f'"{name}": {text}')
    head = f'"schema": {LAYOUT},\n"sha256": "{digest(content)}",\n"content"'
    return f"{{\n{head}: {{\n" + ",\n".join(lines) + "\n}\n}\n"


def digest(content: object) -> str:
    """Return the SHA-256 of JSON values; white space and the order of keys do not change it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read(text: bytes) -> SavedRun | None:
    """Return the run of a `file_text`, or None of one of another layout. Raises `FileError`: it is
    another text, or a changed one."""
    try:
        file = parsed(text)
    except FileError as error:
        raise FileError(f"this baseline file is corrupt: {error}; {_REMEDY}") from None
    if not isinstance(file, dict) or not isinstance(file.get("schema"), int):
        raise FileError("this is no baseline file of this plugin; remove it")
    if file["schema"] != LAYOUT:
        return None
    content = file.get("content")
    if file.keys() != {"schema", "sha256", "content"} or not isinstance(content, dict):
        raise FileError("$: not the keys schema, sha256 and content")
    try:
        sha256 = digest(content)
    except (ValueError, RecursionError) as error:  # such as infinity
        raise FileError(f"$.content: {error}") from None
    if sha256 != file["sha256"]:
        why = "its content does not fit its sha256: it was edited by hand, or is damaged"
        raise FileError(f"{why}; {_REMEDY}")
    # The sha256 fits, so nobody edited the file. What cannot be read, another version wrote.
    try:
        return _checked(converted(content, SavedRun, "$.content"))
    except (FileError, RecursionError) as error:
        raise FileError(f"{error} (written by {content.get('written_by', 'unknown')})") from None


def _checked(run: SavedRun) -> SavedRun:
    """Check keys and limits, and return the run in UTC. Raises `FileError`."""
    try:
        run = structs.replace(run, utc=run.utc.astimezone(timezone.utc))
    except OverflowError:
        raise FileError(f"$.content.utc: {run.utc} is too far from now") from None
    keys = set[str]()
    for index, row in enumerate(run.rows):
        path = f"$.content.rows[{index}]"
        if row.key in keys:
            raise FileError(f"holds {row.key} twice")
        keys.add(row.key)
        if row.measurement is not None and row.measurement.label != row.label:
            raise FileError(f"{path}.measurement.label: not that of the row, {row.label!r}")
        for name, limit in LIMITS.items():
            value = getattr(row.limits, name)
            try:
                if value is not None:
                    limit.parse(value)
            except QuantityError as error:
                raise FileError(f"{path}.limits.{name}: {error}") from None
    return run


def _plain(value: Any) -> Any:
    """Return JSON values, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        plain = {}
        for field in _fields(type(value)):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            item = getattr(value, field.name)
            if item != default:
                plain[field.encode_name] = _plain(item)
        return plain
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return msgspec.to_builtins(value)
