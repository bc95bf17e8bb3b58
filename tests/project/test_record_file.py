"""The revision and the sources in a bench script's record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import record_file
from committing import git

from pytest_gpumem import __version__


@pytest.mark.skipif(not (record_file.ROOT / ".git").exists(), reason="needs a checkout")
def test_a_record_names_the_commit_that_it_was_taken_at(tmp_path: Path) -> None:
    record_file.write_record(tmp_path / "out.json", {"kind": "x"})
    taken_at = json.loads((tmp_path / "out.json").read_text())["taken_at"]
    revision = taken_at["revision"].removesuffix("-dirty")
    assert (revision, taken_at["package"], len(taken_at["sources"])) == (
        git(record_file.ROOT, "rev-parse", "HEAD"),
        __version__,
        64,
    )
