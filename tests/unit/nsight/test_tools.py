"""Finding the tools, their command lines, and the causes in their output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import naming

from pytest_gpumem.nsight.tools import (
    NCU,
    Tool,
    find,
    ncu_cause,
    ncu_command,
    nsys_command,
)
from pytest_gpumem.outcomes import NoAnswer


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


def test_a_variable_that_names_no_program_is_said_and_nothing_else_is_taken(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for kind in ["nothing", "a folder", "a file that cannot be run"]:
        tmp_path = tmp_path_factory.mktemp("case")
        with naming(kind):
            wrong = tmp_path / "wrong"
            if kind == "a folder":
                wrong.mkdir()
            elif kind != "nothing":
                wrong.write_text("")
            other = program(tmp_path / "bin")
            with pytest.raises(
                NoAnswer, match=r"GPUMEM_NCU='.*wrong' is no program; accepted is the path"
            ):
                find(at(NCU), {"GPUMEM_NCU": str(wrong), "PATH": str(other.parent)})


def test_the_first_error_of_ncu_is_quoted_but_not_that_tests_failed() -> None:
    output = "==PROF== fine\n==ERROR== The application returned an error code (1).\n==ERROR== Out of memory.\n==ERROR== more"
    assert ncu_cause(output) == "ncu: Out of memory"
    assert ncu_cause("==ERROR== The application returned an error code (1).\n") is None
    assert ncu_cause("==PROF== Disconnected\nE   ERROR in test\n") is None


def test_nsys_records_a_whole_run_or_the_range_of_one_test() -> None:
    whole = nsys_command(
        Path("nsys"), ["python", "-m", "pytest"], Path("r.nsys-rep"), test=None, managed=False
    )
    assert not any("capture" in word or "-um-" in word for word in whole)
    single = nsys_command(
        Path("nsys"), ["python"], Path("r.nsys-rep"), test="test_triad", managed=True
    )
    assert {
        "--capture-range=nvtx",
        "--nvtx-capture=test_triad@gpumem",
        "--capture-range-end=stop",
    } < set(single)
    assert {"--cuda-um-gpu-page-faults=true", "--cuda-um-cpu-page-faults=true"} < set(single)
    assert "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in single
    assert single[-1] == "python"


def test_ncu_leaves_clocks_alone_unless_told_and_sees_measured_launches_only() -> None:
    command = ncu_command(Path("ncu"), ["python"], ["--export", "r.ncu-rep"], metrics=["x", "y"])
    assert " ".join(command) == (
        "ncu --clock-control none --cache-control all --target-processes all --metrics x,y "
        "--nvtx --nvtx-include regex:gpumem@.+.measure/ --export r.ncu-rep python"
    )
    chosen = ["--clock-control", "base", "--cache-control=none", "--metrics", "z", "--set", "full"]
    command = ncu_command(Path("ncu"), [], [], metrics=["x"], chosen=chosen)
    assert command[1:10] == ["--target-processes", "all", *chosen]
