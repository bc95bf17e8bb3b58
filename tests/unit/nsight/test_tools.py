"""Finding the tools and asking for their version, with programs that only exist here; the command line of a count, and errors of ncu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.nsight.tools import (
    NCU,
    NSYS,
    NSYS_FOLDERS,
    Tool,
    ToolMissing,
    check_version,
    find,
    ncu_error,
    ncu_trouble,
    version_in,
)


def at(tool: Tool, *folders: str) -> Tool:
    """The tool with these usual folders."""
    return replace(tool, folders=folders)


def program(folder: Path, name: str = "ncu") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_variable_goes_before_the_path_and_the_path_before_the_usual_folders(
    tmp_path: Path,
) -> None:
    chosen, on_path, usual = (
        program(tmp_path / "mine", "my-ncu"),
        program(tmp_path / "bin"),
        program(tmp_path / "cuda-13.0"),
    )
    ncu = at(NCU, str(tmp_path / "cuda-*"))
    assert find(ncu, {"GPUMEM_NCU": str(chosen), "PATH": str(on_path.parent)}) == chosen
    assert find(ncu, {"GPUMEM_NCU": "", "PATH": str(on_path.parent)}) == on_path
    assert find(ncu, {"PATH": str(tmp_path)}) == usual


def test_the_newest_version_of_a_usual_folder_is_taken(tmp_path: Path) -> None:
    for version in ("2025.3.1", "2025.10.0", "2024.12.2"):
        program(tmp_path / version)
    (tmp_path / "2026.1.0").mkdir()  # without the program
    assert find(at(NCU, str(tmp_path / "*")), {"PATH": ""}) == tmp_path / "2025.10.0" / "ncu"


def test_a_name_in_the_variable_is_looked_up_on_the_path(tmp_path: Path) -> None:
    installed = program(tmp_path, "ncu-13")
    assert find(at(NCU), {"GPUMEM_NCU": "ncu-13", "PATH": str(tmp_path)}) == installed


@pytest.mark.parametrize("kind", ["nothing", "a folder", "a file that cannot be run"])
def test_a_variable_that_names_no_program_is_said_and_nothing_else_is_taken(
    tmp_path: Path, kind: str
) -> None:
    wrong = tmp_path / "wrong"
    if kind == "a folder":
        wrong.mkdir()
    elif kind != "nothing":
        wrong.write_text("")
    other = program(tmp_path / "bin")
    with pytest.raises(
        ToolMissing, match=r"GPUMEM_NCU='.*wrong' is no program; accepted is the path"
    ):
        find(at(NCU), {"GPUMEM_NCU": str(wrong), "PATH": str(other.parent)})


def test_without_any_the_remedy_and_the_places_are_said(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing) as raised:
        find(at(NCU, str(tmp_path / "cuda-*")), {"PATH": ""})
    for part in ("install Nsight Compute", "GPUMEM_NCU", str(tmp_path / "cuda-*")):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nsys_has_a_variable_and_folders_of_its_own(tmp_path: Path) -> None:
    chosen, ncu = program(tmp_path / "mine", "my-nsys"), program(tmp_path / "bin")
    environment = {"GPUMEM_NCU": str(ncu), "PATH": str(ncu.parent)}
    assert find(at(NSYS), {**environment, "GPUMEM_NSYS": str(chosen)}) == chosen
    usual = program(tmp_path / "nsight-systems" / "2025.3.1" / "bin", "nsys")
    assert find(at(NSYS, str(tmp_path / "nsight-systems" / "*" / "bin")), environment) == usual
    with pytest.raises(
        ToolMissing, match=r"nsys was not found: install Nsight Systems .* GPUMEM_NSYS"
    ):
        find(at(NSYS), environment)
    assert "/opt/nvidia/nsight-systems/*/bin" in NSYS_FOLDERS


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0", "2025.3.2"),
        (
            "NVIDIA (R) Nsight Compute Command Line Profiler\nCopyright (c) 2018-2025 NVIDIA\nVersion 2025.3.0.0 (build 36273991)",
            "2025.3.0",
        ),
        ("usage: nsys [--version]", None),
    ],
)
def test_the_version_that_a_tool_says(said: str, version: str | None) -> None:
    assert version_in(said) == version


@pytest.mark.parametrize(
    ("tool", "said", "error"),
    [
        (NSYS, "NVIDIA Nsight Systems version 2025.3.2.474-1v0", None),
        (NSYS, "NVIDIA Nsight Systems version 2022.4.1.1-1v0", None),
        (
            NSYS,
            "NVIDIA Nsight Systems version 2021.5.2.53-28d0e6e",
            r"nsys is Nsight Systems 2021.5.2; needed is 2022.4 or newer; GPUMEM_NSYS",
        ),
        (
            NCU,
            "Version 2022.2.1.0 (build 31385273)",
            r"ncu is Nsight Compute 2022.2.1; needed is 2022.4 or newer; GPUMEM_NCU",
        ),
        (
            NCU,
            "something else",
            r"ncu --version printed 'something else', which is no version of Nsight Compute",
        ),
    ],
)
def test_a_version_that_is_too_old_or_none_is_said(
    tmp_path: Path, tool: Tool, said: str, error: str | None
) -> None:
    installed = program(tmp_path, tool.program)
    installed.write_text(f"#!/bin/sh\necho '{said}'\n")
    if error is None:
        assert check_version(tool, installed, {}) == version_in(said)
        return
    with pytest.raises(ToolMissing, match=error):
        check_version(tool, installed, {})


def test_a_tool_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    broken = program(tmp_path)
    broken.write_text("#!/no/such/shell\n")
    with pytest.raises(ToolMissing, match=r"ncu cannot be started: .*No such file"):
        check_version(NCU, broken, {})


def test_other_errors_are_quoted_but_not_that_tests_failed() -> None:
    assert (
        ncu_error("==PROF== fine\n==ERROR== Failed to find metric dram__x\n==ERROR== more")
        == "ncu: Failed to find metric dram__x"
    )
    assert ncu_error("==ERROR== The application returned an error code (1).\n") is None
    assert ncu_error("==PROF== Disconnected\nE   ERROR in test\n") is None


def test_a_gpu_without_counters_of_dram_is_said_to_have_none() -> None:
    """As one that shares the host's memory."""
    said = ncu_trouble("==ERROR== Failed to find metric dram__bytes_read.sum\n")
    assert (
        said
        == "ncu: Failed to find metric dram__bytes_read.sum: this GPU has no counters of DRAM, so nothing can be counted"
    )
    assert (
        ncu_trouble("==ERROR== Failed to find metric lts__x\n")
        == "ncu: Failed to find metric lts__x"
    )
