"""`gpumem profile ncu --traffic` from end to end with a stand-in for Nsight Compute, and its counts in later runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_ncu import L2_BYTES
from forked import COMMAND
from nvtx_injection import Trace

from pytest_gpumem.cli import main
from pytest_gpumem.ranges import labelled

TESTS = Path(__file__).parents[1]
MIB = 1 << 20

SUITE = """
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)

def test_pair(gpu_benchmark, device_buffer, gpu_kernels):
    a, b = (device_buffer(1 << 20, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.copy, a, b, label="1 MiB")
    gpu_benchmark(gpu_kernels.copy, a, b, label="again")
    assert False, "times under a profiler are no times"

def test_link(gpu_benchmark, device_buffer, pinned_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(1 << 20), pinned_buffer(1 << 20))
"""


def figures(reads: int, writes: int) -> list[int]:
    return [reads, writes, 1000, reads // 32, writes // 32]


RIGHT = {
    "test_triad": figures(2 * MIB, MIB),
    labelled("test_pair", "1 MiB"): figures(MIB, MIB),
    labelled("test_pair", "again"): figures(3 * MIB, MIB),
    # What runs outside the measured launches is not counted.
    "test_triad.flush": figures(10**9, 10**9),
    "test_pair.flush": figures(10**9, 10**9),
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Session = Callable[..., pytest.RunResult]


@pytest.fixture
def traffic(
    pytester: pytest.Pytester,
    nvtx_trace: Trace,
    tmp_path: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs `gpumem profile ncu --traffic` on the suite with the stand-in; the tests alone run in a process of their own."""
    pytester.makepyfile(test_suite=SUITE)
    ncu = tmp_path / "bin" / "ncu"
    ncu.parent.mkdir()
    ncu.write_text(
        f'#!/bin/sh\nPYTHONPATH={TESTS}:$PYTHONPATH exec {programs / "python"} {TESTS / "fake_ncu.py"} "$@"\n'
    )
    ncu.chmod(0o755)

    def run(*arguments: str, **told: Any) -> subprocess.CompletedProcess[str]:
        nvtx = nvtx_trace.environment
        told = {
            "figures": RIGHT,
            "nvtx_library": nvtx["NVTX_INJECTION64_PATH"],
            "nvtx_log": nvtx["NVTX_LOG"],
            **told,
        }
        for name, value in {
            "GPUMEM_NCU": str(ncu),
            "FAKE_NCU": json.dumps(told),
            "COLUMNS": "160",
        }.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(main, ["profile", "ncu", "--traffic", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return subprocess.CompletedProcess(
            arguments, result.exit_code, result.stdout, result.stderr
        )

    return run


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The last line on standard error; nothing is on standard output."""
    assert done.stdout == "", done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_figures_are_joined_with_their_measurements(
    traffic: Run, pytester: pytest.Pytester
) -> None:
    done = traffic("--json", "traffic.json")
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "2 MiB + 1 MiB 2 MiB + 1 MiB" in " ".join(rows["test_triad"].split())
    assert rows["test_triad"].endswith("agrees")
    assert rows["test_pair[1 MiB]"].endswith("agrees")
    assert "1 MiB + 1 MiB 3 MiB + 1 MiB" in " ".join(rows["test_pair[again]"].split())
    assert rows["test_pair[again]"].endswith("moves more")
    assert rows["test_link"].endswith("not counted")
    assert "tests of 2 of 4 rows failed in this run" in done.stdout
    assert (
        "moves more test_suite.py::test_pair[again]: declared 2 MiB, counted 4 MiB by ncu on 20"
        in done.stdout
    )
    written = json.loads((pytester.path / "traffic.json").read_text())
    by_key = {row["key"]: row for row in written["rows"]}
    triad = by_key["test_suite.py::test_triad"]
    assert triad["dram_bytes"]["launches"] == 5
    assert triad["kernels_per_launch"] == 1
    assert triad["finding"] == "agrees"
    assert by_key["test_suite.py::test_link"]["dram_bytes"] is None
    # What pytest prints goes to standard error, the command too.
    assert "--nvtx-include" in done.stderr
    assert "test_suite.py" in done.stderr


def test_a_window_is_counted_beside_off(traffic: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_table="""
        def test_lookup(gpu_benchmark, device_buffer, persisting_stream, gpu_kernels):
            out, table = device_buffer(1 << 22, "i4"), device_buffer(1 << 20, "i4")
            with persisting_stream(table, set_aside="off") as stream:
                gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off")
            with persisting_stream(table) as stream:
                gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="fitted")
        """
    )
    told = {
        labelled("test_lookup", "off"): figures(3 * MIB, 4 * MIB),
        labelled("test_lookup", "fitted"): figures(MIB, 4 * MIB),
    }
    done = traffic("--test", "test_table.py", "--json", "traffic.json", figures=told)
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "3 MiB + 4 MiB" in rows["test_lookup[off]"]
    assert rows["test_lookup[off]"].endswith("moves more")
    assert "1 MiB + 4 MiB" in rows["test_lookup[fitted]"]
    assert rows["test_lookup[fitted]"].endswith("agrees")


def test_a_wrong_declaration_exits_with_1_and_one_test_can_be_chosen(traffic: Run) -> None:
    assert 4 * L2_BYTES <= 3 * MIB  # the caches account for nothing here
    # A folder among pytest's arguments adds nothing to the test that was asked for.
    done = traffic(
        "--test", "test_suite.py::test_triad", "--", ".", figures={"test_triad": figures(MIB, MIB)}
    )
    assert done.returncode == 1, done.stderr
    assert "declared too much test_suite.py::test_triad" in done.stdout
    assert "1 MiB of the 2 MiB declared as read" in " ".join(done.stdout.split())
    assert "test_pair" not in done.stdout


def test_arguments_reach_pytest(traffic: Run) -> None:
    done = traffic("--", "-k", "triad", "--gpumem-mode=hot")
    assert done.returncode == 0, done.stderr
    assert "test_link" not in done.stdout
    assert "not judged" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told", "code", "named"),
    [
        (["--", "--gpumem-device=sim"], {}, 4, "the simulated device has no counters"),
        (["--", "--benchmark-json=mine.json"], {}, 4, "--benchmark-json"),
        (["--json", "no/folder/x.json"], {}, 4, "no/folder"),
        (["-o", "report"], {}, 4, "leave out -o"),
        (["--tool-options", "--set full"], {}, 4, "leave out --tool-options"),
        (["-k", "triad"], {}, 4, "-k"),
        (["--", "--no-such-option"], {}, 4, "pytest did not accept its arguments"),
        ([], {"simulated": True}, 6, "is a simulated device: it has no counters"),
        (["--", "-k", "nothing"], {}, 6, "pytest measured nothing"),
        ([], {"figures": {}}, 6, "ncu matched no kernel"),
        (
            [],
            {"says": "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"},
            6,
            "--cap-add=SYS_ADMIN",
        ),
        ([], {"says": "==ERROR== Failed to find metric x\n"}, 6, "ncu: Failed to find metric x"),
        ([], {"attach": False, "says": "==WARNING== No kernels were profiled.\n"}, 6, "nvtx"),
        ([], {"says": '"ID","Kernel Name"\n'}, 6, "ncu's CSV has no"),
    ],
)
def test_what_cannot_be_counted_is_one_line(
    traffic: Run, arguments: list[str], told: dict[str, Any], code: int, named: str
) -> None:
    done = traffic(*arguments, **told)
    assert done.returncode == code, done.stderr
    line = complaint(done)
    assert line.startswith("gpumem: ")
    assert named in line


def test_without_ncu(pytester: pytest.Pytester) -> None:
    command = [sys.executable, "-c", COMMAND, "profile", "ncu", "--traffic"]
    environment = {**os.environ, "GPUMEM_NCU": str(pytester.path / "nowhere")}
    done = subprocess.run(
        command, cwd=pytester.path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 6
    assert "nowhere' is no program" in complaint(done)
