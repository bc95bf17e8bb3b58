"""Counters of Nsight Compute as profiles, from its CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import ncu_csv
import pytest

from pytest_gpumem.nsight import ncu, tools
from pytest_gpumem.nsight.ncu import lines_of, read_csv, unit
from pytest_gpumem.nsight.recording import BadReport

H200_PAGE = Path(__file__).resolve().parents[2] / "data" / "nsight" / "test_kernels.csv"

BASE = {
    tools.DURATION: ("367264", "ns"),
    tools.DRAM_READ: ("1073762048", "byte"),
    tools.DRAM_WRITE: ("519266304", "byte"),
    tools.L2_READ: ("33554432", "sector"),
    tools.L2_WRITE: ("16777216", "sector"),
    ncu.L2_HIT_RATE: ("33.5", "%"),
    ncu.L2_READ_HIT: ("10", "sector"),
    ncu.L2_READ_MISS: ("30", "sector"),
    ncu.SECTORS_PER_LOAD: ("16", "sector/request"),
    ncu.SECTORS_PER_STORE: ("4", ""),
    ncu.OCCUPANCY: ("91.25", "%"),
    ncu.SM_CLOCKS[0]: ("1980000000", "hz"),
    ncu.MEMORY_CLOCK: ("3.2", "cycle/nsecond"),
    ncu.REGISTERS: ("32", "register/thread"),
    ncu.SHARED[0]: ("1.024", "Kbyte/block"),
    ncu.SHARED[1]: ("0", "byte/block"),
    ncu.SET_ASIDE: ("11.7965", "Mbyte"),
}
FIXED = (
    "ID",
    "Process ID",
    "Kernel Name",
    "Block Size",
    "Grid Size",
    "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg",
)


def page(*launches: dict[str, Any], metrics: dict[str, tuple[str, str]] = BASE) -> str:
    """The raw page of launches, each with what differs from `metrics` and its `ranges`."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*FIXED, *metrics])
    writer.writerow([*[""] * len(FIXED), *(its_unit for _, its_unit in metrics.values())])
    for number, launch in enumerate(launches):
        figures = [launch.get(name, value) for name, (value, _) in metrics.items()]
        name, size = launch.get("name", ncu_csv.TRIAD), launch.get("grid", "(1056, 1, 1)")
        writer.writerow(
            [
                number,
                launch.get("process", "4242"),
                name,
                "(256, 1, 1)",
                size,
                launch["ranges"],
                *figures,
            ]
        )
    return f"==PROF== Connected to process 4242\n{out.getvalue()}==PROF== Disconnected\n"


def test_a_page_becomes_a_profile_for_each_measurement() -> None:
    found = read_csv(
        page(
            {"ranges": ncu_csv.measured("test_triad")},
            {
                "ranges": ncu_csv.measured("test_triad"),
                tools.DRAM_READ: "1073762050",
                tools.DURATION: "367266",
            },
            {"ranges": ncu_csv.measured("test_triad", "test_triad.label.small"), "process": "77"},
            {"ranges": ncu_csv.stack("test_triad", "test_triad.flush"), "name": "flush"},
            {"ranges": "", "name": "elsewhere"},
        )
    )
    first, labelled = found
    assert (first.name, first.label, first.process, first.launches, first.tool) == (
        "test_triad",
        "",
        4242,
        None,
        "ncu",
    )
    assert (labelled.label, labelled.process) == ("small", 77)
    (kernel,) = first.kernels
    assert (kernel.name, kernel.grid, kernel.block, kernel.launches) == (
        ncu_csv.TRIAD,
        (1056, 1, 1),
        (256, 1, 1),
        2,
    )
    assert kernel.nanoseconds == 367264 + 367266
    assert (kernel.dram_read, kernel.dram_written) == (1073762048 + 1073762050, 2 * 519266304)
    assert (kernel.l2_read, kernel.l2_written) == (2 * 33554432 * 32, 2 * 16777216 * 32)
    assert (kernel.l2_hit_rate, kernel.l2_read_hit_rate, kernel.occupancy) == pytest.approx(
        (0.335, 0.25, 0.9125)
    )
    assert (kernel.sectors_per_request, kernel.sectors_per_store) == (16, 4)
    assert (kernel.registers, kernel.shared) == (32, 1024)
    assert (first.sm_clock_hz, first.memory_clock_hz) == pytest.approx((1.98e9, 3.2e9))
    assert first.set_aside == 11796500
    assert [kernel.name for one in found for kernel in one.kernels] == [
        ncu_csv.TRIAD
    ] * 2  # neither the flush nor other work
    assert first.launches is None  # the page does not say how many there were


def test_a_log_of_counts_is_read() -> None:
    foreign = ncu_csv.stack(
        "<default domain>:gpumem",
        "torch:test_a.measure",
        "not_gpumem:test_b.measure",
        "test_c",
        "test_c.measure",
    )
    lines = [
        (ncu_csv.measured("test_triad"), ncu_csv.H200),
        (foreign, ("1,024", "0", "1,280", "n/a", "")),
    ]
    found = read_csv(ncu_csv.log(*(ncu_csv.line(i, "triad", *one) for i, one in enumerate(lines))))
    assert [one.name for one in found] == ["test_triad", "test_c"]  # other domains have no tests
    first, second = (one.kernels[0] for one in found)
    assert (first.dram_read, first.dram_written, first.nanoseconds) == (
        1073762048,
        519266304,
        367264,
    )
    assert (first.l2_read, first.l2_written) == (2**30, 2**29)  # sectors of 32 bytes
    assert (second.dram_read, second.nanoseconds, second.l2_read, second.l2_written) == (
        1024,
        1280,
        None,
        None,
    )


def test_rates_of_one_kernel_are_weighted_by_what_was_asked() -> None:
    found = read_csv(
        page(
            {
                "ranges": ncu_csv.measured("test_a"),
                tools.L2_READ: "300",
                tools.L2_WRITE: "0",
                ncu.L2_HIT_RATE: "10",
            },
            {
                "ranges": ncu_csv.measured("test_a"),
                tools.L2_READ: "100",
                tools.L2_WRITE: "0",
                ncu.L2_HIT_RATE: "50",
            },
        )
    )
    assert found[0].kernels[0].l2_hit_rate == pytest.approx(0.2)


def test_what_was_not_counted_is_not_known() -> None:
    found = read_csv(page({"ranges": ncu_csv.measured("test_a"), tools.DRAM_READ: "n/a"}))
    assert all(kernel.dram_read is None for kernel in found[0].kernels)
    few = {tools.DURATION: ("1", "us")}
    kernel = read_csv(page({"ranges": ncu_csv.measured("test_a")}, metrics=few))[0].kernels[0]
    assert (kernel.nanoseconds, kernel.dram_read, kernel.occupancy, kernel.registers) == (
        1000,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("written", "factor"),
    [
        ("", 1), ("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9), ("ns", 1e-9), ("nsecond", 1e-9), ("us", 1e-6),
        ("usecond", 1e-6), ("ms", 1e-3), ("msecond", 1e-3), ("s", 1), ("second", 1), ("hz", 1), ("Khz", 1e3), ("Mhz", 1e6), ("Ghz", 1e9),
        ("cycle/second", 1), ("cycle/nsecond", 1e9), ("cycle/usecond", 1e6), ("%", 0.01), ("Msector", 1e6), ("Kbyte/block", 1e3),
        ("block", 1), ("warp", 1), ("inst", 1), ("Kinst", 1e3), ("thread", 1), ("request", 1), ("register/thread", 1), ("inst/warp", 1),
        ("sector/request", 1), ("SM", 1),
    ],
)  # fmt: skip
def test_units(written: str, factor: float) -> None:
    assert unit(written, "metric") == pytest.approx(factor)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no raw page of ncu as CSV"),
        (page(metrics=BASE), r"0 kernels outside every NVTX range of the domain gpumem"),
        (page({"ranges": "other:x:none"}), "1 kernel outside every NVTX range"),
        (
            page({"ranges": ncu_csv.measured("a")}, metrics={tools.DRAM_READ: ("1", "byte")}),
            "has no gpu__time_duration.sum",
        ),
        (
            page(
                {"ranges": ncu_csv.measured("a")},
                metrics={**BASE, tools.DURATION: ("1", "fortnight")},
            ),
            "'fortnight', which is no unit",
        ),
        (
            page({"ranges": ncu_csv.measured("a"), tools.DRAM_READ: "much"}),
            "'much', which is no number",
        ),
        (page({"ranges": ncu_csv.measured("a"), "grid": "wide"}), "a grid or block as 'wide'"),
        (
            page({"ranges": ncu_csv.measured("a")}).replace('"(256, 1, 1)",', ""),
            "a line of 22 columns below 23 headings",
        ),
    ],
)
def test_what_is_no_page_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadReport, match=said):
        read_csv(text)


def test_a_page_of_a_gpu_tells_what_ncu_says() -> None:
    (one,) = read_csv(H200_PAGE.read_text())
    (kernel,) = one.kernels
    assert (kernel.grid, kernel.block, kernel.launches, kernel.registers) == (
        (4096, 1, 1),
        (1024, 1, 1),
        5,
        24,
    )
    (said,) = json.loads(H200_PAGE.with_suffix(".csv.expected.json").read_text())["kernels"]
    assert (kernel.dram_read, kernel.l2_read, kernel.sectors_per_request) == (
        said["dram_read"],
        5 * 4194304 * 32,
        16,
    )
    assert (one.set_aside, kernel.shared) == (11796480, 0)
    assert kernel.occupancy == pytest.approx(said["occupancy"], abs=1e-4)
    lines = lines_of(H200_PAGE.read_text(), ("Kernel Name",)) or []
    assert lines[0].units["launch__block_dim_x"] == "block"
