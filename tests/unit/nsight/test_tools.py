"""Finding the tools, their command lines, and the causes in their output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import naming

from pytest_gpumem.nsight.tools import (
    NCU,
    NSYS,
    Tool,
    ToolMissing,
    find,
    ncu_cause,
    ncu_command,
    nsys_cause,
    nsys_command,
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
    assert "/opt/nvidia/nsight-systems/*/bin" in NSYS.folders


def test_the_first_error_of_ncu_is_quoted_but_not_that_tests_failed() -> None:
    output = "==PROF== fine\n==ERROR== The application returned an error code (1).\n==ERROR== Out of memory.\n==ERROR== more"
    assert ncu_cause(output) == "ncu: Out of memory"
    assert ncu_cause("==ERROR== The application returned an error code (1).\n") is None
    assert ncu_cause("==PROF== Disconnected\nE   ERROR in test\n") is None


def test_a_gpu_without_counters_of_dram_is_said_to_have_none() -> None:
    """As one that shares the host's memory."""
    cause = ncu_cause("==ERROR== Failed to find metric dram__bytes_read.sum\n")
    assert (
        cause
        == "ncu: Failed to find metric dram__bytes_read.sum: this GPU has no counters of DRAM, so nothing can be counted"
    )
    assert (
        ncu_cause("==ERROR== Failed to find metric lts__x\n") == "ncu: Failed to find metric lts__x"
    )


def test_words_of_the_tests_are_not_taken_for_the_tools() -> None:
    assert (
        nsys_cause("FAILED test_a.py::test_triad - AssertionError", Path("test_triad.nsys-rep"))
        is None
    )


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
