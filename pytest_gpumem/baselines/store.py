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
from pathlib import Path

from pytest_gpumem.baselines.acceptance import improvement, refusal, rejects
from pytest_gpumem.baselines.accepted import Acceptance, Acceptances
from pytest_gpumem.baselines.history import (
    WINDOW,
    Baseline,
    Reset,
    RunFile,
    SavedFootprint,
    SavedProcess,
    SavedRow,
    assemble,
)
from pytest_gpumem.baselines.layout import (
    LARGEST,
    read,
    read_checked,
    reduced,
    reduced_footprint,
    written,
)
from pytest_gpumem.baselines.storage import BaselineError, Storage
from pytest_gpumem.collector import uncollected
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
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
            found = dict(files(self.storage, self._facts.key))
            for path, content in found.items():
                if content.process.device.simulated != self._facts.simulated:
                    kinds = (
                        ("real", "simulated") if self._facts.simulated else ("simulated", "real")
                    )
                    raise BaselineError(
                        f"{self.storage.shown(path)}: of a {kinds[0]} device, this one is {kinds[1]}"
                    )
                if content.key != self._facts.key:
                    raise BaselineError(
                        f"{self.storage.shown(path)}: of {content.key!r}, this device is {self._facts.key}"
                    )
            runs, left_out = _of_history(found, ancestry)
            baseline = assemble(runs, window)
        note = None if baseline.processes else self._absence(left_out)
        sequence = max((content.sequence for content in found.values()), default=0)
        return replace(
            baseline,
            note=note,
            left_out=left_out,
            sequence=sequence,
            dated_ahead=_dated_ahead(found),
        )

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


def files(at: Storage, key: str) -> Iterator[tuple[Path, RunFile]]:
    """Every file of one kind of device, by name. Of a URL, the paths are those of the copy, which is brought up to date first.

    Raises `BaselineError`: as `Store.load`.
    """
    names: dict[str, str] = {}  # of files, by the id of their run
    for path in _paths(at, key):
        content = load_file(path, at)
        first = names.setdefault(content.id, path.name)
        if first != path.name:
            raise BaselineError(
                f"{at.shown(path)}: a copy of {first}, of the same process; it would count twice"
            )
        yield path, content


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


def _dated_ahead(found: Mapping[Path, RunFile]) -> str | None:
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
    found: Mapping[Path, RunFile], ancestry: Callable[[frozenset[str]], Ancestry] | None
) -> tuple[list[RunFile], str | None]:
    """The files that count, and a sentence about the others."""
    if ancestry is None:
        return list(found.values()), None
    known = ancestry(frozenset(one.revision for one in found.values() if one.revision is not None))
    other, dirty = f"are not of the history of {known.merge_base[:12]}", "of uncommitted changes"
    unknown = "of a revision that this repository does not know"
    counting, left = list[RunFile](), {other: 0, dirty: 0, unknown: 0}
    for one in found.values():
        revision = one.revision
        if revision in known.base:
            counting.append(one)
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
