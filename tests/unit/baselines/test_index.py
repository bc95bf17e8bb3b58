"""A session reads the runs that it compares with, however many a store holds."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from known_devices import H100
from measurements import measurement
from stored_rows import meant

from pytest_gpumem.baselines import index, store
from pytest_gpumem.baselines.history import Baseline, RunFile, assemble
from pytest_gpumem.baselines.storage import BaselineError, RemoteStorage, Storage
from pytest_gpumem.baselines.store import Store, files
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict


def row(
    name: str,
    latency: float,
    outcome: Outcome = Outcome.PASS,
    code: Code | None = None,
    **changes: Any,
) -> Row:
    taken = measurement(placements=((latency,) * 4,) * 8, **changes)
    return Row(
        f"test_a.py::{name}",
        Limits(),
        Verdict(outcome, "", code=code),
        taken,
        failed=outcome is Outcome.FAIL,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    """Sixty runs of three tests: one changes its mode, one is reset, one is rejected at times."""
    draw, found = random.Random(7), Store(tmp_path / "store", H100)
    for number in range(60):
        slow = number % 17 == 16
        rows = [row("one", 1e-5), row("two", 2e-5, mode="hot" if number % 2 else "clean-cold")]
        rows.append(
            row("three", 3e-5, Outcome.FAIL, Code.SLOWER)
            if slow
            else row("three", 3e-5 * draw.uniform(0.9, 1.1))
        )
        found.save(
            rows, f"{number // 3:040x}", accepted=meant("test_a.py::one") if number == 30 else None
        )
    return found


def whole(store: Store) -> Baseline:
    return assemble([content for _, content in files(store.storage, H100.key)])


def ids(baseline: Baseline) -> dict[str, list[str]]:
    return {key: [one.process.id for one in runs] for key, runs in baseline.rows.items()}


def reading(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from now on."""
    read, of_file = list[Path](), store.load_file

    def noted(path: Path, at: Storage) -> RunFile:
        read.append(path)
        return of_file(path, at)

    monkeypatch.setattr(store, "load_file", noted)
    return read


def test_the_baseline_is_that_of_all_files(filled: Store) -> None:
    for _ in range(2):  # without an index, and by it
        found, every = filled.load(window=5), whole(filled)
        assert (found.processes, found.before, found.resets) == (
            every.processes,
            every.before,
            every.resets,
        )
        assert found.taken_over == every.taken_over != frozenset()
        for key, runs in ids(every).items():
            modes = {one.process.id: one.measurement.mode for one in every.rows[key]}
            for mode in set(modes.values()):
                of_mode = [one for one in runs if modes[one] == mode]
                assert [one for one in ids(found)[key] if modes[one] == mode] == list(
                    dict.fromkeys([*of_mode[:3], *of_mode[-5:]])
                )


def test_a_later_session_reads_the_window_alone(
    filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.load(window=5)
    read = reading(monkeypatch)
    filled.load(window=5)
    assert 0 < len(read) < 30
    read.clear()
    filled.save([row("one", 1e-5)], "b" * 40, baseline=filled.load(window=5))
    read.clear()
    filled.load(window=5)
    assert len(read) < 30


@pytest.mark.parametrize(
    "damage", [b"", b"\xc1", b"\x95\x01\x90\x90\x91\x9d"], ids=["empty", "no msgpack", "half"]
)
def test_a_damaged_index_is_made_again(filled: Store, damage: bytes) -> None:
    before = filled.load(window=5)
    place = index._place(filled.folder)
    place.write_bytes(damage)
    assert filled.load(window=5) == before
    assert len(place.read_bytes()) > 100


def test_a_file_that_is_edited_is_refused(filled: Store) -> None:
    filled.load()
    path = sorted(filled.folder.iterdir())[-1]
    plain = json.loads(path.read_text())
    plain["content"]["rows"][0]["measurement"]["placements"] = [[1.0]]
    path.write_text(json.dumps(plain))
    with pytest.raises(BaselineError, match="edited by hand"):
        filled.load()


class Offline(RemoteStorage):
    """A store behind a URL whose copies come from a folder."""

    source: Storage

    def _ask(self, do: str, key: str, **more: object) -> list[str]:
        folder = Path(str(more["folder"]))
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.source.at(key).iterdir():
            if not (folder / path.name).exists():
                (folder / path.name).write_bytes(path.read_bytes())
        return [key]


def forged(path: Path) -> None:
    """A file that passes for the digest inside, with a time three times as long, and the same size and time of change."""
    from pytest_gpumem.baselines.layout import digest

    status, plain = path.stat(), json.loads(path.read_text())
    for one in plain["content"]["rows"]:
        one["measurement"]["placements"] = [
            [3 * seconds for seconds in placement] for placement in one["measurement"]["placements"]
        ]
    plain["sha256"] = digest(plain["content"])
    path.write_text(json.dumps(plain))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("runs", [4, 60])
def test_a_forged_copy_of_a_store_is_fetched_again(tmp_path: Path, runs: int) -> None:
    source, remote = Store(tmp_path / "source", H100), Offline("memory://baselines")
    remote.source = source.storage
    for number in range(runs):
        source.save([row("one", 1e-5)], f"{number:040x}")
    mirrored = Store(remote, H100)
    before = mirrored.load()
    newest = sorted(mirrored.folder.glob("*.json"))[-1]
    forged(newest)
    assert mirrored.load() == before
    assert newest.stem.endswith(hashlib.sha256(newest.read_bytes()).hexdigest()[:16])


def test_a_forged_copy_is_refused_offline(tmp_path: Path) -> None:
    source, remote = Store(tmp_path / "source", H100), Offline("memory://baselines")
    remote.source = source.storage
    source.save([row("one", 1e-5)], "a" * 40)
    Store(remote, H100).load()
    forged(next(Store(remote, H100).folder.glob("*.json")))
    remote.offline = True
    with pytest.raises(BaselineError, match="does not fit the digest in its name"):
        Store(remote, H100).load()


def test_contents_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Store(tmp_path, H100)
    for number in range(4):
        few.save([row("one", 1e-5)], f"{number:040x}")
    read = reading(monkeypatch)
    few.load()
    assert len(read) == 4
