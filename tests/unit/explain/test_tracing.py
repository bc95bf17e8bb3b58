"""One side's copies by a stand-in for Nsight Systems, for where CUPTI could not watch."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from causes_evidence import measurement, side, why
from known_devices import H100
from msgspec.structs import replace
from nsys_sqlite import Export

from pytest_gpumem.explain.evidence import Evidence
from pytest_gpumem.explain.processes import SideRun, trace, trace_needed
from pytest_gpumem.nsight.tools import NothingRecorded
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.schema import document
from pytest_gpumem.records.uses import Activity, CopyUse
from pytest_gpumem.runs.worktree import Side

SAMPLES, NBYTES = 2, 1 << 20
STAND_IN = """
import shutil, sys
arguments = sys.argv[1:]
if arguments[0] == "export":
    shutil.copy({export!r}, arguments[arguments.index("--output") + 1])
else:
    report = next(one for one in arguments if one.startswith("--output=")).partition("=")[2]
    results = next(one for one in arguments if one.startswith("--benchmark-json=")).partition("=")[2]
    open(results, "w").write(open({results!r}).read())
    if {writes!r}:
        open(report, "w").close()
"""


def run(tmp_path: Path, *, writes: bool = True) -> SideRun:
    export = Export(tmp_path / "export.sqlite")
    export.domain()
    export.category()
    at = 1000
    for _ in range(SAMPLES):
        export.range(at, at + 50, "test_up.measure")
        export.copy(at + 60, at + 160, NBYTES, 1, export.call(at + 10, at + 20, "cudaMemcpyAsync"), srcKind=0, dstKind=2)
        at += 200
    export.range(900, at, "test_up")
    export.mark(905, "t.py::test_up")
    taken = replace(measurement(1e-3), placements=((1e-3,) * SAMPLES,), sampler="plain", profiled=True)
    row = Row("t.py::test_up", Limits(), Verdict(Outcome.UNDECIDED, "profiled"), taken, range_name="test_up")
    (tmp_path / "results").write_text(json.dumps({"gpumem": document(H100, [row], {})}))
    script = STAND_IN.format(export=str(export.close()), results=str(tmp_path / "results"), writes=writes)
    (tmp_path / "nsys.py").write_text(script)
    nsys = tmp_path / "nsys"
    nsys.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "nsys.py"} "$@"\n')
    nsys.chmod(nsys.stat().st_mode | stat.S_IEXEC)
    tree = Side("working tree", "", tmp_path, tmp_path, sys.executable, str)
    return SideRun(tree, tree, (), (), {**os.environ, "GPUMEM_NSYS": str(nsys)})


def test_copies_come_by_row_key_with_their_kinds_of_memory(tmp_path: Path) -> None:
    found = trace(run(tmp_path), lambda line: None)
    assert list(found) == ["t.py::test_up"]
    one = found["t.py::test_up"]
    assert one.launches == SAMPLES
    assert one.copies == (CopyUse("H2D", "pageable", "device", SAMPLES, SAMPLES * NBYTES, SAMPLES * 100),)


def test_a_trace_is_evidence_where_nothing_was_watched(tmp_path: Path) -> None:
    traced = trace(run(tmp_path), lambda line: None)["t.py::test_up"]
    fast = CopyUse("H2D", "pinned", "device", SAMPLES, SAMPLES * NBYTES, SAMPLES * 20)
    blind = Activity(not_counted="another tool holds CUPTI")
    base, head = (
        Evidence(side(latency, None, activity=blind, migrations=None).measurement, H100, None, one)
        for latency, one in ((20e-6, replace(traced, copies=(fast,))), (100e-6, traced))
    )
    assert why(base, head).first == "pageable"


def test_a_report_that_was_not_written_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(NothingRecorded) as refused:
        trace(run(tmp_path, writes=False), lambda line: None)
    assert str(refused.value) == "nsys wrote no report"


def test_it_is_needed_where_cupti_did_not_tell() -> None:
    assert not trace_needed([measurement()])
    assert trace_needed([measurement(), measurement(activity=Activity(not_counted="no CUPTI"))])
    assert trace_needed([measurement(activity=None)])
