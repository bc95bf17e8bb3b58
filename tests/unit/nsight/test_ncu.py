"""The command line of ncu, its CSV, and its complaints."""

from __future__ import annotations

import itertools
from pathlib import Path

from ncu_csv import HEADING

from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.tools import TRAFFIC_METRICS, counting_command, ncu_error


def test_the_command_counts_measured_launches_and_leaves_the_clocks_alone() -> None:
    command = counting_command(Path("/opt/ncu"), ["python3", "-m", "pytest", "tests"], Path("/tmp/ncu.log"))
    options = dict(itertools.pairwise(command))
    assert command[0] == "/opt/ncu"
    assert command[-4:] == ["python3", "-m", "pytest", "tests"]
    assert options["--clock-control"] == "none"
    assert options["--cache-control"] == "all"
    assert options["--target-processes"] == "all"
    assert options["--nvtx-include"] == "regex:gpumem@.+.measure/"
    assert options["--log-file"] == "/tmp/ncu.log"
    assert options["--page"] == "raw"
    assert options["--print-units"] == "base"
    assert {"--nvtx", "--csv"} < set(command)
    counted = options["--metrics"].split(",")
    assert {"dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"} < set(counted)
    assert [metric for metric in counted if metric not in HEADING] == []


def test_a_warm_count_leaves_the_caches_alone_and_never_replays_a_kernel() -> None:
    cold = counting_command(Path("/opt/ncu"), ["python3"], Path("/tmp/ncu.log"))
    warm = counting_command(Path("/opt/ncu"), ["python3"], Path("/tmp/ncu.log"), warm=True, more=[ncu.L2_HIT_RATE])
    options = dict(itertools.pairwise(warm))
    assert options["--cache-control"] == "none"
    assert options["--replay-mode"] == "application"
    assert options["--metrics"].split(",") == [*TRAFFIC_METRICS, ncu.L2_HIT_RATE]
    assert "--replay-mode" not in cold


def test_no_permission_has_its_remedy() -> None:
    said = ncu_error(
        "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        "Performance Counters on the target device 0.\n"
    )
    assert said is not None
    for part in ("ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN"):
        assert part in said
    assert "\n" not in said


def test_other_errors_are_quoted_but_not_that_tests_failed() -> None:
    assert ncu_error("==PROF== fine\n==ERROR== Failed to find metric dram__x\n==ERROR== more") == "ncu: Failed to find metric dram__x"
    assert ncu_error("==ERROR== The application returned an error code (1).\n") is None
    assert ncu_error("==PROF== Disconnected\nE   ERROR in test\n") is None
