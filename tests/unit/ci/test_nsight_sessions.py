"""The checks of the reports of profiled runs, on texts in the form that the tools print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nsight_sessions
import pytest
from ncu_csv import TRIAD, line, log, measured, stack

from pytest_gpumem.nsight.profile import SelectedTest

TESTS = [
    SelectedTest(f"test_a.py::{name}", name, managed=False)
    for name in ("test_triad", "test_paged", "test_skipped")
]
PUSHED = """Processing [whole.sqlite] with [/opt/nsys/reports/nvtx_pushpop_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Range
50.0,100,1,100.0,gpumem:test_triad
20.0,40,1,40.0,gpumem:test_paged
20.0,40,1,40.0,gpumem:test_skipped
5.0,10,5,2.0,gpumem:test_triad.launch
5.0,10,5,2.0,gpumem:test_paged.launch

"""
PROJECTED = """Range,Style,Total Proj Time (ns),Total GPU Ops
gpumem:test_triad,PushPop,90,11
gpumem:test_triad.launch,PushPop,50,5
gpumem:test_paged.launch,PushPop,50,5
"""
KERNELS = f"""NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Kernel Name
gpumem:test_triad,PushPop,1,1,1,11,"1,100",100.0,"{TRIAD}"
gpumem:test_triad.launch,PushPop,1,1,5,5,500,100.0,"{TRIAD}"
gpumem:test_paged.launch,PushPop,1,1,5,5,900,180.0,"void add<float>(T1 *, const T1 *)"
"""
PAGES = """Total HtoD Migration Size (MB),Total DtoH Migration Size (MB),Total CPU Page Faults,Total GPU PageFaults,Minimum Virtual Address
16.777,0.000,48,159,0x7f0
"""
REPORTS = {
    "nvtx_pushpop_sum": PUSHED,
    "nvtx_gpu_proj_sum": PROJECTED,
    "nvtx_kern_sum": KERNELS,
    "um_total_sum": PAGES,
}
MEASURED = {"test_triad": "kernels", "test_paged": "kernels"}


def without(name: str, text: str) -> dict[str, str]:
    kept = [row for row in REPORTS[name].splitlines(keepends=True) if text not in row]
    return {**REPORTS, name: "".join(kept)}


def test_every_test_is_found_under_its_range() -> None:
    said = nsight_sessions.judge_whole(TESTS, MEASURED, REPORTS)
    assert said["wrong"] == []
    assert said["launches"] == {
        "test_triad": {"triad": {"count": 5, "ns": 500}},
        "test_paged": {"add": {"count": 5, "ns": 900}},
    }
    assert said["managed"][0]["Total GPU PageFaults"] == "159"


@pytest.mark.parametrize(
    ("reports", "wrong"),
    [
        (
            without("nvtx_pushpop_sum", "test_skipped"),
            "test_skipped has no range in nvtx_pushpop_sum",
        ),
        (
            without("nvtx_pushpop_sum", "test_paged.launch"),
            "test_paged.launch has no range in nvtx_pushpop_sum",
        ),
        (
            without("nvtx_gpu_proj_sum", "test_paged"),
            "no work is under test_paged.launch in nvtx_gpu_proj_sum",
        ),
        (
            without("nvtx_kern_sum", "test_triad.launch"),
            "no kernel is under test_triad.launch in nvtx_kern_sum",
        ),
    ],
)
def test_a_test_that_is_missing_is_named(reports: dict[str, str], wrong: str) -> None:
    assert nsight_sessions.judge_whole(TESTS, MEASURED, reports)["wrong"] == [wrong]


FIGURES = ("1", "1", "1", "1", "1")
PAGE = log(*(line(index, TRIAD, measured("test_triad"), FIGURES) for index in range(5)))


def test_ncu_is_held_to_what_nsys_saw() -> None:
    seen = {"triad": {"count": 5, "ns": 500}}
    said = nsight_sessions.judge_ncu(seen, "test_triad", PAGE)
    assert (said["kernels"], said["ranges_shown"], said["wrong"]) == ({"triad": 5}, True, [])
    assert nsight_sessions.judge_ncu(None, "test_triad", PAGE)["wrong"] == []
    assert nsight_sessions.judge_ncu({"triad": {"count": 4}}, "test_triad", PAGE)["wrong"] == [
        "ncu profiled {'triad': 5}, nsys saw {'triad': 4}"
    ]
    flushed = log(line(0, "read(float *)", stack("test_triad", "test_triad.flush"), FIGURES))
    assert len(nsight_sessions.judge_ncu(seen, "test_triad", flushed)["wrong"]) == 2
    assert nsight_sessions.judge_ncu(None, "test_triad", "==WARNING== nothing\n")["wrong"] == [
        "ncu profiled no kernel"
    ]


def test_the_looks_ask_the_tools_and_are_drawn(tmp_path: Path) -> None:
    suite = {
        "gpumem": {
            "rows": [
                {"range_name": "test_triad", "measurement": {"moved_bytes": {"link": False}}},
                {"range_name": "x", "measurement": None},
            ]
        }
    }
    asked: list[list[str]] = []

    def run(command: Sequence[str]) -> str:
        asked.append(list(command))
        if "profile" in command:
            Path(command[command.index("-o") + 1]).write_text("report")
            for option in command:
                if option.startswith("--benchmark-json="):
                    Path(option.partition("=")[2]).write_text(json.dumps(suite))
            return ""
        if "stats" in command:
            report = Path(command[-1]).stem
            text = REPORTS[command[command.index("--report") + 1]]
            return "Instances,Range\n1,gpumem:test_triad\n" if report == "one" else text
        if "--nvtx" in command:
            raise nsight_sessions.Failed("unrecognised option --nvtx")
        return PAGE

    looks = nsight_sessions.Looks(
        ["tests/memory"],
        "test_a.py::test_triad",
        tmp_path,
        Path("nsys"),
        Path("ncu"),
        run,
        lambda _: TESTS[:1],
    )
    record: dict[str, Any] = {
        "device": {"name": "NVIDIA H200", "driver": "580"},
        "versions": {"nsys": "2025.3.2", "ncu": "2025.3.0"},
        "ended": "2026-11-21T00:00:00",
        **{look: getattr(looks, look)() for look in nsight_sessions.STEPS},
    }
    assert [record[look]["wrong"] for look in nsight_sessions.STEPS] == [[], [], []]
    assert record["ncu"]["held_to_nsys"]
    assert sum("--force-export=true" in command for command in asked) == 2  # once for each report
    text = nsight_sessions.table(record)
    assert "5 kernels are under their launches" in text
    assert "159 GPU PageFaults" in text
    assert "5 x triad; everything is under its test's range" in text
