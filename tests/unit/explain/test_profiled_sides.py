"""One side's counters and copies from stand-ins for Nsight Compute and Nsight Systems: commands, profiles by row key, and what keeps them
away."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from causes_evidence import measurement, side, why
from known_devices import H100
from measurements import passing
from msgspec.structs import replace
from ncu_csv import HEADING, UNITS, line, log, measured
from nsys_sqlite import Export

from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.processes import SideRun, count, trace, trace_needed
from pytest_gpumem.nsight.ncu import ACCESS_METRICS, PROFILE_METRICS
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.schema import document
from pytest_gpumem.records.uses import Activity, CopyUse
from pytest_gpumem.runs.worktree import Side

SAMPLES, NBYTES = 5, 1 << 20
FIGURES = ("2097152", "1048576", "1000", "65536", "32768", "97.5", "100", "50", "65536", "65536")
HEAD = (*HEADING, "lts__t_sector_hit_rate.pct", *ACCESS_METRICS)
TABLE = log(
    *(line(i, "triad", measured("test_triad"), FIGURES) for i in range(SAMPLES)),
    heading=HEAD,
    units=(*UNITS, "%", "%", "%", "sector", "sector"),
)
STAND_IN = """
import json, os, shutil, sys
arguments = sys.argv[1:]
with open("told", "a") as file:
    file.write(json.dumps([arguments, os.getcwd()]) + "\\n")

def results():
    shutil.copy("results", next(one for one in arguments if one.startswith("--benchmark-json=")).partition("=")[2])

"""
NCU = """
if {refuses!r} and any({refuses!r} in one for one in arguments):
    table = "==ERROR== Failed to find metric " + {refuses!r} + "\\n"
else:
    table = open("table").read()
    results()
open(arguments[arguments.index("--log-file") + 1], "w").write(table)
"""
NSYS = """
if arguments[0] == "export":
    shutil.copy("export.sqlite", arguments[arguments.index("--output") + 1])
else:
    results()
    if {writes!r}:
        open(next(one for one in arguments if one.startswith("--output=")).partition("=")[2], "w").close()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(tool: str, does: str, *arguments: str, test: str) -> SideRun:
    """One side whose tool is a stand-in, and whose session measured a test five times."""
    row = passing(
        f"t.py::{test}",
        range_name=test,
        target="triad",
        sampler="plain",
        placements=((1e-3,) * SAMPLES,),
        profiled=True,
    )
    Path("results").write_text(json.dumps({"gpumem": document(H100, [row], {})}))
    Path("tool.py").write_text(STAND_IN + does)
    Path(tool).write_text(f'#!/bin/sh\nexec {sys.executable} {Path("tool.py").absolute()} "$@"\n')
    Path(tool).chmod(0o755)
    tree = Side("working tree", "", Path.cwd(), Path.cwd(), sys.executable, str)
    variable = f"GPUMEM_{tool.upper()}"
    return SideRun(
        tree,
        tree,
        arguments[:1],
        arguments[1:],
        {**os.environ, variable: str(Path(tool).absolute())},
    )


def told() -> list[list[str]]:
    """The arguments of each call of the tool, all of them in the folder of the side."""
    calls = [json.loads(text) for text in Path("told").read_text().splitlines()]
    assert {folder for _, folder in calls} == {os.getcwd()}
    return [arguments for arguments, _ in calls]


def counting(*arguments: str, table: str = TABLE, refuses: str = "") -> SideRun:
    Path("table").write_text(table)
    return run("ncu", NCU.format(refuses=refuses), *arguments, test="test_triad")


def test_counters_come_by_row_key() -> None:
    found = count(counting("-q", "t.py::test_triad"), print)
    assert list(found) == ["t.py::test_triad"]
    one = found["t.py::test_triad"]
    (kernel,) = one.kernels
    assert (one.launches, kernel.launches, kernel.dram_read) == (5, 5, 5 * 2097152)
    assert (kernel.l2_hit_rate, kernel.used_of_load, kernel.used_of_store) == (0.975, 1.0, 0.5)
    assert (kernel.l1_load, kernel.l1_store) == (5 * 65536 * 32, 5 * 65536 * 32)
    (arguments,) = told()
    asked = arguments[arguments.index("--metrics") + 1].split(",")
    assert sorted(asked) == sorted({*PROFILE_METRICS, *ACCESS_METRICS, *asked})
    assert arguments.count("--gpumem") == 1
    assert "t.py::test_triad" in arguments


@pytest.mark.parametrize(("hot", "caches"), [(False, "all"), (True, "none")])
def test_caches_are_left_alone_where_all_is_measured_hot(hot: bool, caches: str) -> None:
    count(counting(), print, hot=hot)
    (arguments,) = told()
    assert arguments[arguments.index("--cache-control") + 1] == caches
    assert "--replay-mode" not in arguments


def test_metrics_that_this_gpu_lacks_are_left_out() -> None:
    assert list(count(counting(refuses=ACCESS_METRICS[0]), print)) == ["t.py::test_triad"]
    assert len(told()) == 2


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n",
            "may not read the GPU's counters",
        ),
        (TABLE.replace("test_triad", "test_other"), "ncu matched no kernel"),
        ("==WARNING== No kernels were profiled.\n", "ncu matched no kernel"),
    ],
)
def test_what_keeps_counters_away_is_one_line(table: str, why: str) -> None:
    with pytest.raises(NoAnswer) as refused:
        count(counting(table=table), print)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_ncu_the_remedy_is_told() -> None:
    one = counting()
    Path("ncu").unlink()
    with pytest.raises(NoAnswer, match="GPUMEM_NCU"):
        count(one, print)


def tracing(*, writes: bool = True) -> SideRun:
    export = Export(Path("export.sqlite"))
    export.domain()
    export.category()
    at = 1000
    for _ in range(SAMPLES):
        export.range(at, at + 50, "test_up.measure")
        export.copy(
            at + 60,
            at + 160,
            NBYTES,
            1,
            export.call(at + 10, at + 20, "cudaMemcpyAsync"),
            srcKind=0,
            dstKind=2,
        )
        at += 200
    export.range(900, at, "test_up")
    export.mark(905, "t.py::test_up")
    export.close()
    return run("nsys", NSYS.format(writes=writes), test="test_up")


def test_a_trace_has_copies_by_row_key_and_is_evidence_where_nothing_was_watched() -> None:
    found = trace(tracing(), print)
    assert list(found) == ["t.py::test_up"]
    one = found["t.py::test_up"]
    assert one.launches == SAMPLES
    assert one.copies == (
        CopyUse("H2D", "pageable", "device", SAMPLES, SAMPLES * NBYTES, SAMPLES * 100),
    )
    fast = CopyUse("H2D", "pinned", "device", SAMPLES, SAMPLES * NBYTES, SAMPLES * 20)
    blind = Activity(not_counted="another tool holds CUPTI")
    base, head = (
        SideFigures(
            side(latency, None, activity=blind, migrations=None).measurement, H100, None, traced
        )
        for latency, traced in ((20e-6, replace(one, copies=(fast,))), (100e-6, one))
    )
    assert why(base, head).first == "pageable"


def test_a_report_that_was_not_written_is_told_in_one_line() -> None:
    with pytest.raises(NoAnswer, match=r"^nsys wrote no report$"):
        trace(tracing(writes=False), print)


def test_a_trace_is_needed_where_cupti_did_not_tell() -> None:
    assert not trace_needed([measurement()])
    assert trace_needed([measurement(), measurement(activity=Activity(not_counted="no CUPTI"))])
    assert trace_needed([measurement(activity=None)])
