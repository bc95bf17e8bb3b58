"""The command line of ncu, its CSV, and its complaints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ncu_csv import H200, HEADING, TRIAD, UNITS, line, log, measured, stack

from pytest_gpumem.nsight import ncu


def test_the_command_counts_measured_launches_and_leaves_the_clocks_alone() -> None:
    command = ncu.counting_command(Path("/opt/ncu"), ["python3", "-m", "pytest", "tests"], Path("/tmp/ncu.log"))
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
    cold = ncu.counting_command(Path("/opt/ncu"), ["python3"], Path("/tmp/ncu.log"))
    warm = ncu.counting_command(Path("/opt/ncu"), ["python3"], Path("/tmp/ncu.log"), warm=True, more=[ncu.L2_HIT_RATE])
    options = dict(itertools.pairwise(warm))
    assert options["--cache-control"] == "none"
    assert options["--replay-mode"] == "application"
    assert options["--metrics"].split(",") == [*ncu.METRICS, ncu.L2_HIT_RATE]
    assert "--replay-mode" not in cold


def test_further_metrics_are_read_as_sectors_and_shares() -> None:
    more = (ncu.L2_HIT_RATE, ncu.L2_READ_HIT, ncu.L2_READ_MISS)
    text = log(
        line(0, TRIAD, "", (*H200, "62.5", "1,000")),  # type: ignore[arg-type]
        line(1, TRIAD, "", (*H200, "n/a", "7")),  # type: ignore[arg-type]
        heading=(*HEADING, *more[:2]),
        units=(*UNITS, "%", "sector"),
    )
    first, second = ncu.parse(text, more)
    assert first.more == {ncu.L2_HIT_RATE: pytest.approx(0.625), ncu.L2_READ_HIT: 1000, ncu.L2_READ_MISS: None}
    assert second.more[ncu.L2_HIT_RATE] is None
    assert ncu.parse(text)[0].more == {}


def test_a_log_is_read() -> None:
    first, second = ncu.parse(log(line(0, TRIAD, measured("test_triad"), H200), line(1, "fill", "", ("1,024", "0", "1,280", "n/a", ""))))
    assert first.name == TRIAD
    assert first.ranges == ("test_triad", "test_triad.measure", "test_triad.launch")
    assert (first.reads, first.writes) == (1073762048, 519266304)
    assert first.seconds == pytest.approx(367.264e-6)
    assert (first.l2_reads, first.l2_writes) == (2**30, 2**29)  # sectors of 32 bytes
    assert (second.reads, second.seconds, second.l2_reads, second.l2_writes) == (1024, pytest.approx(1.28e-6), None, None)
    assert second.ranges == ()


def test_only_ranges_of_our_domain_are_read() -> None:
    foreign = stack("<default domain>:gpumem", "torch:test_a.measure", "not_gpumem:test_b.measure", "test_c", "test_c.measure")
    (kernel,) = ncu.parse(log(line(0, TRIAD, foreign, H200)))
    assert kernel.ranges == ("test_c", "test_c.measure")


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n", "==PROF== Connected to process 1\n"])
def test_a_log_without_a_table_holds_no_kernels(text: str) -> None:
    assert ncu.parse(text) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (log(heading=("ID", "Kernel Name"), units=("", "")), "gpu__time_duration.sum, dram__bytes_read.sum"),
        (log(heading=(*HEADING[:11], "x", *HEADING[12:])), "NVTX push/pop ranges"),
        (log(line(0, TRIAD, "", H200), units=(*UNITS[:13], "furlong", *UNITS[14:])), "'furlong'"),
        (log(line(0, TRIAD, "", ("many", *H200[1:]))), "'many', which is no number"),
        (log(line(0, TRIAD, "", ("n/a", *H200[1:]))), "no DRAM bytes"),
        (log(line(0, TRIAD, "", H200)[:-1]), "17 columns below 18 headings"),
    ],
)
def test_a_table_that_cannot_be_read_is_said_in_one_line(text: str, named: str) -> None:
    with pytest.raises(ncu.BadOutput) as raised:
        ncu.parse(text)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_permission_has_its_remedy() -> None:
    said = ncu.trouble(
        "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        "Performance Counters on the target device 0.\n"
    )
    assert said is not None
    for part in ("ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN"):
        assert part in said
    assert "\n" not in said


def test_other_errors_are_quoted_but_not_that_tests_failed() -> None:
    assert ncu.trouble("==PROF== fine\n==ERROR== Failed to find metric dram__x\n==ERROR== more") == "ncu: Failed to find metric dram__x"
    assert ncu.trouble("==ERROR== The application returned an error code (1).\n") is None
    assert ncu.trouble("==PROF== Disconnected\nE   ERROR in test\n") is None
