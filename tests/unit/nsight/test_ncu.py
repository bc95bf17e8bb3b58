"""The command line of ncu, its CSV, and its complaints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ncu_csv import H200, HEADING, TRIAD, UNITS, line, log, measured, stack

from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.recording import BadReport
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


def test_further_metrics_are_read_as_sectors_and_shares() -> None:
    more = (ncu.L2_HIT_RATE, ncu.L2_READ_HIT, ncu.L2_READ_MISS)
    text = log(
        line(0, TRIAD, "", (*H200, "62.5", "1,000", "3,000")),  # type: ignore[arg-type]
        line(1, TRIAD, "", (*H200, "n/a", "7", "n/a")),  # type: ignore[arg-type]
        heading=(*HEADING, *more),
        units=(*UNITS, "%", "sector", "sector"),
    )
    first, second = (one.use for one in ncu.kernels_in(text))
    assert (first.l2_hit_rate, first.l2_read_hit_rate) == (pytest.approx(0.625), 0.25)
    assert (second.l2_hit_rate, second.l2_read_hit_rate) == (None, None)


def test_a_log_is_read() -> None:
    first, second = ncu.kernels_in(
        log(line(0, TRIAD, measured("test_triad"), H200), line(1, "fill", "", ("1,024", "0", "1,280", "n/a", "")))
    )
    assert first.use.name == TRIAD
    assert first.ranges == ("test_triad", "test_triad.measure", "test_triad.launch")
    assert (first.use.dram_read, first.use.dram_written) == (1073762048, 519266304)
    assert first.use.nanoseconds == 367264
    assert (first.use.l2_read, first.use.l2_written) == (2**30, 2**29)  # sectors of 32 bytes
    assert (second.use.dram_read, second.use.nanoseconds, second.use.l2_read, second.use.l2_written) == (1024, 1280, None, None)
    assert second.ranges == ()


def test_only_ranges_of_our_domain_are_read() -> None:
    foreign = stack("<default domain>:gpumem", "torch:test_a.measure", "not_gpumem:test_b.measure", "test_c", "test_c.measure")
    (kernel,) = ncu.kernels_in(log(line(0, TRIAD, foreign, H200)))
    assert kernel.ranges == ("test_c", "test_c.measure")


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n", "==PROF== Connected to process 1\n"])
def test_a_log_without_a_table_holds_no_kernels(text: str) -> None:
    assert ncu.kernels_in(text) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (log(heading=("ID", "Kernel Name"), units=("", "")), "gpu__time_duration.sum, dram__bytes_read.sum"),
        (log(heading=(*HEADING[:11], "x", *HEADING[12:])), "NVTX push/pop ranges"),
        (log(line(0, TRIAD, "", ("n/a", *H200[1:]))), "no DRAM bytes"),
    ],
)
def test_a_table_that_cannot_be_read_is_said_in_one_line(text: str, named: str) -> None:
    with pytest.raises(BadReport) as raised:
        ncu.kernels_in(text)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


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
