"""What is on disk counts, what was torn does not, and nothing else is taken for a journal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import process, row

from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.journal import Journal
from pytest_gpumem.runs.processes import ProcessRecord, Turn

ASKED = {"base": "abc", "seed": 0, "tests": ("a", "b")}


def written(path: Path) -> None:
    journal = Journal(path, ASKED)
    journal.append({"n": 1})
    journal.append({"n": 2})
    journal.close()


def test_lines_come_back(tmp_path: Path) -> None:
    written(tmp_path / "j")
    journal = Journal(tmp_path / "j", ASKED)
    assert journal.lines == [{"n": 1}, {"n": 2}]
    assert journal.count() == 2
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_a_line_of_which_the_disk_takes_a_part_is_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:7]))
    written(tmp_path / "j")
    journal = Journal(tmp_path / "j", ASKED)
    assert journal.lines == [{"n": 1}, {"n": 2}]
    journal.close()


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_line_that_was_torn_is_dropped_and_the_next_takes_its_place(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "j"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    journal = Journal(path, ASKED)
    survived = 1 if cut <= len(b'{"n":2}\n') else 0
    assert journal.lines == [{"n": 1}, {"n": 2}][:survived]
    journal.append({"n": 3})
    journal.close()
    again = Journal(path, ASKED)
    assert again.lines[-1] == {"n": 3}
    again.close()


def test_a_journal_whose_first_line_was_torn_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"kind": "gpumem du')
    journal = Journal(tmp_path / "j", ASKED)
    journal.append({"n": 1})
    journal.close()
    written(tmp_path / "k")
    assert (tmp_path / "j").read_bytes() == (tmp_path / "k").read_bytes()[
        : (tmp_path / "j").stat().st_size
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hello\n", "is no journal of a duet"),
        ("[]\n", "is no journal of a duet"),
        ('{"kind": "gpumem duet journal", "schema": 99, "arguments": {}}\n', "schema 99"),
        ('{"kind": "gpumem duet journal", "schema": 2}\n', "is no journal"),
        ('{"kind": "gpumem duet journal", "schema"\n', "line 1 is no JSON"),
        (
            '{"rows": []}',
            "is no journal of a duet",
        ),  # of one line without an end, which is not a torn line of ours
        ('{\n  "rows": []\n}', "is no journal of a duet"),
    ],
)
def test_what_is_no_journal_is_refused_and_left_alone(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "j"
    path.write_text(content)
    with pytest.raises(RunError, match=said) as error:
        Journal(path, ASKED)
    assert str(path) in str(error.value)
    assert path.read_text() == content


def test_a_device_in_place_of_a_journal_is_not_read() -> None:
    with pytest.raises(RunError, match="/dev/zero is no file"):
        Journal(Path("/dev/zero"), ASKED)


@pytest.mark.parametrize(
    "changes", [{"turn": [[1], "base"]}, {"seconds": "long"}, {"pid": None}, {"further": 1}]
)
def test_a_process_with_values_of_other_types_is_refused(changes: dict[str, object]) -> None:
    plain = to_plain(process(Turn(1, "base"), [row("test_a.py::a", 1e-6)]))
    assert ProcessRecord.from_json(json.loads(json.dumps(plain))).turn == Turn(1, "base")
    with pytest.raises(RunError, match="holds a process that cannot be read"):
        ProcessRecord.from_json(json.loads(json.dumps(plain | changes)))


def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    written(path)
    path.write_bytes(path.read_bytes().replace(b'{"n":1}', b'{"n":1'))
    with pytest.raises(RunError, match="line 2 is no JSON"):
        Journal(path, ASKED)


def test_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path / "j")
    with pytest.raises(RunError, match='of other arguments: base was "abc" and is now "abd"'):
        Journal(tmp_path / "j", {**ASKED, "base": "abd"})
    with pytest.raises(RunError, match="more was missing and is now 1"):
        Journal(tmp_path / "j", {**ASKED, "more": 1})


def test_two_duets_cannot_share_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", ASKED)
    with pytest.raises(RunError, match="another duet is writing it"):
        Journal(tmp_path / "j", ASKED)
    journal.close()
    journal.close()


def test_a_link_or_a_missing_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("text")
    (tmp_path / "j").symlink_to(tmp_path / "victim")
    for path in (tmp_path / "j", tmp_path / "none" / "j"):
        with pytest.raises(RunError, match="cannot be opened"):
            Journal(path, ASKED)
    assert (tmp_path / "victim").read_text() == "text"
