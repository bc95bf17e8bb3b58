"""The baseline on disk: one JSON file for each process whose rows were accepted, one folder for each kind of device.

`<folder>/<key>/gpumem/<utc>-<revision>-<unique>.json`, each a schema document with the revision and the time. Files are written
under a temporary name and renamed; readers take names that end in `.json` alone, so that they never see half a file.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpumem.files import write_whole
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, document, document_from_json
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.units import QuantityError, parse_margin

SUBFOLDER = "gpumem"
"""Below the device's key, beside what pytest-benchmark keeps there."""
FORMING = 3
"""Processes up to which a baseline of one row is still forming: fewer say nothing about their own spread."""


class BaselineError(Exception):
    """A baseline that cannot be used; one line that names the file."""


@dataclass(frozen=True)
class History:
    """What a baseline knows about one row."""

    measurements: tuple[Measurement, ...]
    """Accepted measurements, one for each process, oldest first."""
    reason: str | None = None
    """Why there are none that can be compared."""


@dataclass(frozen=True)
class Baseline:
    """All accepted rows of one kind of device."""

    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    """By row key: one row for each process that has it, oldest first."""
    processes: int = 0
    """Files, each of one process."""
    note: str | None = None
    """Why it is empty, and which other devices have baselines there."""

    def history(self, row_key: str, mode: str) -> History:
        """What may be compared with a measurement: rows of its key that were measured in its mode."""
        rows = self.rows.get(row_key, ())
        measured = [row.measurement for row in rows if row.measurement is not None]
        alike = tuple(m for m in measured if m.mode == mode)
        if alike:
            return History(alike)
        if measured:
            return History((), f"its rows are {' and '.join(sorted({m.mode for m in measured}))}; this one is {mode}")
        return History((), self.note or f"none of the {self.processes} accepted processes holds {row_key}")


@dataclass(frozen=True)
class Saved:
    """What came of saving."""

    path: Path | None
    """The new file; None where no row was accepted."""
    accepted: tuple[Row, ...]
    refused: tuple[tuple[Row, str], ...]
    """Rows that stay out, each with the reason."""

    def lines(self) -> list[str]:
        """What to tell the user, one sentence a line."""
        count = len(self.accepted)
        told = [f"{count} row{'' if count == 1 else 's'} accepted into {self.path}" if self.path else "no row was accepted"]
        return told + [f"refused {row.key}: {why}" for row, why in self.refused]


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
        self.folder = folder / facts.key / SUBFOLDER
        """Where this device's files are."""

    def load(self) -> Baseline:
        """All accepted rows of this device.

        Raises:
            BaselineError: a file that cannot be read, is no document of this schema, is of another device or mixes simulated
                and real, or holds a row that may not be in a baseline. Nothing is skipped.
        """
        try:
            paths = sorted(p for p in self.folder.iterdir() if p.suffix == ".json") if self.folder.is_dir() else []
        except OSError as error:
            raise BaselineError(f"{self.folder}: {error.strerror or error}") from None
        rows: dict[str, list[Row]] = {}
        for path in paths:
            for row in self._read(path):
                rows.setdefault(row.key, []).append(row)
        note = None if paths else self._absence()
        return Baseline({key: tuple(found) for key, found in rows.items()}, len(paths), note)

    def save(self, rows: Sequence[Row], revision: str | None, settings: Mapping[str, object] | None = None) -> Saved:
        """Accept the rows that passed, in a new file.

        Args:
            rows: of this process, judged.
            revision: of the code that was measured, such as a commit id; None if unknown.
            settings: plain values that the rows were measured under.

        Raises:
            BaselineError: the file cannot be written.
        """
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
        path = self._write(kept, revision, settings or {}) if kept else None
        return Saved(path, kept, tuple(refused))

    def _write(self, rows: Sequence[Row], revision: str | None, settings: Mapping[str, object]) -> Path:
        now = datetime.now(timezone.utc)
        content: dict[str, Any] = document(self._facts, rows, settings)
        content |= {"revision": revision, "utc": now.isoformat(timespec="seconds")}
        text = json.dumps(content, allow_nan=False, indent=1)
        short = re.sub(r"[^A-Za-z0-9.]+", "-", revision or "").strip("-.")[:12] or "unknown"
        # The random part keeps two processes apart that write in the same second.
        final = self.folder / f"{now:%Y%m%dT%H%M%SZ}-{short}-{secrets.token_hex(6)}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(final, text)
        except OSError as error:
            raise BaselineError(f"{self.folder}: cannot write the baseline: {error.strerror or error}") from None
        return final

    def _read(self, path: Path) -> Iterator[Row]:
        try:
            read = document_from_json(json.loads(path.read_bytes()))
        except OSError as error:
            raise BaselineError(f"{path}: {error.strerror or error}") from None
        except SchemaError as error:
            raise BaselineError(f"{path}: {error}") from None
        # ValueError: not JSON, not UTF-8, or a number of too many digits.
        except (ValueError, RecursionError) as error:
            raise BaselineError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
        if read.device.simulated != self._facts.simulated:
            kinds = ("simulated", "real") if read.device.simulated else ("real", "simulated")
            raise BaselineError(f"{path}: of a {kinds[0]} device, this one is {kinds[1]}")
        if read.device.key != self._facts.key:
            raise BaselineError(f"{path}: of {read.device.key}, this device is {self._facts.key}")
        seen: set[str] = set()
        for index, row in enumerate(read.rows):
            if (why := refusal(row, self._facts.simulated)) is not None:
                raise BaselineError(f"{path}: $.rows[{index}] does not belong into a baseline: {why}")
            if row.key in seen:
                raise BaselineError(f"{path}: holds {row.key} twice")
            seen.add(row.key)
        yield from read.rows

    def _absence(self) -> str:
        try:
            others = sorted(p.parent.name for p in self._root.glob(f"*/{SUBFOLDER}") if any(p.glob("*.json")))
        except OSError:
            others = []
        others = [key for key in others if key != self._facts.key]
        also = f"; there are baselines of {', '.join(others)}, which do not compare" if others else ""
        return f"no baseline of {self._facts.key} in {self._root}{also}"


def refusal(row: Row, simulated: bool) -> str | None:
    """Why a row may not enter a baseline; None if it may.

    Accepted are rows of tests that passed, judged PASS, or NO BASELINE where theirs is the first. INCONCLUSIVE is accepted only while
    the row's baseline is forming and the measured change does not exceed half of what is allowed: a baseline of one process is
    often too small to decide, and could otherwise never grow.
    """
    measurement, verdict = row.measurement, row.verdict
    if measurement is None:
        return "nothing was measured"
    if row.failed:
        return "its test failed"
    if verdict.simulated != simulated:
        return "it is simulated" if verdict.simulated else "it is not simulated"
    if measurement.profiled:
        return "it was measured under a profiler"
    if throttled := sorted({reason for c in measurement.conditions for reason in c.throttle_reasons}):
        return f"it was measured under throttling ({', '.join(throttled)})"
    if verdict.comparison is not None and verdict.comparison.low > 0 and verdict.outcome is not Outcome.FAIL:
        return f"it is slower than the baseline by {verdict.comparison.delta:.2%}, which accepting would make the new normal"
    if verdict.outcome in (Outcome.PASS, Outcome.NO_BASELINE) or (verdict.outcome is Outcome.INCONCLUSIVE and _forming(row)):
        return None
    return f"{verdict.outcome.value}: {verdict.reason}"


def _forming(row: Row) -> bool:
    comparison, written = row.verdict.comparison, row.limits.max_regression
    if comparison is None or written is None or row.measurement is None or comparison.processes >= FORMING:
        return False
    try:
        allowed = parse_margin(written).over(row.measurement.latency)
    except QuantityError:
        return False
    return comparison.delta <= allowed / 2
