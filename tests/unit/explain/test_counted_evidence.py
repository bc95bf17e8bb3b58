"""One side's counters from a stand-in for Nsight Compute: the command, the profiles by row key, and what keeps them away."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from known_devices import H100
from measurements import measurement
from ncu_csv import HEADING, UNITS, line, log, measured

from pytest_gpumem.explain.processes import SideRun, count
from pytest_gpumem.nsight.ncu import ACCESS_METRICS, PROFILE_METRICS
from pytest_gpumem.nsight.tools import NothingRecorded
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.schema import document
from pytest_gpumem.runs.worktree import Side

FIGURES = ("2097152", "1048576", "1000", "65536", "32768", "97.5", "100", "50", "65536", "65536")
HEAD = (*HEADING, "lts__t_sector_hit_rate.pct", *ACCESS_METRICS)
TABLE = log(
    *(line(i, "triad", measured("test_triad"), FIGURES) for i in range(5)),  # type: ignore[arg-type]
    heading=HEAD,
    units=(*UNITS, "%", "%", "%", "sector", "sector"),
)
CHILD = """
import json, sys
arguments = sys.argv[1:]
with open({told!r}, "a") as file:
    file.write(json.dumps([arguments, __import__("os").getcwd()]) + "\\n")
if {refuses!r} and any({refuses!r} in one for one in arguments):
    table = "==ERROR== Failed to find metric " + {refuses!r} + "\\n"
else:
    table = open({table!r}).read()
    results = next(one for one in arguments if one.startswith("--benchmark-json=")).partition("=")[2]
    open(results, "w").write(open({results!r}).read())
open(arguments[arguments.index("--log-file") + 1], "w").write(table)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Side:
    return Side("working tree", "", tmp_path, tmp_path, sys.executable, str)


def stand_in(tmp_path: Path, results: str, table: str = TABLE, refuses: str = "") -> dict[str, str]:
    """The environment of a run: `ncu` writes the table and the results, and refuses a metric."""
    (tmp_path / "table").write_text(table)
    (tmp_path / "results").write_text(results)
    files = {name: str(tmp_path / name) for name in ("told", "table", "results")}
    (tmp_path / "ncu.py").write_text(CHILD.format(**files, refuses=refuses))
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "ncu.py"} "$@"\n')
    ncu.chmod(ncu.stat().st_mode | stat.S_IEXEC)
    return {**os.environ, "GPUMEM_NCU": str(ncu)}


@pytest.fixture
def results() -> str:
    """What a session wrote that measured test_triad five times."""
    taken = measurement(target="triad", sampler="plain", placements=((1e-3,) * 5,), profiled=True)
    row = Row("t.py::test_triad", Limits(), Verdict(Outcome.UNDECIDED, "profiled"), taken, range_name="test_triad")
    return json.dumps({"gpumem": document(H100, [row], {})})


def test_counters_come_by_row_key(tree: Side, tmp_path: Path, results: str) -> None:
    found = count(SideRun(tree, tree, ("-q",), ("t.py::test_triad",), stand_in(tmp_path, results)), lambda line: None)
    assert list(found) == ["t.py::test_triad"]
    one = found["t.py::test_triad"]
    (kernel,) = one.kernels
    assert (one.launches, kernel.launches, kernel.dram_read) == (5, 5, 5 * 2097152)
    assert (kernel.l2_hit_rate, kernel.used_of_load, kernel.used_of_store) == (0.975, 1.0, 0.5)
    assert (kernel.l1_load, kernel.l1_store) == (5 * 65536 * 32, 5 * 65536 * 32)
    ((arguments, folder),) = [json.loads(text) for text in (tmp_path / "told").read_text().splitlines()]
    assert folder == str(tmp_path)
    asked = arguments[arguments.index("--metrics") + 1].split(",")
    assert sorted(asked) == sorted({*PROFILE_METRICS, *ACCESS_METRICS, *asked})
    assert arguments.count("--gpumem") == 1
    assert "t.py::test_triad" in arguments


@pytest.mark.parametrize(("hot", "caches"), [(False, "all"), (True, "none")])
def test_caches_are_left_alone_where_all_is_measured_hot(tree: Side, tmp_path: Path, results: str, hot: bool, caches: str) -> None:
    count(SideRun(tree, tree, (), (), stand_in(tmp_path, results)), lambda line: None, hot=hot)
    ((arguments, _),) = [json.loads(text) for text in (tmp_path / "told").read_text().splitlines()]
    assert arguments[arguments.index("--cache-control") + 1] == caches
    assert "--replay-mode" not in arguments


def test_metrics_that_this_gpu_lacks_are_left_out(tree: Side, tmp_path: Path, results: str) -> None:
    found = count(SideRun(tree, tree, (), (), stand_in(tmp_path, results, refuses=ACCESS_METRICS[0])), lambda line: None)
    assert list(found) == ["t.py::test_triad"]
    assert len((tmp_path / "told").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "may not read the GPU's counters"),
        (TABLE.replace("test_triad", "test_other"), "none of them in a measured launch of these tests"),
        ("==WARNING== No kernels were profiled.\n", "ncu matched no kernel"),
    ],
)
def test_what_keeps_counters_away_is_one_line(tree: Side, tmp_path: Path, results: str, table: str, why: str) -> None:
    with pytest.raises(NothingRecorded) as refused:
        count(SideRun(tree, tree, (), (), stand_in(tmp_path, results, table)), lambda line: None)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_ncu_the_remedy_is_told(tree: Side, tmp_path: Path) -> None:
    with pytest.raises(NothingRecorded, match="GPUMEM_NCU"):
        count(SideRun(tree, tree, (), (), {**os.environ, "GPUMEM_NCU": str(tmp_path / "nowhere")}), lambda line: None)
