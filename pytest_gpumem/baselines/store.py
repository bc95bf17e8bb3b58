"""The saved runs of each kind of device: one JSON file a run, in a folder or behind a URL (`storage`).

`<folder or URL>/<key>/gpumem/<utc>-<revision>-<digest>.json`; `layout` describes a file. A file is whole as soon as it is there, and is
never written again, so writers need no lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

from msgspec import structs

from pytest_gpumem.baselines.acceptance import improvement, refusal, rejects
from pytest_gpumem.baselines.accepted import Acceptance, Acceptances
from pytest_gpumem.baselines.history import (
    WINDOW,
    Baseline,
    DeviceHistory,
    Reset,
    RunFile,
    SavedFootprint,
    SavedProcess,
    SavedRow,
    assemble,
    counting,
)
from pytest_gpumem.baselines.index import IndexRun, listed, needed
from pytest_gpumem.baselines.layout import (
    LARGEST,
    read,
    read_checked,
    reduced,
    reduced_footprint,
    written,
)
from pytest_gpumem.baselines.storage import BaselineError, Storage, storage
from pytest_gpumem.collector import uncollected
from pytest_gpumem.judging.judge import comparable, way_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls, Provenance
from pytest_gpumem.records.record import LONGEST_TIME
from pytest_gpumem.records.row import ENOUGH, Row
from pytest_gpumem.result_files import FileError
from pytest_gpumem.result_files import content as bytes_of
from pytest_gpumem.revisions import DIRTY, Ancestry

CLOCKS_DIFFER = timedelta(
    hours=1
)  # largest difference between the clocks of two machines that is not reported
_NAMED = re.compile(r"-([0-9a-f]{16})\.json\Z")  # digest in a file's name
IMPROVED = "--gpumem-save"  # `Reset.who` of an accepted gain


@dataclass(frozen=True)
class SaveResult:
    """The result of saving a run."""

    path: Path | None  # the new file; None where no row was accepted
    accepted: tuple[Row, ...]
    refused: tuple[tuple[Row, str], ...]  # rows that stay out, each with the reason
    resets: tuple[Reset, ...] = ()  # by gains among the saved rows, and by accepted changes
    rejected: tuple[
        str, ...
    ] = ()  # keys of rows that show this revision to be slower; its earlier runs leave their baselines


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

    def load(
        self, ancestry: Callable[[frozenset[str]], Ancestry] | None = None, window: int = WINDOW
    ) -> Baseline:
        """Read all saved rows of this device.
        `ancestry`: finds the history that holds each revision. Then only the runs count whose revision the change is built on. None: all
        files count.
        `window`: newest runs of a row to compare with.
        Raises `BaselineError`: a store that cannot be reached; a file that cannot be read, has another layout, was edited, belongs to
        another device, mixes simulated and real, or holds a row that may not be in a baseline; or two files of one process. Nothing is
        skipped.
        """
        with uncollected():
            contents, seen = dict[Path, RunFile](), dict[str, str]()
            found = listed(
                _paths(self.storage, self._facts.key), partial(load_file, at=self.storage), contents
            )
            for path, one in found.items():
                _refuse_copy(seen, one.process.id, path, self.storage)
                if one.process.device.simulated != self._facts.simulated:
                    kinds = (
                        ("real", "simulated") if self._facts.simulated else ("simulated", "real")
                    )
                    raise BaselineError(
                        f"{self.storage.shown(path)}: of a {kinds[0]} device, this one is {kinds[1]}"
                    )
                if one.key != self._facts.key:
                    raise BaselineError(
                        f"{self.storage.shown(path)}: of {one.key!r}, this device is {self._facts.key}"
                    )
            files, left_out = _of_history(found, ancestry)
            baseline = self._with_figures(files, window, contents)
        note = None if baseline.processes else self._absence(left_out)
        return replace(
            baseline,
            note=note,
            left_out=left_out,
            sequence=_highest(found.values()),
            dated_ahead=_dated_ahead(found),
        )

    def _with_figures(
        self, files: Mapping[Path, IndexRun], window: int, contents: dict[Path, RunFile]
    ) -> Baseline:
        """The baseline of the files that count. Only those are read whose runs are compared with.
        `contents`: the files that were read already.
        """
        chosen = counting(files.values())
        timed, watched = needed(chosen.rows, window), needed(chosen.footprints, window)
        wanted = {run for by_key in (timed, watched) for runs in by_key.values() for run in runs}
        read = [
            contents.get(path) or load_file(path, self.storage)
            for path, one in files.items()
            if one.process.id in wanted
        ]
        rows = {(one.process.id, one.key): one for content in read for one in content.rows}
        footprints = {
            (one.process.id, one.key): one for content in read for one in content.footprints
        }
        counted = DeviceHistory(
            {key: [rows[run, key] for run in runs] for key, runs in timed.items()},
            {key: [footprints[run, key] for run in runs] for key, runs in watched.items()},
            chosen.resets,
            chosen.before,
            chosen.processes,
            chosen.taken_over,
        )
        return assemble(counted, window)

    def save(
        self,
        rows: Sequence[Row],
        revision: str | None,
        settings: Mapping[str, object] | None = None,
        baseline: Baseline | None = None,
        accepted: Acceptances | None = None,
        removed: Collection[str] = (),
    ) -> SaveResult:
        """Write the rows that passed into a new file.
        `revision`: revision of the measured code, such as a commit id; None if unknown.
        `baseline`: the baseline that they were judged against; None: load it.
        `accepted`: changes that this run takes over: the earlier runs of their rows no longer count.
        `removed`: keys of rows that were not measured, because their removal was accepted.
        Raises `BaselineError`: the file cannot be written; without `baseline`, also as `load`.
        """
        baseline = baseline if baseline is not None else self.load()
        changes = accepted if accepted is not None else Acceptances()
        entering: dict[str, Row] = {}
        refused: list[tuple[Row, str]] = []
        for row in rows:
            again = revision in _revisions(row, revision, baseline) or changes.other_way(row)
            why = refusal(
                row, self._facts.simulated, again=again, slower=changes.slow_down(row.key)
            )
            if why is None and row.key in entering:
                why = "another row of this run has the same key"
            if why is None:
                entering[row.key] = row
            else:
                refused.append((row, why))
        kept = tuple(entering.values())
        slower = ((row.key, _revisions(row, revision, baseline)) for row in rows if rejects(row))
        rejected = [
            key for key, revisions in slower if revision in revisions and len(revisions) > 1
        ]
        process = SavedProcess(
            secrets.token_hex(8),
            datetime.now(timezone.utc),
            revision,
            self._facts,
            baseline.sequence + 1,
        )
        begun = {reset.key: reset for reset in _resets(kept, removed, changes, process, baseline)}
        if not kept and not rejected and not begun:
            return SaveResult(None, (), tuple(refused))
        path = _write(
            self.storage,
            _content(process, kept, {**baseline.resets, **begun}, begun.values(), rejected),
            settings,
        )
        return SaveResult(path, kept, tuple(refused), tuple(begun.values()), tuple(rejected))

    def _absence(self, left_out: str | None) -> str:
        if left_out is not None:
            return f"no process counts for {self._facts.key} in {self.storage}: {left_out}"
        others = [key for key in self.storage.devices() if key != self._facts.key]
        also = (
            f"; there are baselines of {', '.join(others)}, which do not compare" if others else ""
        )
        return f"no baseline of {self._facts.key} in {self.storage}{also}"


def files(where: Path | Storage, key: str) -> Iterator[tuple[Path, RunFile]]:
    """Every file of one kind of device, by name. Of a URL, the paths are those of the copy, which is brought up to date first.

    Raises `BaselineError`: as `Store.load`.
    """
    at = storage(where)
    seen: dict[str, str] = {}  # by the id of a run, the name of its file
    for path in _paths(at, key):
        content = load_file(path, at)
        _refuse_copy(seen, content.id, path, at)
        yield path, content


def _refuse_copy(seen: dict[str, str], run: str, path: Path, at: Storage) -> None:
    """Raises `BaselineError`: a run has another file too. `seen`: by the id of a run, the name of its file."""
    if (first := seen.setdefault(run, path.name)) != path.name:
        raise BaselineError(
            f"{at.shown(path)}: a copy of {first}, of the same process; it would count twice"
        )


def _paths(at: Storage, key: str) -> list[Path]:
    """The paths of `files`. Raises `BaselineError`: the store cannot be reached."""
    at.update(key)
    folder = at.at(key)
    try:
        return sorted(p for p in folder.iterdir() if p.suffix == ".json")
    except FileNotFoundError:
        # A missing folder is an empty baseline; a dangling link is a baseline out of reach.
        if (
            link := next((one for one in (folder, folder.parent) if one.is_symlink()), None)
        ) is not None and not link.exists():
            raise BaselineError(f"{link}: a dangling link") from None
        return []
    except OSError as error:
        raise BaselineError(f"{folder}: {error.strerror or error}") from None


def load_file(path: Path, at: Storage) -> RunFile:
    """Read one file of a place, and check it. A copy of a store's file that does not fit the digest in its name is fetched again.
    Raises `BaselineError`: as `Store.load`.
    """
    try:
        text = _bytes(path)
        if (named := _NAMED.search(path.name)) is not None and named[1] != hashlib.sha256(
            text
        ).hexdigest()[: len(named[1])]:
            if not at.fetch_again(path):
                return read(text)  # the digest inside decides: it survives a formatter
            text = _bytes(path)
            named = None
        return read(text) if named is None else read_checked(text)
    except FileError as error:
        raise BaselineError(f"{at.shown(path)}: {' '.join(str(error).split())}") from None


def _bytes(path: Path) -> bytes:
    # Reading a pipe would wait.
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError("Is a directory" if os.path.isdir(path) else "not a file")
    return bytes_of(path, LARGEST)


def copy(source: Storage, target: Storage) -> dict[str, int]:
    """Copy the files that a place lacks; by device key, how many.
    Raises `BaselineError`: a place cannot be reached or written; a file of `source` as of `Store.load`.
    """
    found: dict[str, int] = {}
    for key in source.devices():
        there = {path.name for path, _ in files(target, key)}
        missing = [path for path, _ in files(source, key) if path.name not in there]
        if missing:
            target.write(key, {path.name: path.read_bytes() for path in missing})
        found[key] = len(missing)
    return found


def _rejecting(contents: Collection[RunFile], kept: Collection[str]) -> set[str]:
    """The ids of files that reject rows of the kept ones: a run that another row keeps stays out of the row that was rejected."""
    # The earliest of a revision comes last.
    rows = [
        (row.key, one)
        for one in sorted(contents, key=lambda one: -one.sequence)
        if one.id in kept
        for row in one.rows
    ]
    earliest = {(key, one.revision): one.sequence for key, one in rows}
    return {
        one.id
        for one in contents
        if any(
            earliest.get((key, one.revision), one.sequence) < one.sequence for key in one.rejected
        )
    }


def surplus(found: Mapping[Path, RunFile], keep: int) -> list[Path]:
    """The files without which every comparison over the newest `keep` runs of a row is the same.
    `found`: all files of one kind of device (`files`).
    `keep`: runs of each row, at least those of `gpumem_baseline_window`.
    """
    contents = found.values()
    baseline = assemble(contents, keep)
    kept = {one.process.id for runs in baseline.rows.values() for one in _compared(runs, keep)}
    kept |= {
        one.process.id
        for runs in baseline.footprints.values()
        for one in (*runs[:1], *runs[-keep:])
    }
    current = {reset.id for reset in baseline.resets.values()}
    # Without the digest of an accepted change, a later run would take it over again.
    kept |= {
        content.id
        for content in contents
        if any(reset.id in current or reset.accepted for reset in content.resets)
    }
    # A later file continues the numbers.
    kept |= {content.id for content in contents if content.sequence == _highest(contents)}
    while True:
        needed = _rejecting(contents, kept)
        if needed <= kept:
            return [path for path, content in found.items() if content.id not in kept]
        kept |= needed


def _compared(runs: Sequence[SavedRow], keep: int) -> Iterator[SavedRow]:
    """The first and the newest runs of a row that a new run may be compared with, measured in a way of these runs: on a card of their
    variants, on one of another variant, or on one whose variant is unknown.
    """
    for one in {way_of(run.measurement): run.measurement for run in runs}.values():
        taken = one.provenance or Provenance("")
        other = structs.replace(taken.controls or Controls(), latency=LONGEST_TIME)
        for controls in (taken.controls, other, None):
            new = structs.replace(one, provenance=structs.replace(taken, controls=controls))
            alike = [run for run in runs if comparable(new, run.measurement)]
            yield from (*alike[:ENOUGH], *alike[-keep:])


def _highest(contents: Iterable[RunFile | IndexRun]) -> int:
    """The highest sequence number."""
    return max((content.sequence for content in contents), default=0)


def _dated_ahead(found: Mapping[Path, IndexRun]) -> str | None:
    """One sentence on files that are dated ahead of this machine's clock; None without any."""
    latest = datetime.now(timezone.utc) + CLOCKS_DIFFER
    ahead = {path.name: one.process.utc for path, one in found.items() if one.process.utc > latest}
    if not ahead:
        return None
    name = max(ahead, key=lambda name: ahead[name])
    return (
        f"{len(ahead)} of {len(found)} files {'is' if len(ahead) == 1 else 'are'} dated ahead of this machine's clock: {name} is of "
        f"{ahead[name]:%Y-%m-%d}; this clock or the writer's clock is wrong, which does not change the order of files"
    )


def _revisions(row: Row, revision: str | None, baseline: Baseline) -> set[str | None]:
    """The revisions of a row's saved runs; none if this revision does not tell its code."""
    if revision is None or revision.endswith(DIRTY):
        return set()
    return {one.process.revision for one in baseline.rows.get(row.key, ())}


def _of_history(
    found: Mapping[Path, IndexRun], ancestry: Callable[[frozenset[str]], Ancestry] | None
) -> tuple[dict[Path, IndexRun], str | None]:
    """The files that count, and a sentence about the others."""
    if ancestry is None:
        return dict(found), None
    known = ancestry(frozenset(one.revision for one in found.values() if one.revision is not None))
    other, dirty = f"are not of the history of {known.merge_base[:12]}", "of uncommitted changes"
    unknown = "of a revision that this repository does not know"
    counting, left = dict[Path, IndexRun](), {other: 0, dirty: 0, unknown: 0}
    for path, one in found.items():
        revision = one.revision
        if revision in known.base:
            counting[path] = one
        elif revision is not None and revision.endswith(DIRTY):
            left[dirty] += 1
        else:
            left[unknown if revision is None or revision in known.unknown else other] += 1
    reasons = ", ".join(f"{count} {words}" for words, count in left.items() if count)
    return (
        counting,
        f"{len(found) - len(counting)} of {len(found)} files do not count: {reasons}"
        if reasons
        else None,
    )


def _content(
    process: SavedProcess,
    rows: Iterable[Row],
    after: Mapping[str, Reset] = {},
    resets: Iterable[Reset] = (),
    rejected: Iterable[str] = (),
) -> RunFile:
    """The file of a run. `after`: by row key, the last reset."""
    of = [(row, after[row.key].id if row.key in after else None) for row in rows]
    return RunFile(
        process.device.key,
        process,
        tuple(
            SavedRow(row.nodeid, reduced(m, process), process, last, row.test_source)
            for row, last in of
            if (m := row.measurement)
        ),
        tuple(
            SavedFootprint(row.nodeid, row.label, reduced_footprint(f), process, last)
            for row, last in of
            if (f := row.footprint) and f.watched
        ),
        tuple(resets),
        tuple(rejected),
    )


def _resets(
    kept: Iterable[Row],
    removed: Iterable[str],
    changes: Acceptances,
    process: SavedProcess,
    baseline: Baseline,
) -> Iterator[Reset]:
    """The resets of a run: by changes that it takes over, and by gains. Arguments as of `Store.save`; `kept`: the rows that enter."""

    def by(key: str, found: Sequence[Acceptance]) -> Reset:
        reason, who = (
            "; ".join(dict.fromkeys(texts))
            for texts in zip(*((one.reason, one.who) for one in found), strict=True)
        )
        digests = tuple(one.digest for one in found)
        return Reset(
            secrets.token_hex(8),
            key,
            reason,
            who,
            process.utc,
            process.revision,
            process.sequence,
            digests,
        )

    for key in removed:
        if (one := changes.removed(key)) is not None:
            yield by(key, [one])
    for row in kept:
        if found := changes.of(row.key):
            yield by(row.key, found)
        elif (
            gain := improvement(row, [one.measurement for one in baseline.rows.get(row.key, ())])
        ) is not None:
            yield Reset(
                secrets.token_hex(8),
                row.key,
                gain,
                IMPROVED,
                process.utc,
                process.revision,
                process.sequence,
            )


def _write(where: Storage, content: RunFile, settings: Mapping[str, object] | None = None) -> Path:
    text = written(content, settings)
    short = re.sub(r"[^A-Za-z0-9.]+", "-", content.revision or "").strip("-.")[:12] or "unknown"
    # The id in the content makes it unlike any other.
    name = f"{content.utc:%Y%m%dT%H%M%SZ}-{short}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    where.write(content.key, {name: text})
    return where.at(content.key) / name
