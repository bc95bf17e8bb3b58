"""The revision and the sources in a bench script's record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import record_file
from committing import git

from pytest_gpumem import __version__


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(record_file, "ROOT", tmp_path)
    record_file.taken_at.cache_clear()
    yield tmp_path
    record_file.taken_at.cache_clear()


def test_a_record_names_the_commit_that_it_was_taken_at_and_whether_files_differed(
    checkout: Path,
) -> None:
    git(checkout, "init", "-q")
    (checkout / "a").write_text("1")
    git(checkout, "add", "a")
    git(checkout, "commit", "-q", "-m", "one")
    record_file.write_record(checkout / "out.json", {"kind": "x"})
    commit = git(checkout, "rev-parse", "HEAD")
    taken_at = json.loads((checkout / "out.json").read_text())["taken_at"]
    assert (taken_at["revision"], taken_at["package"], len(taken_at["sources"])) == (
        commit,
        __version__,
        64,
    )

    (checkout / "a").write_text("2")
    record_file.taken_at.cache_clear()
    assert record_file.taken_at()["revision"] == commit + "-dirty"
