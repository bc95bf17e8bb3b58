"""The lock of a GPU, and the note beside it that names who holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.devices.locks import exclusive


def test_a_note_that_cannot_be_removed_leaves_the_gpu_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    note = tmp_path / "gpumem" / "GPU-1.txt"
    errors = list[OSError]()  # pytest too keeps them, with what they refer to
    try:
        with exclusive("GPU-1", "H100", print, test="test_it", limit=0):
            note.unlink()
            note.mkdir()
    except OSError as error:
        errors.append(error)
    note.rmdir()
    with exclusive("GPU-1", "H100", print, test="test_it", limit=0):
        assert "test_it" in note.read_text()
    assert not note.exists()
    assert not errors
