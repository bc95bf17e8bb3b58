"""Counters of kernels, from ncu's CSV and from that of `nsys stats`."""

from __future__ import annotations

from pathlib import Path

import ncu_csv
import pytest
from cases import naming

from pytest_gpumem.nsight.ncu import (
    COUNTERS,
    TIME,
    ProfiledKernel,
    kernels_of,
    place_of,
    read_launches,
    read_times,
    table,
)
from pytest_gpumem.outcomes import FileError

H200_PAGE = Path(__file__).resolve().parents[2] / "data" / "nsight" / "test_kernels.csv"
READ, TIME_METRIC = "dram__bytes_read.sum", TIME.metrics[0]


def page(*launches: tuple[str, tuple[str, ...]]) -> str:
    """The log of launches, each with its cell of ranges and its figures."""
    lines = []
    for number, (ranges, figures) in enumerate(launches):
        lines.append(ncu_csv.line(number, ncu_csv.TRIAD, ranges, figures))
    return ncu_csv.log(*lines)


def figures(kernel: ProfiledKernel) -> dict[str, str]:
    """The texts of a kernel's counters, by title."""
    texts = {}
    for counter in (TIME, *COUNTERS):
        value = kernel.figure(counter)
        if value is not None:
            texts[counter.title] = counter.text(value)
    return texts


def test_a_page_of_a_gpu_has_the_figures_that_ncu_prints() -> None:
    (kernel,) = kernels_of(read_launches(H200_PAGE.read_text()))
    assert (kernel.place, kernel.launches) == ("test_kernels", 5)
    assert kernel.name.startswith("void triad<float, 1>(")
    assert kernel.metrics[READ] == pytest.approx(671138816 / 5)
    assert figures(kernel) == {
        "time": "45.23 us",
        "DRAM bytes": "175.5 MiB",
        "L2 hit rate": "34 %",
        "sectors/load": "16",
        "sectors/store": "16",
        "registers": "24",
        "occupancy": "71 %",
    }


def test_launches_are_read_inside_measured_ranges_of_our_domain_alone() -> None:
    foreign = ncu_csv.stack(
        "torch:test_a.measure", "not_gpumem:test_b.measure", "test_c", "test_c.measure"
    )
    launches = read_launches(
        page(
            (ncu_csv.measured("test_triad"), ncu_csv.H200),
            (ncu_csv.measured("test_triad", "test_triad.label.small"), ncu_csv.H200),
            (foreign, ("1,024", "0", "1,280", "n/a", "")),
            (ncu_csv.stack("test_triad", "test_triad.flush"), ncu_csv.H200),
            ("", ncu_csv.H200),
        )
    )
    assert [(one.test, one.label) for one in launches] == [
        ("test_triad", ""),
        ("test_triad", "small"),
        ("test_c", ""),
    ]
    assert launches[2].metrics == {TIME_METRIC: 1280, READ: 1024, "dram__bytes_write.sum": 0}


def test_a_figure_of_a_kernel_is_the_mean_of_its_launches_and_missing_where_one_lacks_it() -> None:
    range_cell = ncu_csv.measured("test_a")
    text = page(
        (range_cell, ("100", "50", "10", "0", "0")), (range_cell, ("300", "n/a", "30", "0", "0"))
    )
    (kernel,) = kernels_of(read_launches(text))
    assert kernel.launches == 2
    assert kernel.metrics == {TIME_METRIC: 20, READ: 200}
    assert figures(kernel) == {
        "time": "20.00 ns"
    }  # DRAM bytes are a sum, of which one part is missing


def test_a_table_has_measurements_kernels_and_figures() -> None:
    kernels = [
        ProfiledKernel(
            "test_a",
            "",
            "first",
            5,
            {TIME_METRIC: 1000.0, READ: 1024.0, "dram__bytes_write.sum": 0.0},
        ),
        ProfiledKernel("test_a", "", "second", 1, {}),
        ProfiledKernel("test_b", "small", "first", 5, {"launch__registers_per_thread": 32.0}),
    ]
    lines = [" ".join(line.split()) for line in table(kernels)]
    assert lines == [
        "time DRAM bytes L2 hit rate sectors/load sectors/store registers local bytes occupancy",
        "test_a",
        "5 × first",
        "1.000 us 1 KiB - - - - - -",
        "1 × second",
        "- - - - - - - -",
        "test_b small",
        "5 × first",
        "- - - - - 32 - -",
    ]
    assert {len(line) for line in table(kernels) if line.startswith("    ")} == {
        len(table(kernels)[0])
    }


def test_what_is_no_page_is_refused() -> None:
    for text, message in [
        ("", "has no column ID: no `ncu --csv --page raw`"),
        (
            page((ncu_csv.measured("a"), ncu_csv.H200)).replace('"Kernel Name"', '"Other"'),
            "no column Kernel Name",
        ),
        (
            page((ncu_csv.measured("a"), ncu_csv.H200)).replace('"(256, 1, 1)",', ""),
            "no row of 18 columns",
        ),
        (
            page((ncu_csv.measured("a"), ncu_csv.H200)).replace('"ns"', '"fortnight"'),
            "'fortnight', which is no base unit",
        ),
        (
            page((ncu_csv.measured("a"), ("much", "0", "1", "0", "0"))),
            "as 'much', which is no number",
        ),
    ]:
        with naming(text), pytest.raises(FileError, match=message):
            read_launches(text)


def test_a_stack_of_ranges_is_a_place() -> None:
    for ranges, place in [
        ((), None),
        (("test_a",), None),
        (("test_a", "test_a.setup"), None),
        (("test_a", "test_a.measure", "test_a.launch"), ("test_a", "")),
        (("test_a", "test_a.label.x-1", "test_a.measure"), ("test_a", "x-1")),
        # pytest run by a test, itself measured
        (("outer", "outer.measure", "inner", "inner.label.y", "inner.measure"), ("inner", "y")),
    ]:
        assert place_of(ranges) == place, ranges


def test_times_of_nsys_are_read_by_measured_range() -> None:
    heading = "NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name"
    text = f"""Processing [run.sqlite] with [nvtx_kern_sum.py]...

 ** NVTX Range Kernel Summary (nvtx_kern_sum):

{heading}
gpumem:test_a,PushPop,1,1,1,9,900,100.0,100,90,110,1.0,flush
gpumem:test_a.measure,PushPop,1,1,5,10,1000,100.5,100,90,110,1.0,"void triad<float, 1>(T1 *, T1)"
gpumem:test_a.measure,PushPop,1,1,5,broken,1000,100.5,100,90,110,1.0,other
other:test_b.measure,PushPop,1,1,5,5,500,100,100,90,110,1.0,triad
"""
    (kernel,) = kernels_of(read_times(text))
    assert kernel == ProfiledKernel(
        "test_a", "", "void triad<float, 1>(T1 *, T1)", 10, {TIME_METRIC: 100.5}
    )
    assert read_times("") == []
