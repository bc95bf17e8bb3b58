"""The accepted runs of each kind of device: one JSON file a run, in a folder or behind a URL (`storage`).

`<folder or URL>/<key>/gpumem/<utc>-<revision>-<digest>.json`; `layout` describes a file. A file is whole as soon as it is there, and is
never written again, so writers need no lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from msgspec import structs

from pytest_gpumem.baselines.acceptance import improvement, recordable, refusal, rejects
from pytest_gpumem.baselines.history import WINDOW, Accepted, AcceptedFootprint, Baseline, Content, Process, Reset, assemble
from pytest_gpumem.baselines.layout import LARGEST, read, reduced, reduced_footprint, written
from pytest_gpumem.baselines.storage import BaselineError, Storage, storage
from pytest_gpumem.collector import uncollected
from pytest_gpumem.judging.judge import comparable, way_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls, Provenance
from pytest_gpumem.records.record import LONGEST_TIME
from pytest_gpumem.records.row import Row
from pytest_gpumem.result_files import FileError
from pytest_gpumem.result_files import content as bytes_of
from pytest_gpumem.revisions import DIRTY, Ancestry

CLOCKS_DIFFER = timedelta(hours=1)  # largest difference between the clocks of two machines that is not reported
IMPROVED = "--gpumem-save"  # `Reset.who` of an accepted gain


@dataclass(frozen=True)
class Saved:
    """The result of saving a run."""

    path: Path | None  # the new file; None where no row was accepted
    accepted: tuple[Row, ...]
    refused: tuple[tuple[Row, str], ...]  # rows that stay out, each with the reason
    improved: tuple[Reset, ...] = ()  # resets by gains among the accepted rows
    rejected: tuple[str, ...] = ()  # keys of rows that show this revision to be slower; its earlier runs leave their baselines


class Store:
    """The baselines of one kind of device."""

    def __init__(self, where: Path | Storage, facts: DeviceFacts) -> None:
        """`where`: their place; it need not exist. `facts`: the device of this session; only its key is read and written."""
        self.storage = where if isinstance(where, Storage) else Storage(where)
        self._facts = facts
        self.folder = self.storage.at(facts.key)  # folder of this device's files

    def unwritable(self) -> str | None:
        """Why nothing can be stored here, to be checked before long work; None if something can."""
        return self.storage.unwritable(self._facts.key)

    def load(self, ancestry: Callable[[frozenset[str]], Ancestry] | None = None, window: int = WINDOW) -> Baseline:
        """Read all accepted rows of this device.
        `ancestry`: finds the history that holds each revision. Then only the processes count whose revision the change is built on, and the
        acceptances of the change itself. None: all files count.
        `window`: newest runs of a row to compare with.
        Raises `BaselineError`: a store that cannot be reached; a file that cannot be read, has another layout, was edited, belongs to
        another device, mixes simulated and real, or holds a row that may not be in a baseline; or two files of one process. Nothing is
        skipped.
        """
        with uncollected():
            found = dict(files(self.storage, self._facts.key))
        for path, content in found.items():
            if content.process is not None and content.process.device.simulated != self._facts.simulated:
                kinds = ("real", "simulated") if self._facts.simulated else ("simulated", "real")
                raise BaselineError(f"{self.storage.shown(path)}: of a {kinds[0]} device, this one is {kinds[1]}")
            if content.key != self._facts.key:
                raise BaselineError(f"{self.storage.shown(path)}: of {content.key!r}, this device is {self._facts.key}")
        counting, left_out = _counting(found, ancestry)
        baseline = assemble(counting, window)
        note = None if baseline.processes else self._absence(left_out)
        return replace(baseline, note=note, left_out=left_out, sequence=_highest(found.values()), dated_ahead=_dated_ahead(found))

    def save(
        self,
        rows: Sequence[Row],
        revision: str | None,
        settings: Mapping[str, object] | None = None,
        baseline: Baseline | None = None,
        run: str | None = None,
    ) -> Saved:
        """Write the rows that passed into a new file.
        `revision`: revision of the measured code, such as a commit id; None if unknown.
        `baseline`: the baseline that they were judged against; None: load it.
        `run`: unique to the run, as `record` has it; None: of no other file.
        Raises `BaselineError`: the file cannot be written; without `baseline`, also as `load`.
        """
        baseline = baseline if baseline is not None else self.load()
        accepted: dict[str, Row] = {}
        refused: list[tuple[Row, str]] = []
        for row in rows:
            why = refusal(row, self._facts.simulated, again=revision in _revisions(row, revision, baseline))
            if why is None and row.key in accepted:
                why = "another row of this run has the same key"
            if why is None:
                accepted[row.key] = row
            else:
                refused.append((row, why))
        kept = tuple(accepted.values())
        slower = ((row.key, _revisions(row, revision, baseline)) for row in rows if rejects(row))
        rejected = [key for key, revisions in slower if revision in revisions and len(revisions) > 1]
        if not kept and not rejected:
            return Saved(None, (), tuple(refused))
        process = Process(run or secrets.token_hex(8), datetime.now(timezone.utc), revision, self._facts, baseline.sequence + 1)
        begun = {
            row.key: Reset(secrets.token_hex(8), row.key, gain, IMPROVED, process.utc, revision, process.sequence)
            for row in kept
            if (gain := improvement(row)) is not None
        }
        path = _write(self.storage, _content(process, kept, {**baseline.resets, **begun}, begun.values(), rejected), settings)
        return Saved(path, kept, tuple(refused), tuple(begun.values()), tuple(rejected))

    def _absence(self, left_out: str | None) -> str:
        if left_out is not None:
            return f"no process counts for {self._facts.key} in {self.storage}: {left_out}"
        others = [key for key in self.storage.devices() if key != self._facts.key]
        also = f"; there are baselines of {', '.join(others)}, which do not compare" if others else ""
        return f"no baseline of {self._facts.key} in {self.storage}{also}"


def record(
    where: Storage, facts: DeviceFacts, rows: Sequence[Row], revision: str | None, settings: Mapping[str, object] | None, run: str
) -> tuple[Path, int]:
    """Keep what a run measured at `where`, whatever its verdicts, in a file that no baseline reads.
    Rows whose figures mean nothing stay out.
    `run`: unique to the run; the same run among the accepted ones has it too.
    Returns the new file, and how many rows it has.
    Raises `BaselineError`: it cannot be written.
    """
    kept = {row.key: row for row in reversed(rows) if recordable(row, facts.simulated)}
    process = Process(run, datetime.now(timezone.utc), revision, facts, 1)
    return _write(where.recorded(), _content(process, kept.values()), settings), len(kept)


def reset(where: Path | Storage, key: str, rows: Sequence[str], reason: str, who: str, revision: str | None) -> Path:
    """Accept a change of rows: only runs that are saved from now on count for them.
    Returns the new file.
    Raises `BaselineError`: it cannot be written; also as `Store.load`.
    """
    at, utc = storage(where), datetime.now(timezone.utc)
    sequence = _highest(content for _, content in files(at, key)) + 1
    resets = tuple(Reset(secrets.token_hex(8), row, reason, who, utc, revision, sequence) for row in rows)
    return _write(at, Content(key, None, secrets.token_hex(8), utc, revision, sequence, resets=resets), kind="accept-")


def row_keys(where: Path | Storage, key: str) -> dict[str, str]:
    """By row key, the node id of every row in the files of one kind of device. Raises `BaselineError`: as `Store.load`."""
    found: dict[str, str] = {}
    for _, content in files(where, key):
        found |= content.nodeids
    return found


def files(where: Path | Storage, key: str) -> Iterator[tuple[Path, Content]]:
    """Every file of one kind of device, by name. Of a URL, the paths are those of the copy, which is brought up to date first.

    Raises `BaselineError`: as `Store.load`.
    """
    at = storage(where)
    seen: dict[str, str] = {}
    for path in paths(at, key):
        content = load_file(path, at.shown(path))
        refuse_copy(seen, content.id, path, at)
        yield path, content


def refuse_copy(seen: dict[str, str], run: str, path: Path, at: Storage) -> None:
    """Raises `BaselineError`: a run has another file too. `seen`: by the id of a run, the name of its file."""
    if (first := seen.setdefault(run, path.name)) != path.name:
        raise BaselineError(f"{at.shown(path)}: a copy of {first}, of the same process; it would count twice")


def paths(at: Storage, key: str) -> list[Path]:
    """The paths of `files`. Raises `BaselineError`: the store cannot be reached."""
    at.update(key)
    folder = at.at(key)
    try:
        return sorted(p for p in folder.iterdir() if p.suffix == ".json")
    except FileNotFoundError:
        # A missing folder is an empty baseline; a dangling link is a baseline out of reach.
        if (link := next((one for one in (folder, folder.parent) if one.is_symlink()), None)) is not None and not link.exists():
            raise BaselineError(f"{link}: a dangling link") from None
        return []
    except OSError as error:
        raise BaselineError(f"{folder}: {error.strerror or error}") from None


def load_file(path: Path, shown: str | None = None) -> Content:
    """Read one file, which messages call `shown`, and check it. Raises `BaselineError`: as `Store.load`."""
    shown = str(path) if shown is None else shown
    try:
        # Reading a pipe would wait.
        if os.path.exists(path) and not os.path.isfile(path):
            raise FileError("Is a directory" if os.path.isdir(path) else "not a file")
        return read(bytes_of(path, LARGEST))
    except FileError as error:
        raise BaselineError(f"{shown}: {' '.join(str(error).split())}") from None


def copy(source: Storage, target: Storage) -> dict[str, int]:
    """Copy the files of accepted and of recorded runs that a place lacks; by device key, how many.
    Raises `BaselineError`: a place cannot be reached or written; a file of `source` as of `Store.load`.
    """
    found: dict[str, int] = {}
    for ours, theirs in ((source, target), (source.recorded(), target.recorded())):
        for key in ours.devices():
            there = {path.name for path, _ in files(theirs, key)}
            missing = [path for path, _ in files(ours, key) if path.name not in there]
            if missing:
                theirs.write(key, {path.name: path.read_bytes() for path in missing})
            found[key] = found.get(key, 0) + len(missing)
    return found


def surplus(found: Mapping[Path, Content], keep: int) -> list[Path]:
    """The files without which every comparison over the newest `keep` runs of a row is the same.
    `found`: all files of one kind of device (`files`).
    `keep`: runs of each row, at least those of `--gpumem-baseline-window`.
    """
    contents = found.values()
    baseline = assemble(contents, keep)
    kept = {one.process.id for runs in baseline.rows.values() for one in _compared(runs, keep)}
    kept |= {one.process.id for runs in baseline.footprints.values() for one in (*runs[:1], *runs[-keep:])}
    current = {reset.id for reset in baseline.resets.values()}
    kept |= {content.id for content in contents if any(reset.id in current for reset in content.resets)}
    # A later file continues the numbers.
    kept |= {content.id for content in contents if content.sequence == _highest(contents)}
    while True:
        # A run that another row keeps stays out of the row that was rejected. The earliest of a revision comes last.
        rows = [(row.key, one) for one in sorted(contents, key=lambda one: -one.sequence) if one.id in kept for row in one.rows]
        earliest = {(key, one.revision): one.sequence for key, one in rows}
        needed = {one.id for one in contents if any(earliest.get((key, one.revision), one.sequence) < one.sequence for key in one.rejected)}
        if needed <= kept:
            return [path for path, content in found.items() if content.id not in kept]
        kept |= needed


def _compared(runs: Sequence[Accepted], keep: int) -> Iterator[Accepted]:
    """The first and the newest runs of a row that a new run may be compared with, measured in a way of these runs: on a card of their
    variants, on one of another variant, or on one whose variant is unknown.
    """
    for one in {way_of(run.measurement): run.measurement for run in runs}.values():
        taken = one.provenance or Provenance("")
        other = structs.replace(taken.controls or Controls(), latency=LONGEST_TIME)
        for controls in (taken.controls, other, None):
            new = structs.replace(one, provenance=structs.replace(taken, controls=controls))
            alike = [run for run in runs if comparable(new, run.measurement)]
            yield from (*alike[:1], *alike[-keep:])


def _highest(contents: Iterable[Content]) -> int:
    """The highest sequence number."""
    return max((content.sequence for content in contents), default=0)


def _dated_ahead(found: Mapping[Path, Content]) -> str | None:
    """One sentence on files that are dated ahead of this machine's clock; None without any."""
    latest = datetime.now(timezone.utc) + CLOCKS_DIFFER
    ahead = {path.name: content.utc for path, content in found.items() if content.utc > latest}
    if not ahead:
        return None
    name = max(ahead, key=lambda name: ahead[name])
    return (
        f"{len(ahead)} of {len(found)} files {'is' if len(ahead) == 1 else 'are'} dated ahead of this machine's clock: {name} is of "
        f"{ahead[name]:%Y-%m-%d}; this clock or the writer's clock is wrong, which does not change the order of files"
    )


def _revisions(row: Row, revision: str | None, baseline: Baseline) -> set[str | None]:
    """The revisions of a row's accepted runs; none if this revision does not tell its code."""
    if revision is None or revision.endswith(DIRTY):
        return set()
    return {one.process.revision for one in baseline.rows.get(row.key, ())}


def _counting(found: Mapping[Path, Content], ancestry: Callable[[frozenset[str]], Ancestry] | None) -> tuple[list[Content], str | None]:
    """The files that count, and a sentence about the others."""
    if ancestry is None:
        return list(found.values()), None
    known = ancestry(frozenset(content.revision for content in found.values() if content.revision is not None))
    other, dirty = f"are not of the history of {known.merge_base[:12]}", "of uncommitted changes"
    unknown = "of a revision that this repository does not know"
    counting, left = list[Content](), {other: 0, dirty: 0, unknown: 0}
    for content in found.values():
        revision = content.revision
        # The change's own acceptances count for it; its own measurements do not, because they are judged.
        if revision in known.base or (content.process is None and revision in known.head):
            counting.append(content)
        elif revision is not None and revision.endswith(DIRTY):
            left[dirty] += 1
        else:
            left[unknown if revision is None or revision in known.unknown else other] += 1
    reasons = ", ".join(f"{count} {words}" for words, count in left.items() if count)
    return counting, f"{len(found) - len(counting)} of {len(found)} files do not count: {reasons}" if reasons else None


def _content(
    process: Process, rows: Iterable[Row], after: Mapping[str, Reset] = {}, resets: Iterable[Reset] = (), rejected: Iterable[str] = ()
) -> Content:
    """The file of a run. `after`: by row key, the last reset."""
    of = [(row, after[row.key].id if row.key in after else None) for row in rows]
    return Content(
        process.device.key,
        process,
        process.id,
        process.utc,
        process.revision,
        process.sequence,
        tuple(Accepted(row.nodeid, reduced(m, process), process, last, row.test_source) for row, last in of if (m := row.measurement)),
        tuple(AcceptedFootprint(row.nodeid, row.label, reduced_footprint(f), process, last) for row, last in of if (f := row.footprint)),
        tuple(resets),
        tuple(rejected),
    )


def _write(where: Storage, content: Content, settings: Mapping[str, object] | None = None, kind: str = "") -> Path:
    text = written(content, settings)
    short = re.sub(r"[^A-Za-z0-9.]+", "-", content.revision or "").strip("-.")[:12] or "unknown"
    # The id in the content makes it unlike any other.
    name = f"{content.utc:%Y%m%dT%H%M%SZ}-{short}-{kind}{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    where.write(content.key, {name: text})
    return where.at(content.key) / name
