"""Baselines behind a URL: an S3-compatible server on loopback, whole and failing; stores in a folder; and the places of folders."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from known_devices import H100
from s3_server import BUCKET, Server
from stored_rows import A100, meant, row

from pytest_gpumem.baselines import storage as module
from pytest_gpumem.baselines.history import Baseline, History
from pytest_gpumem.baselines.storage import BaselineError, RemoteStorage, Storage, storage
from pytest_gpumem.baselines.store import Store, copy, files, surplus
from pytest_gpumem.baselines.transfer import Remote
from pytest_gpumem.judging.judge import comparable
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Controls, Provenance
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.settings import resolve
from pytest_gpumem.units import QuantityError

URL = f"s3://{BUCKET}/base"


Place = Callable[[], RemoteStorage]


@pytest.fixture
def place(s3_store: Server, request: pytest.FixtureRequest) -> Place:
    """A new folder of the bucket, as each session opens it."""
    return lambda: RemoteStorage(f"{URL}/{request.node.name}")


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A new store whose files fsspec keeps in a folder, where no S3 is needed: it answers in a tenth of the time."""
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: RemoteStorage((tmp_path / "store").as_uri())


def saved(at: Storage) -> Path:
    """One run more, written without a look at those before."""
    path = Store(at, H100).save([row()], "abc", baseline=Baseline()).path
    assert path is not None
    return path


def test_what_is_saved_is_loaded_elsewhere(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Store(place(), H100).load().processes == 0
    first = saved(place())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    store = Store(place(), H100)
    baseline = store.load()
    assert (baseline.processes, baseline.sequence, store.storage.devices()) == (1, 1, [H100.key])
    assert (
        store.storage.shown(store.folder / first.name)
        == f"{place()}/{H100.key}/gpumem/{first.name}"
    )
    # Another card sees that there is a baseline, and that it is none of its own.
    assert f"there are baselines of {H100.key}" in str(Store(place(), A100).load().note)


def test_a_web_server_that_lists_a_folder_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lists have no sizes."""
    pytest.importorskip("aiohttp", reason="fsspec reads no HTTP without it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved(Storage(tmp_path / "store"))
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = RemoteStorage(f"http://127.0.0.1:{server.server_port}/store")
        assert Store(place, H100).load().processes == 1
        with pytest.raises(BaselineError, match=r"NotImplementedError; it is kept on this machine"):
            saved(place)
        server.shutdown()


def test_only_new_files_are_read_and_removed_ones_leave(local: Place) -> None:
    store = Store(local(), H100)
    for _ in range(2):
        saved(local())
    store.load()
    (older, newer) = sorted(store.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    stamp = older.stat().st_mtime_ns
    newer.unlink()
    assert store.load().processes == 2
    assert older.stat().st_mtime_ns == stamp
    local().remove(H100.key, [older.name])
    assert store.load().processes == 1
    assert not older.exists()


def test_an_accepted_change_is_taken_over_at_a_url(local: Place) -> None:
    saved(local())
    Store(local(), H100).save([row()], "def", accepted=meant(row().key, "checks bounds"))
    loaded = Store(local(), H100).load()
    (found,) = loaded.resets.values()
    assert (found.reason, found.who, found.revision, len(loaded.rows[row().key])) == (
        "checks bounds",
        "ada",
        "def",
        1,
    )
    assert loaded.taken_over == {(found.accepted[0], row().key)}


def test_two_failures_and_then_an_answer(place: Place, s3_store: Server) -> None:
    s3_store.fail("status", status=500, times=2, method="PUT")
    saved(place())
    s3_store.fail("status", status=500, times=2, method="GET")
    assert Store(place(), H100).load().processes == 1


def test_an_answer_that_is_cut_short(place: Place, s3_store: Server) -> None:
    folder = saved(place()).parent
    shutil.rmtree(folder)
    s3_store.fail("cut", method="GET")
    with pytest.raises(BaselineError):
        Store(place(), H100).load()
    assert not list(folder.glob("*.json"))
    s3_store.heal()
    assert Store(place(), H100).load().processes == 1


def test_a_body_that_is_cut_short_is_read_again(place: Place, s3_store: Server) -> None:
    saved(place())
    remote, under = Remote(str(place())), f"{H100.key}/gpumem"
    ((name, size),) = remote.sizes(under).items()
    s3_store.fail("cut", method="GET", times=2)
    assert len(remote.read(under, name, size)) == size
    s3_store.fail("cut", method="GET")
    with pytest.raises(OSError, match=f"of {size} bytes"):
        remote.read(under, name, size)


def test_a_slow_store_answers_and_a_silent_one_is_given_up(
    place: Place, s3_store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.fail("wait", seconds=0.3)
    saved(place())
    assert Store(place(), H100).load().processes == 1
    s3_store.fail("wait", seconds=600)
    monkeypatch.setattr(module, "PATIENCE", 3.0)
    with pytest.raises(BaselineError, match="no answer for 3 s"):
        Store(place(), H100).load()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"s3://no-{BUCKET}/base", "bucket does not exist"),
        ("nothing-known://host/path", "nothing-known"),
    ],
)
def test_a_place_that_is_none(s3_store: Server, url: str, words: str) -> None:
    with pytest.raises(BaselineError, match=words) as caught:
        Store(RemoteStorage(url), H100).load()
    assert str(caught.value).startswith(f"{url}: ")


@pytest.mark.parametrize("url", ["s3://", "s3:///", "file://"])
def test_a_url_of_nothing_is_no_folder(url: str) -> None:
    with pytest.raises(QuantityError, match="is a URL without a place"):
        storage(url)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket", "s3://bucket"),
        ("gs:/bucket/base", "gs://bucket/base"),
        ("file:/srv/base", "file:///srv/base"),
        ("sftp:/ada:secret@host/base", "sftp://***@host/base"),
    ],
)
def test_a_url_with_one_slash_is_no_folder(url: str, meant: str) -> None:
    with pytest.raises(
        QuantityError,
        match=rf"has one slash behind its colon \(did you mean {re.escape(meant)}\?\)",
    ) as mistake:
        storage(url)
    assert "secret" not in str(mistake.value)


@pytest.mark.parametrize("folder", ["C:/base", "./s3:/bucket", "base:1", "a/b:/c"])
def test_a_folder_with_a_colon_is_no_url(folder: str) -> None:
    assert storage(folder).folder == Path(folder)


def test_copies_between_places(local: Place, tmp_path: Path) -> None:
    here = Storage(tmp_path / "here")
    for facts in (H100, A100):
        Store(here, facts).save([row()], "abc")
    assert copy(here, local()) == {A100.key: 1, H100.key: 1}
    assert copy(local(), Storage(tmp_path / "there")) == {A100.key: 1, H100.key: 1}
    assert Store(tmp_path / "there", H100).load() == Store(here, H100).load()


def test_which_place_an_option_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage("a/b", tmp_path).folder == tmp_path / "a" / "b"
    assert storage("~/b", tmp_path).folder == tmp_path / "b"
    assert storage(f"file://{tmp_path}/c").folder == tmp_path / "c"
    assert isinstance(storage("gs://bucket/d"), RemoteStorage)


def test_pruned_runs_change_no_comparison(tmp_path: Path) -> None:
    """A second row, two accepted changes, and a revision that was rejected, over thirty runs."""
    store = Store(tmp_path, H100)
    for number in range(30):
        rows = [row(latency=268e-6 + number * 1e-8)] + (
            [row("test_rare")] if number % 9 == 0 else []
        )
        store.save(
            rows, f"revision{number // 3}", accepted=meant(row().key) if number in (3, 8) else None
        )
    before = store.load(window=5)
    found = dict(files(tmp_path, H100.key))
    removed = surplus(found, 5)
    assert 10 < len(removed) < len(found)
    store.storage.remove(H100.key, [path.name for path in removed])
    after = store.load(window=5)
    assert after.sequence == before.sequence
    assert after.resets == before.resets
    assert after.taken_over == before.taken_over
    for key in before.rows:
        was, now = before.history(key, lambda _: True), after.history(key, lambda _: True)
        assert (now.accepted, now.first) == (was.accepted, was.first)
    assert surplus(dict(files(tmp_path, H100.key)), 5) == []


def test_pruned_runs_change_no_comparison_of_a_variant_of_the_card(tmp_path: Path) -> None:
    """The first runs have not read the latency of DRAM, which tells two variants apart, nor has the control of a later version."""

    def on_card(latency: float | None, source: str = "1") -> Row:
        return row(
            provenance=Provenance(
                "2026-11-01T10:00:00+00:00", "GPU-a", Controls(latency=latency, source=source)
            )
        )

    store = Store(tmp_path, H100)
    for number, latency in enumerate((*[None] * 5, *(340e-9, 353e-9) * 10)):
        store.save([on_card(latency)], f"revision{number}")
    new = (on_card(340e-9), on_card(353e-9), on_card(None), on_card(400e-9), on_card(340e-9, "2"))
    measured = [one.measurement for one in new if one.measurement is not None]

    def histories() -> list[History]:
        baseline = store.load(window=3)
        return [baseline.history(row().key, partial(comparable, one)) for one in measured]

    before = histories()
    store.storage.remove(
        H100.key, [path.name for path in surplus(dict(files(tmp_path, H100.key)), 3)]
    )
    assert [(one.accepted, one.first) for one in histories()] == [
        (one.accepted, one.first) for one in before
    ]
    assert len(store.load().rows[row().key]) < 12


def test_a_rejected_run_that_another_row_needs_stays_out_after_a_prune(tmp_path: Path) -> None:
    """Its revision was saved again since: the last run of a revision does not tell whether an earlier one was rejected."""
    store, key = Store(tmp_path, H100), row().key
    slower = row(
        latency=300e-6,
        outcome=Outcome.FAIL,
        verdict=Verdict(Outcome.FAIL, "slower", code=Code.SLOWER),
        failed=True,
    )
    for rows, revision in (
        ([row()], "good"),
        ([row(latency=300e-6), row("test_rare")], "slow"),
        ([slower], "slow"),
        *[([row()], f"later{number}") for number in range(3)],
        ([row()], "slow"),
    ):
        store.save(rows, revision)
    before = store.load(window=9).rows[key]
    store.storage.remove(
        H100.key, [path.name for path in surplus(dict(files(tmp_path, H100.key)), 9)]
    )
    assert [one.process.revision for one in before] == [
        "good",
        "later0",
        "later1",
        "later2",
        "slow",
    ]
    assert store.load(window=9).rows[key] == before


def test_credentials_of_a_url_are_in_no_message_and_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    secret = RemoteStorage("sftp://user:S3CRET@host/runs")
    monkeypatch.setattr(
        module, "_lines", lambda *_: [{"error": "sftp://user:S3CRET@host/runs: no route to host"}]
    )
    with pytest.raises(
        BaselineError, match=r"^sftp://\*\*\*@host/runs: sftp://\*\*\*@host/runs: no route to host$"
    ):
        secret.devices()
    assert (
        storage(secret.location).location == "sftp://user:S3CRET@host/runs"
    )  # a worker reaches the same store
    assert (
        storage(str(secret), offline=True).folder == secret.folder
    )  # a gate reads the copy of its screen
    assert "S3CRET" not in f"{secret} {secret.shown(secret.at('key') / 'a.json')}"
    resolved = resolve({"gpumem_baseline": secret.location}, {}, {}, "pytest.ini")
    assert resolved.to_json()["baseline"] == "sftp://***@host/runs"
