"""Baselines behind a URL: an S3-compatible server on loopback, whole and failing; stores in a folder; and the places of folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import naming
from known_devices import H100
from s3_server import BUCKET, Server
from stored_rows import A100, row

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.storage import BaselineError, RemoteStorage, Storage, storage
from pytest_gpumem.baselines.store import Store
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
    assert (baseline.processes, store.storage.devices()) == (1, [H100.key])
    assert (
        store.storage.shown(store.folder / first.name)
        == f"{place()}/{H100.key}/gpumem/{first.name}"
    )
    # Another card sees that there is a baseline, and that it is none of its own.
    assert f"there are baselines of {H100.key}" in str(Store(place(), A100).load().note)


def test_only_new_files_are_read_and_removed_ones_leave(local: Place, tmp_path: Path) -> None:
    store = Store(local(), H100)
    for _ in range(2):
        saved(local())
    store.load()
    (older, newer) = sorted(store.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    stamp = older.stat().st_mtime_ns
    newer.unlink()
    assert store.load().processes == 2
    assert older.stat().st_mtime_ns == stamp
    (tmp_path / "store" / H100.key / "gpumem" / older.name).unlink()
    assert store.load().processes == 1
    assert not older.exists()


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


def test_a_file_of_the_store_that_was_damaged_is_not_copied(local: Place, tmp_path: Path) -> None:
    path = saved(local())
    path.unlink()
    (damaged,) = (tmp_path / "store").rglob("*.json")
    damaged.write_bytes(damaged.read_bytes()[:-10])
    with pytest.raises(BaselineError, match=f"{path.name}: this baseline file is corrupt"):
        Store(local(), H100).load()
    assert not path.exists()


def test_a_place_that_is_none(s3_store: Server) -> None:
    for url, words in [
        (f"s3://no-{BUCKET}/base", "bucket does not exist"),
        ("nothing-known://host/path", "nothing-known"),
    ]:
        with naming(url):
            with pytest.raises(BaselineError, match=words) as caught:
                Store(RemoteStorage(url), H100).load()
            assert str(caught.value).startswith(f"{url}: ")


def test_a_url_with_one_slash_is_no_folder() -> None:
    for url in ["s3:/bucket", "file:/srv/base", "sftp:/ada:secret@host/base"]:
        with naming(url):
            with pytest.raises(QuantityError, match="has one slash behind its colon") as mistake:
                storage(url)
            assert "secret" not in str(mistake.value)


def test_which_place_an_option_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage("a/b", tmp_path).folder == tmp_path / "a" / "b"
    assert storage("~/b", tmp_path).folder == tmp_path / "b"
    assert storage(f"file://{tmp_path}/c").folder == tmp_path / "c"
    assert isinstance(storage("gs://bucket/d"), RemoteStorage)


def test_credentials_of_a_url_are_in_no_message_and_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    secret = RemoteStorage("sftp://user:S3CRET@host/runs")
    with pytest.raises(BaselineError, match=r"^sftp://\*\*\*@host/runs: ") as caught:
        secret.devices()  # there is no such host, or no package for it
    assert "S3CRET" not in str(caught.value)
    assert secret.url == "sftp://user:S3CRET@host/runs"  # a worker reaches the same store
    assert storage(str(secret)).folder == secret.folder  # a gate reads the copy of its screen
    assert "S3CRET" not in f"{secret} {secret.shown(secret.at('key') / 'a.json')}"
    resolved = resolve({"gpumem_baseline": secret.url}, {}, {}, "pytest.ini")
    assert resolved.to_json()["baseline"] == "sftp://***@host/runs"
