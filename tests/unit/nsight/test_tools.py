"""Finding ncu, with programs that only exist here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.nsight.tools import ToolMissing, find_ncu


def program(folder: Path, name: str = "ncu") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_variable_goes_before_the_path_and_the_path_before_the_usual_folders(tmp_path: Path) -> None:
    chosen, on_path, usual = program(tmp_path / "mine", "my-ncu"), program(tmp_path / "bin"), program(tmp_path / "cuda-13.0")
    folders = [str(tmp_path / "cuda-*")]
    assert find_ncu({"GPUMEM_NCU": str(chosen), "PATH": str(on_path.parent)}, folders) == chosen
    assert find_ncu({"GPUMEM_NCU": "", "PATH": str(on_path.parent)}, folders) == on_path
    assert find_ncu({"PATH": str(tmp_path)}, folders) == usual


def test_the_newest_version_of_a_usual_folder_is_taken(tmp_path: Path) -> None:
    for version in ("2025.3.1", "2025.10.0", "2024.12.2"):
        program(tmp_path / version)
    (tmp_path / "2026.1.0").mkdir()  # without the program
    assert find_ncu({"PATH": ""}, [str(tmp_path / "*")]) == tmp_path / "2025.10.0" / "ncu"


def test_a_name_in_the_variable_is_looked_up_on_the_path(tmp_path: Path) -> None:
    installed = program(tmp_path, "ncu-13")
    assert find_ncu({"GPUMEM_NCU": "ncu-13", "PATH": str(tmp_path)}, []) == installed


@pytest.mark.parametrize("kind", ["nothing", "a folder", "a file that cannot be run"])
def test_a_variable_that_names_no_program_is_said_and_nothing_else_is_taken(tmp_path: Path, kind: str) -> None:
    wrong = tmp_path / "wrong"
    if kind == "a folder":
        wrong.mkdir()
    elif kind != "nothing":
        wrong.write_text("")
    other = program(tmp_path / "bin")
    with pytest.raises(ToolMissing, match=r"GPUMEM_NCU='.*wrong' is no program; accepted is the path"):
        find_ncu({"GPUMEM_NCU": str(wrong), "PATH": str(other.parent)}, [])


def test_without_any_the_remedy_and_the_places_are_said(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing) as raised:
        find_ncu({"PATH": ""}, [str(tmp_path / "cuda-*")])
    for part in ("install Nsight Compute", "GPUMEM_NCU", str(tmp_path / "cuda-*")):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)
