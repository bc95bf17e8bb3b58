"""Writing a file whole."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pytest_gpumem.files import unwritable, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for text in ("first", "second"):
        write_whole(path, text)
        assert path.read_text() == text
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "nowhere" / "out.json", "")
    assert [one.name for one in tmp_path.iterdir()] == ["out.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("real/out.json")
    assert unwritable(link) is None
    write_whole(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "real" / "out.json").read_text() == "text"


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link, heard = tmp_path / "pipe", tmp_path / "null", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    assert unwritable(pipe) is None
    write_whole(pipe, "text")
    reader.join(10)
    assert heard == ["text"]
    assert pipe.is_fifo()
    link.symlink_to(os.devnull)
    write_whole(link, "text")
    assert link.is_symlink()
    assert link.is_char_device()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["null", "pipe"]


def test_what_speaks_against_a_file_is_known_before(tmp_path: Path) -> None:
    assert unwritable(tmp_path / "new.json") is None
    assert unwritable(tmp_path) == "it is a folder"
    assert unwritable(tmp_path / "nowhere" / "x") == f"there is no folder {tmp_path / 'nowhere'}"
