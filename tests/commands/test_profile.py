"""`gpumem profile` with tools that are lines of shell: reports, figures, and why there are none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import ncu_csv
import pytest
from click.testing import CliRunner, Result

from pytest_gpumem.cli import main
from pytest_gpumem.nsight import profile
from pytest_gpumem.nsight.profile import SelectedTest

TRIAD = SelectedTest("test_a.py::test_triad", "test_triad", managed=False)
PAGED = SelectedTest("test_a.py::test_paged", "test_paged", managed=True)

Call = Callable[..., Result]


@pytest.fixture
def gpumem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs `gpumem profile` with a tool that does what a line of shell says, on tests that nobody collects."""
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("GPUMEM", "NVTX")):
            monkeypatch.delenv(name)
    state = SimpleNamespace(tests=(TRIAD,))
    # It would collect in a process each time; tests/plugin/test_gpumem_profile.py does.
    monkeypatch.setattr(profile, "select", lambda *_: state.tests)

    def run(
        tool: str, *arguments: str, does: str = "exit 0", tests: tuple[SelectedTest, ...] = (TRIAD,)
    ) -> Result:
        state.tests = tests
        program = tmp_path / tool
        # $report is the file that the tool was told to write.
        program.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = stats ] || [ "$1" = --import ]; then echo "figures: $*"; exit; fi\n'
            'for a in "$@"; do case "$a" in --output=*) report="${a#--output=}";; *.ncu-rep) report="$a";; esac; done\n'
            f"{does}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv(f"GPUMEM_{tool.upper()}", str(program))
        return CliRunner().invoke(main, ["profile", tool, *arguments], prog_name="gpumem")

    return run


def complaint(result: Result, code: int) -> str:
    """The last line on standard error; nothing is on standard output."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr.splitlines()[-1]


SAYS = {
    "a report that could not be imported": (
        "nsys",
        "echo \"Generating '$report'\"; echo 'Importer error status: Importation failed.'; : > ${report%.nsys-rep}.qdstrm",
        (
            r"its importer could not make a report of .*test_triad\.qdstrm",
            r"install it \(libdw1 on Debian",
        ),
    ),
    "a range that never began": (
        "nsys",
        "echo 'Generated:'; echo '    No reports were generated.'",
        (r"nsys never saw the range of the test: it was not reached, or",),
    ),
    "nothing said": (
        "nsys",
        "exit 7",
        (r"nsys wrote no report \(ended with exit code 7\); its output is above",),
    ),
    "no permission": (
        "ncu",
        "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters'; exit 1",
        (
            r"ERR_NVGPUCTRPERM",
            r"NVreg_RestrictProfilingToAdminUsers=0",
            r"developer.nvidia.com/ERR_NVGPUCTRPERM",
        ),
    ),
    "no kernel": (
        "ncu",
        "echo '==WARNING== No kernels were profiled.'",
        (r"ncu matched no kernel: no test ran, the tests were skipped, or",),
    ),
}


def test_without_a_report_the_cause_and_the_remedy_are_said(gpumem: Call) -> None:
    for case in SAYS:
        tool, does, patterns = SAYS[case]
        said = complaint(gpumem(tool, does=does), 6)
        for pattern in patterns:
            assert re.search(pattern, said), said
        assert not list(Path().glob("*-rep")), case


def test_a_tool_that_cannot_be_started_is_named(gpumem: Call, tmp_path: Path) -> None:
    gpumem("ncu")
    (tmp_path / "ncu").write_bytes(b"\x7fELF of another machine")
    result = CliRunner().invoke(main, ["profile", "ncu"], prog_name="gpumem")
    assert "ncu cannot be started: Exec format error" in complaint(result, 6)


def test_a_call_that_leads_nowhere_is_refused_before_anything_runs(
    gpumem: Call, tmp_path: Path
) -> None:
    for arguments, message in [
        (
            ["--", "--gpumem-device", "sim:h100"],
            "--gpumem-device sim:h100: Nsight sees nothing of it; use a GPU",
        ),
        (["--", "--collect-only"], "--collect-only among pytest's arguments: no test would run"),
        (
            ["--tool-options", "--trace=cuda --output=mine"],
            "--tool-options: --output=mine: gpumem names the report; -o FILE does",
        ),
    ]:
        said = complaint(gpumem("nsys", *arguments, does=": > ran"), 4)
        assert message in said, arguments
        assert not (tmp_path / "ran").exists(), arguments


def test_the_device_of_the_variable_is_profiled_and_the_simulated_one_is_refused(
    gpumem: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [("cuda:1", "cuda:1"), ("CUDA:1", "cuda:1"), ("AUTO", "cuda"), ("", "cuda")]
    for device, chosen in devices:
        monkeypatch.setenv("GPUMEM_DEVICE", device)
        result = gpumem("nsys", "-o", "r", does='echo > "$report"')
        assert f"--gpumem --gpumem-device {chosen} -p " in result.stderr
    for device in ("sim:h100", "SIM"):
        monkeypatch.setenv("GPUMEM_DEVICE", device)
        said = complaint(gpumem("nsys"), 4)
        assert f"GPUMEM_DEVICE={device.lower()}: Nsight sees nothing of it; use a GPU" in said
    # The command line wins, and its last word.
    words = "nsys -o r -- --gpumem-device sim --gpumem-device=CUDA:2"
    result = gpumem(*words.split(), does='echo > "$report"')
    assert result.exit_code == 0
    said = complaint(gpumem("nsys", "--", "--gpumem-device=cuda", "--gpumem-device", "sim"), 4)
    assert "--gpumem-device sim: Nsight sees nothing" in said


def test_a_report_of_failed_tests_is_a_report(gpumem: Call, tmp_path: Path) -> None:
    result = gpumem("nsys", does='echo > "$report"; exit 1', tests=(TRIAD, PAGED))
    assert result.exit_code == 1
    assert f"wrote {tmp_path / 'gpumem.nsys-rep'}: 2 tests, by" in result.stdout
    assert "figures: stats --report nvtx_kern_sum --report um_total_sum --sqlite=" in result.stdout
    assert f"open it:  nsys-ui {tmp_path / 'gpumem.nsys-rep'}\n" in result.stdout
    assert "pytest ended with exit code 1: tests failed" in result.stderr


def test_a_report_without_a_name_replaces_none(gpumem: Call, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        assert gpumem("nsys", does=f'echo {number} > "$report"').exit_code == 0
    written = {file.name: file.read_text() for file in tmp_path.glob("*.nsys-rep")}
    assert written == {
        "test_triad.nsys-rep": "1\n",
        "test_triad-2.nsys-rep": "2\n",
        "test_triad-3.nsys-rep": "3\n",
    }


def test_a_report_of_a_tool_that_was_killed_is_doubted(gpumem: Call, tmp_path: Path) -> None:
    result = gpumem("ncu", does='echo half > "$report"; kill -9 $$')
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        f"gpumem: {tmp_path / 'ncu'} was ended by SIGKILL: its report may not be whole",
    )


def test_page_faults_are_recorded_where_a_test_has_managed_buffers_or_as_asked(
    gpumem: Call,
) -> None:
    def recorded(*arguments: str, tests: tuple[SelectedTest, ...]) -> bool:
        result = gpumem("nsys", *arguments, "-o", "r", does='date +%s%N > "$report"', tests=tests)
        (line,) = (line for line in result.stderr.splitlines() if "profile --trace" in line)
        assert ("--cuda-um-gpu-page-faults=true" in line) == (
            "--cuda-um-cpu-page-faults=true" in line
        )
        return "--cuda-um-gpu-page-faults=true" in line

    assert recorded(tests=(TRIAD, PAGED))
    assert not recorded(tests=(TRIAD,))
    faults = "--cuda-um-gpu-page-faults={0} --cuda-um-cpu-page-faults={0}"
    assert recorded("--tool-options", faults.format("true"), tests=(TRIAD,))
    assert not recorded("--tool-options", faults.format("false"), tests=(PAGED,))


def test_ncus_kernels_are_a_table(gpumem: Call, tmp_path: Path) -> None:
    (tmp_path / "page").write_text(
        ncu_csv.log(ncu_csv.line(0, "triad", ncu_csv.measured("test_triad"), ncu_csv.H200))
    )
    result = gpumem("ncu", does='echo > "$report"')
    assert result.exit_code == 0
    assert "no table: ncu's CSV has no column ID" in result.stdout
    tool = tmp_path / "ncu"
    tool.write_text(tool.read_text().replace('echo "figures: $*"', f"cat {tmp_path / 'page'}"))
    result = CliRunner().invoke(main, ["profile", "ncu"], prog_name="gpumem")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[1:4] == ["test_triad", "1 × triad", "367.3 us 1.484 GiB - - - - - -"]
    assert (
        f"wrote {tmp_path / 'test_triad-2.ncu-rep'}: test_a.py::test_triad, by {tool}"
        in result.stdout
    )
    assert f"in text: {tool} --import {tmp_path / 'test_triad-2.ncu-rep'}" in lines
