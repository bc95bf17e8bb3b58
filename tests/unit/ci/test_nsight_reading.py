"""The script that holds what `gpumem read` tells against nsys, CUPTI and ncu; and the fixtures that it wrote on a GPU."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import nsight_reading
import pytest
from msgspec.structs import replace
from nsight_reading import cut, differences, holds, stats_of, summary, table
from nsys_sqlite import OTHER_PID, PID, Export

from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.nsight.recording import Recording
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import KernelUse

FIXTURES = Path(__file__).resolve().parents[2] / "data" / "nsight"

# As nsys stats prints them with --format csv --output -: what it does between the tables, and a kernel's name with commas.
SAID = """Processing [run.sqlite] with [/opt/nsys/reports/nvtx_kern_sum.py]...

NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name
gpumem:test_a,PushPop,4242,4242,1,2,80,40.0,40.0,40,40,0.0,flush
gpumem:test_a,PushPop,4242,4242,1,2,200,100.0,100.0,100,100,0.0,"void triad<float, 2>(T1 *, const T1 *)"
gpumem:test_a.measure,PushPop,4242,4242,2,2,200,100.0,100.0,100,100,0.0,"void triad<float, 2>(T1 *, const T1 *)"

Processing [run.sqlite] with [/opt/nsys/reports/cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
80.0,200,2,100.0,100.0,100,100,0.0,"void triad<float, 2>(T1 *, const T1 *)"
10.0,80,2,40.0,40.0,40,40,0.0,flush

Processing [run.sqlite] with [/opt/nsys/reports/um_total_sum.py]...

Total HtoD Migration Size (MB),Total DtoH Migration Size (MB),Total CPU Page Faults,Total GPU PageFaults,Minimum Virtual Address,Maximum
0.131,0.066,1,5,0x1000,0x9000

Processing [run.sqlite] with [/opt/nsys/reports/um_sum.py]...

Virtual Address,HtoD Migration Size (MB),DtoH Migration Size (MB),CPU Page Faults,GPU Page Faults,Migration Throughput (MB/s)
0x1000,0.131,,,5,100.0
0x9000,,0.066,1,,100.0
"""
TRIAD = "void triad<float, 2>(T1 *, const T1 *)"


def one_test(export: Export, name: str, begin: int, pid: int = PID) -> int:
    """A test of two samples."""
    at = begin + 10
    for _ in range(2):
        export.kernel(at + 10, at + 50, "flush", export.call(at + 1, at + 2, pid=pid), pid=pid)
        export.range(at + 60, at + 80, f"{name}.measure", pid=pid)
        export.kernel(at + 100, at + 200, TRIAD, export.call(at + 65, at + 70, pid=pid), pid=pid)
        export.call(at + 90, at + 250, "cudaStreamSynchronize", pid=pid)
        at += 300
    export.range(begin, at, name, pid=pid)
    export.mark(begin + 1, f"tests/test_it.py::{name}", pid=pid)
    return at


def exported(path: Path, *, others: bool = False) -> Path:
    """A run of one test with pages that move; with `others`, of another test and another process too."""
    export = Export(path)
    export.domain()
    export.category()
    end = one_test(export, "test_a", 1000)
    export.migration(1111, 1150, 131072, 11, 2, 0x1000)
    export.gpu_fault(1111, 5, 0x1000)
    export.migration(1565, 1569, 65536, 12, 2, 0x9000)  # after the second launch was waited for
    export.cpu_fault(1565, 0x9000)
    if others:
        one_test(export, "test_of_somebody", end + 100)
        export.domain(pid=OTHER_PID)
        one_test(export, "test_a", 1000, OTHER_PID)
    return export.close()


def read(path: Path) -> Recording:
    with Tables(path) as tables:
        return read_sqlite(tables)


def test_equal_figures_do_not_differ(tmp_path: Path) -> None:
    found = read(exported(tmp_path / "run.sqlite"))
    assert differences(found, stats_of(SAID)) == [{"compared": 3 + 2 + 4 + 2}]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("2,2,200,100.0", "2,2,201,100.0", f"test_a.measure: {TRIAD}"),
        ("1,2,80,40.0", "1,3,80,40.0", "test_a: flush"),
        ("10.0,80,2,", "10.0,81,2,", "all: flush"),
        ("0.131,0.066,1,5", "0.132,0.066,1,5", "pages: to_device"),
        ("0.131,0.066,1,5", "0.131,0.066,1,6", "pages: gpu_faults"),
        ("0x9000,,0.066,1,,", "0x9000,,0.066,2,,", "pages by address: cpu_faults"),
        ("gpumem:test_a.measure,PushPop,4242", "gpumem:test_a.measure,PushPop,4243", f"test_a.measure: {TRIAD}"),
    ],
)
def test_a_figure_that_differs_is_named(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in SAID
    _, one, *_ = differences(read(exported(tmp_path / "run.sqlite")), stats_of(SAID.replace(old, new)))
    assert one["what"] == what


def test_one_test_is_cut_out_with_nothing_of_the_others(tmp_path: Path) -> None:
    whole, part = exported(tmp_path / "whole.sqlite", others=True), tmp_path / "part.sqlite"
    cut(whole, part, "test_of_somebody")
    (kept,) = read(part).profiles
    (same,) = (one for one in read(whole).profiles if one.name == "test_of_somebody")
    assert (kept.kernels, kept.rest.kernels, kept.nodeid, kept.launches) == (same.kernels, same.rest.kernels, same.nodeid, 2)
    assert b"test_a" not in part.read_bytes()
    cut(whole, tmp_path / "pages.sqlite", "test_a")
    (mine,) = read(tmp_path / "pages.sqlite").profiles
    assert mine.process == PID
    assert mine.migrations is not None
    assert (mine.migrations.to_device, mine.migrations.gpu_faults) == (131072, 5)
    with pytest.raises(ValueError, match="has no range of test_nowhere"):
        cut(whole, tmp_path / "none.sqlite", "test_nowhere")


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nsys: its report is of nothing, its export the one made by hand, its statistics those above."""
    (tmp_path / "said").write_text(SAID)
    exported(tmp_path / "made.sqlite")
    script = f"""case "$1" in
  --version) echo "NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0" ;;
  profile) for one in "$@"; do case "$one" in --output=*) touch "${{one#--output=}}" ;; esac; done ;;
  export) cp {tmp_path / "made.sqlite"} "$6" ;;
  stats) cat {tmp_path / "said"} ;;
esac"""
    monkeypatch.setenv("GPUMEM_NSYS", str(program(tmp_path / "nsys", script)))
    monkeypatch.setattr(nsight_reading, "KEPT", ("test_a",))
    return tmp_path


def test_the_whole_run_with_a_stand_in(nsys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "sim", "--no-cupti", "--no-ncu", "--json", str(nsys / "record.json"), "--keep", str(nsys / "kept")]
    assert nsight_reading.main(arguments) == 0
    record = json.loads((nsys / "record.json").read_text())
    assert (record["kind"], record["compared"], record["differences"], record["missing"]) == ("nsight_reading", 11, [], [])
    assert record["totals"]["kernels"] == 4
    printed = capsys.readouterr().out
    assert "11 figures compared with nsys stats, 0 differ" in printed
    assert "131072 bytes to the device, 65536 to the host, 5 GPU and 1 CPU page faults" in printed
    assert sorted(one.name for one in (nsys / "kept").iterdir()) == ["test_a.expected.json", "test_a.sqlite"]
    assert checked(nsys / "kept") == 1
    (nsys / "said").write_text(SAID.replace("80.0,200,2,", "80.0,207,2,"))
    assert nsight_reading.main([*arguments[:4], "--json", str(nsys / "record.json")]) == 1
    assert f"all: {TRIAD}: read (2, 200), nsys (2, 207)" in capsys.readouterr().out


def test_a_record_of_all_parts_is_drawn() -> None:
    launch = {"to_device": {"read": 1.0, "cupti": 1}, "to_host": {"read": 0.0, "cupti": 0}, "gpu_faults": {"read": 1.5, "cupti": 2}}
    kernel = {
        "name": "test_kernels", "launches": 5, "nanoseconds": 5, "dram_read": 5e6, "dram_written": 5e6, "l2_hit_rate": 0.5,
        "occupancy": 0.9, "sectors_per_request": 4.0, "sm_clock_hz": 1.98e9,
    }  # fmt: skip
    record: dict[str, Any] = {
        "device": {"name": "GPU", "driver": "1"}, "ended": "2026-11-21T00:00:00", "nsys": "2025.3", "profiles": 1,
        "totals": {"kernels": 1, "nanoseconds": 5, "pages": {"to_device": 1, "to_host": 0, "gpu_faults": 2, "cpu_faults": 0}},
        "compared": 3, "differences": [], "kept": None, "pages_by": "um_total_sum",
        "cupti": {"compared": [{"test": "a.py::test_pages[faulting]", **launch, "holds": True}], "error": None},
        "ncu": {"version": "2025.3", "module": True, "profile": kernel, "declared": {"read": 1000, "written": 5}, "holds": True},
    }  # fmt: skip
    assert holds(record)
    said = table(record)
    assert "test_pages[faulting], CUPTI" in said
    assert "DRAM 1.00 MB read" in said
    assert "L2 hit rate 50.0 %, occupancy 90.0 %, 4 sectors per load, SM clock 1980 MHz" in said
    for part, broken in (
        ("compared", 0),
        ("differences", [{"what": "x", "read": 1, "nsys": 2}]),
        ("cupti", {"compared": [], "error": "no results"}),
        ("ncu", {"error": "ncu was not found"}),
        ("kept", [{"file": None, "test": "test_a", "error": "too large"}]),
    ):
        assert not holds({**record, part: broken})
        table({**record, part: broken})


# Fixtures of a GPU


def checked(folder: Path) -> int:
    """Read every fixture of a folder and compare it with what the tools said; gives how many there were."""
    count = 0
    for file in sorted(folder.glob("*.sqlite")):
        expected = json.loads(file.with_name(f"{file.stem}.expected.json").read_text())
        found = read(file)
        compared, *differ = differences(found, expected["stats"])
        assert compared["compared"] > 0, file
        assert not differ, file
        assert json.loads(json.dumps([summary(one) for one in found.profiles])) == expected["profiles"], file
        count += 1
    for file in sorted(folder.glob("*.csv")):
        expected = json.loads(file.with_name(f"{file.name}.expected.json").read_text())
        found = ncu.read_csv(file.read_text())
        for one, its in zip(found.profiles, expected["kernels"], strict=True):
            assert nsight_reading._close(nsight_reading._kernel(one), its), file
        count += 1
    return count


def test_fixtures_of_a_gpu_are_read_as_the_tools_read_them() -> None:
    assert checked(FIXTURES) == len([one for one in FIXTURES.iterdir() if one.suffix in (".sqlite", ".csv")])


def test_rates_are_weighted_by_bytes_and_else_by_time() -> None:
    large = KernelUse("large", (1, 1, 1), (32, 1, 1), 10, 9000, l2_read=3000, l2_written=1000, l2_hit_rate=0.5)
    other = replace(large, nanoseconds=1000, l2_read=1000, l2_written=0, l2_hit_rate=1.0)
    small = KernelUse("small", (1, 1, 1), (32, 1, 1), 5, 1000)
    figures = nsight_reading._kernel(TestProfile("test_a", None, "", 5, (large, other, small)))
    assert (figures["launches"], figures["nanoseconds"], figures["l2_read"], figures["occupancy"]) == (25, 11000, None, None)
    assert figures["l2_hit_rate"] == pytest.approx((0.5 * 4000 + 1.0 * 1000) / 5000)
    unknown = TestProfile("test_a", None, "", 5, (large, replace(other, l2_read=None)))
    assert nsight_reading._kernel(unknown)["l2_hit_rate"] == pytest.approx((0.5 * 9000 + 1.0 * 1000) / 10000)
