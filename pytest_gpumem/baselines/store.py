"""The baseline on disk: one JSON file for each process whose rows were accepted, one folder for each kind of device.

`<folder>/<key>/gpumem/<utc>-<revision>-<unique>.json`, laid out as `layout` says. Files are written under a temporary name and renamed,
and none is ever written twice, so that any number of writers need no lock; readers take names that end in `.json` alone, so that they
never see half a file.
"""

from __future__ import annotations

import gc
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

from pytest_gpumem.baselines.acceptance import improvement, refusal, rejects, unfit
from pytest_gpumem.baselines.history import WINDOW, Accepted, Baseline, Epoch, Process, assemble
from pytest_gpumem.baselines.layout import LARGEST, Content, LayoutError, read, reduced, written
from pytest_gpumem.files import write_whole
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.revisions import DIRTY, Ancestry

SUBFOLDER = "gpumem"
"""Below the device's key, beside what pytest-benchmark keeps there."""
CLOCKS_DIFFER = timedelta(hours=1)
"""By which clocks of two machines may differ before it is reported."""
IMPROVED = "--gpumem-save"
"""`Epoch.who` of an improvement that was accepted by the way."""


class BaselineError(Exception):
    """A baseline that cannot be used; one line that names the file."""


@dataclass(frozen=True)
class Saved:
    """What came of saving."""

    path: Path | None
    """The new file; None where no row was accepted."""
    accepted: tuple[Row, ...]
    refused: tuple[tuple[Row, str], ...]
    """Rows that stay out, each with the reason."""
    improved: tuple[Epoch, ...] = ()
    """Epochs that improvements among the accepted rows begin."""
    rejected: tuple[str, ...] = ()
    """Keys of rows that earlier runs of this revision leave, because this one shows it to be slower."""


class Store:
    """Baselines in a folder, for one kind of device."""

    def __init__(self, folder: Path, facts: DeviceFacts) -> None:
        """Nothing is read or made yet.

        Args:
            folder: holds a folder for each device key.
            facts: the device of this session; only its own key is read and written.
        """
        self._root = folder
        self._facts = facts
        self.folder = place(folder, facts.key)
        """Where this device's files are."""

    def unwritable(self) -> str | None:
        """Why nothing can be stored here, for a look before long work; None if nothing speaks against it."""
        try:
            there = next(one for one in (self.folder, *self.folder.absolute().parents) if one.exists())
            # Asked for by doing it: permissions say nothing of root, nor of every file system.
            with tempfile.TemporaryFile(dir=there):
                return None
        except OSError as error:
            return f"nothing can be stored in {self.folder}: {error.strerror or error}"

    def load(self, ancestry: Callable[[frozenset[str]], Ancestry] | None = None, window: int = WINDOW) -> Baseline:
        """All accepted rows of this device.

        Args:
            ancestry: sorts the revisions of all files by the history that holds them; then only processes count whose revision the
                change is built on, and besides these what the change itself accepts. None: all count.
            window: newest runs of a row that are compared with.

        Raises:
            BaselineError: a file that cannot be read, is of another layout, another device or mixes simulated and real, was edited, or
                holds a row that may not be in a baseline; or two files of one process. Nothing is skipped.
        """
        if os.path.lexists(self._root) and not self._root.is_dir():
            raise BaselineError(f"{self._root} is no folder; a baseline is a folder, with one for each GPU in it")
        with _uncollected():
            found = dict(_files(self.folder))
        for path, content in found.items():
            self._check_device(path, content)
        counting, left_out = _counting(found, ancestry)
        rows = [row for content in counting if content.process is not None for row in content.rows]
        epochs = [epoch for content in counting for epoch in content.epochs]
        processes = sum(_processes(content) for content in counting)
        rejections = [rejection for content in counting for rejection in content.rejections]
        baseline = assemble(rows, epochs, processes, window, rejections)
        note = None if processes else self._absence(left_out)
        return replace(baseline, note=note, left_out=left_out, sequence=_highest(found.values()), dated_ahead=_dated_ahead(found))

    def save(
        self,
        rows: Sequence[Row],
        revision: str | None,
        settings: Mapping[str, object] | None = None,
        baseline: Baseline | None = None,
    ) -> Saved:
        """Accept the rows that passed, in a new file.

        Args:
            rows: of this process, judged.
            revision: of the code that was measured, such as a commit id; None if unknown.
            settings: plain values that the rows were measured under.
            baseline: what they were judged by, whose epochs they join; None: what is there now.

        Raises:
            BaselineError: the file cannot be written, or, without `baseline`, what `load` raises.
        """
        baseline = baseline if baseline is not None else self.load()
        accepted: dict[str, Row] = {}
        refused: list[tuple[Row, str]] = []
        for row in rows:
            why = refusal(row, self._facts.simulated)
            if why is None and row.key in accepted:
                why = "another row of this run has the same key"
            if why is None:
                accepted[row.key] = row
            else:
                refused.append((row, why))
        kept = tuple(accepted.values())
        rejected = _rejected(rows, revision, baseline)
        if not kept and not rejected:
            return Saved(None, (), tuple(refused))
        process = Process(secrets.token_hex(8), datetime.now(timezone.utc), revision, self._facts, baseline.sequence + 1)
        begun = {
            row.key: Epoch(secrets.token_hex(8), row.key, gain, IMPROVED, process.utc, revision, process.sequence)
            for row in kept
            if (gain := improvement(row)) is not None
        }
        current = {**baseline.epochs, **begun}
        stored = []
        for row in kept:
            assert row.measurement is not None  # `refusal` has seen to it
            epoch = current[row.key].id if row.key in current else None
            stored.append(Accepted(row.nodeid, reduced(row.measurement, process), process, epoch, row.test_source))
        text = written(
            id=process.id,
            utc=process.utc,
            sequence=process.sequence,
            revision=revision,
            key=self._facts.key,
            written_by=_ourselves(),
            device=self._facts,
            settings=settings,
            rows=stored,
            epochs=tuple(begun.values()),
            rejected=rejected,
        )
        path = _write(self.folder, text, process.utc, revision, process.id)
        return Saved(path, kept, tuple(refused), tuple(begun.values()), tuple(rejected))

    def _check_device(self, path: Path, content: Content) -> None:
        device = content.process.device if content.process is not None else None
        if device is not None and device.simulated != self._facts.simulated:
            kinds = ("simulated", "real") if device.simulated else ("real", "simulated")
            raise BaselineError(f"{path}: of a {kinds[0]} device, this one is {kinds[1]}")
        if content.key != self._facts.key:
            raise BaselineError(f"{path}: of {content.key!r}, this device is {self._facts.key}")

    def _absence(self, left_out: str | None) -> str:
        if left_out is not None:
            return f"no process counts for {self._facts.key} in {self._root}: {left_out}"
        others = [key for key in keys(self._root) if key != self._facts.key]
        also = f"; there are baselines of {', '.join(others)}, which do not compare" if others else ""
        return f"no baseline of {self._facts.key} in {self._root}{also}"


def place(folder: Path, key: str) -> Path:
    """Where the files of one kind of device are."""
    return folder / key / SUBFOLDER


def keys(folder: Path) -> list[str]:
    """Kinds of device that have baselines in a folder."""
    try:
        return sorted(p.parent.name for p in folder.glob(f"*/{SUBFOLDER}") if any(p.glob("*.json")))
    except OSError:
        return []


def accept(folder: Path, key: str, rows: Sequence[str], reason: str, who: str, revision: str | None) -> Path:
    """Begin a new epoch of rows whose change is accepted: later runs compare them only with processes saved from then on.

    Args:
        folder: holds a folder for each device key.
        key: of the kind of device.
        rows: keys of the rows.
        reason: why.
        who: who accepts it.
        revision: of the code that is accepted.

    Returns:
        The new file.

    Raises:
        BaselineError: it cannot be written, or what `Store.load` raises.
    """
    utc, unique = datetime.now(timezone.utc), secrets.token_hex(8)
    sequence = _highest(content for _, content in _files(place(folder, key))) + 1
    epochs = [Epoch(secrets.token_hex(8), row, reason, who, utc, revision, sequence) for row in rows]
    text = written(id=unique, utc=utc, sequence=sequence, revision=revision, key=key, written_by=_ourselves(), epochs=epochs)
    return _write(place(folder, key), text, utc, revision, f"accept-{unique}")


def row_keys(folder: Path, key: str) -> dict[str, str]:
    """By key, the node id of every row that the files of one kind of device hold.

    Raises:
        BaselineError: as `Store.load`.
    """
    return {row.key: row.nodeid for _, content in _files(place(folder, key)) for row in content.rows}


def load_file(path: Path) -> Content:
    """One file, checked by itself.

    Raises:
        BaselineError: as `Store.load`.
    """
    try:
        # A pipe would be waited for, a device read without end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise BaselineError(f"{path}: {'Is a directory' if path.is_dir() else 'no file'}")
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise BaselineError(f"{path}: {error.strerror or error}") from None
    if len(text) > LARGEST:
        raise BaselineError(f"{path}: larger than {LARGEST >> 20} MiB, which no baseline is")
    try:
        content = read(text)
    except LayoutError as error:
        raise BaselineError(f"{path}: {' '.join(str(error).split())}") from None
    seen: set[str] = set()
    for index, row in enumerate(content.rows):
        if (why := unfit(row.measurement)) is not None:
            raise BaselineError(f"{path}: row {index}, {row.key}, does not belong into a baseline: {why}")
        if row.key in seen:
            raise BaselineError(f"{path}: holds {row.key} twice")
        seen.add(row.key)
    for stored in content.judged:
        if (why := refusal(stored, stored.verdict.simulated)) is not None:
            raise BaselineError(f"{path}: {stored.key} does not belong into a baseline: {why}")
    return content


def _files(folder: Path) -> Iterator[tuple[Path, Content]]:
    """Every file of a folder, in the order of their names."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.suffix == ".json")
    except FileNotFoundError:
        # A folder that is not there is an empty baseline; a link to one that is not is a baseline out of reach.
        if (link := next((one for one in (folder, folder.parent) if one.is_symlink()), None)) is not None and not link.exists():
            raise BaselineError(f"{link}: a link to what is not there") from None
        paths = []
    except OSError as error:
        raise BaselineError(f"{folder}: {error.strerror or error}") from None
    seen: dict[str, Path] = {}
    for path in paths:
        content = load_file(path)
        if content.id in seen:
            raise BaselineError(f"{path}: of the same process as {seen[content.id].name}: as a copy it would count twice")
        seen[content.id] = path
        yield path, content


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, of which files have none: begun anew every few rows, it goes through all that came before."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _highest(contents: Iterable[Content]) -> int:
    """The highest sequence number of files."""
    return max((content.sequence for content in contents), default=0)


def _dated_ahead(found: Mapping[Path, Content]) -> str | None:
    """Which files are dated ahead of this machine's clock, in one sentence."""
    latest = datetime.now(timezone.utc) + CLOCKS_DIFFER
    ahead = {path.name: content.utc for path, content in found.items() if content.utc > latest}
    if not ahead:
        return None
    name = max(ahead, key=lambda name: ahead[name])
    return (
        f"{len(ahead)} of {len(found)} files {'is' if len(ahead) == 1 else 'are'} dated ahead of this machine's clock: {name} is of "
        f"{ahead[name]:%Y-%m-%d}; this clock or that of the machine that wrote it is wrong, and no order depends on it"
    )


def _rejected(rows: Iterable[Row], revision: str | None, baseline: Baseline) -> list[str]:
    """Keys of rows that are slower than the baseline although it holds earlier runs of this very revision, and of others."""
    if revision is None or revision.endswith(DIRTY):
        return []
    found = []
    for row in rows:
        revisions = {one.process.revision for one in baseline.rows.get(row.key, ())}
        if rejects(row) and revision in revisions and len(revisions) > 1:
            found.append(row.key)
    return found


def _processes(content: Content) -> int:
    """Of a file: a run with --gpumem-processes stores all of its own in one."""
    if content.process is None:
        return 0
    return max((1 + len(row.measurement.further) for row in content.rows), default=1)


def _counting(found: Mapping[Path, Content], ancestry: Callable[[frozenset[str]], Ancestry] | None) -> tuple[list[Content], str | None]:
    """The files that count, and a sentence about the others."""
    if ancestry is None:
        return list(found.values()), None
    sorted_out = ancestry(frozenset(content.revision for content in found.values() if content.revision is not None))
    counting: list[Content] = []
    unknown = dirty = other = 0
    for content in found.values():
        # What the change itself accepts counts for it; what it measured does not: that is what is judged.
        if content.revision in sorted_out.base or (content.process is None and content.revision in sorted_out.head):
            counting.append(content)
        elif content.revision is None:
            unknown += 1
        elif content.revision.endswith(DIRTY):
            dirty += 1
        elif content.revision in sorted_out.unknown:
            unknown += 1
        else:
            other += 1
    why = (
        (other, f"are not of the history of {sorted_out.merge_base[:12]}"),
        (dirty, "of uncommitted changes"),
        (unknown, "of a revision that this repository does not know"),
    )
    said = ", ".join(f"{count} {what}" for count, what in why if count)
    return counting, f"{len(found) - len(counting)} of {len(found)} files do not count: {said}" if said else None


def _ourselves() -> str:
    return f"pytest-gpumem {version('pytest-gpumem')}"


def _write(folder: Path, text: str, utc: datetime, revision: str | None, unique: str) -> Path:
    short = re.sub(r"[^A-Za-z0-9.]+", "-", revision or "").strip("-.")[:12] or "unknown"
    # The unique part keeps two processes apart that write in the same second.
    final = folder / f"{utc:%Y%m%dT%H%M%SZ}-{short}-{unique}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(final, text)
    except OSError as error:
        raise BaselineError(f"{folder}: cannot write the baseline: {error.strerror or error}") from None
    return final
