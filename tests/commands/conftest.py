"""Result files on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from result_files import Folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)
