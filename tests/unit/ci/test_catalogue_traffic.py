"""The script that counts every kernel of the catalogue: its cases, and why it says that counts differ."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import catalogue_traffic
import catalogue_traffic_cases
import ncu_csv
import pytest
from catalogue_traffic import why
from renew_tables import of_today

from pytest_gpumem.kernels.catalogue import CATALOGUE

L2 = 60_000_000


def row(
    name: str,
    declared: tuple[int, int],
    counted: tuple[int, int, int, int] | None,
    finding: str = "agrees",
) -> dict[str, Any]:
    total = sum(declared)
    figures = (
        None
        if counted is None
        else dict(zip(("reads", "writes", "l2_reads", "l2_writes"), counted, strict=True))
    )
    return {
        "nodeid": f"ci/bench/catalogue_traffic_cases.py::test_kernel[{name}]",
        "moved_bytes": {"reads": declared[0], "writes": declared[1], "total": total},
        "dram_bytes": figures,
        "finding": finding,
        "difference": None if counted is None else (counted[0] + counted[1]) / total - 1,
    }


M = 1_000_000


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (row("copy", (256 * M, 256 * M), (256 * M, 250 * M, 256 * M, 256 * M)), "as declared"),
        (
            row("write", (0, 256 * M), (0, 230 * M, 0, 256 * M)),
            "L2 still holds 26.0 MB of the written bytes",
        ),
        (
            row("write", (0, 256 * M), (0, 100 * M, 0, 256 * M)),
            "156.0 MB less than declared are written",
        ),
        (
            row("stride_copy", (128 * M, 128 * M), (512 * M, 128 * M, 256 * M, 128 * M)),
            "the SMs ask L2 for 2 times what is read: sectors used in part, or asked for again; 256.0 MB are read beyond what the SMs ask "
            "of L2: lines fetched again, or filled up",
        ),
        (
            row("transpose", (256 * M, 256 * M), (256 * M, 400 * M, 256 * M, 256 * M)),
            "144.0 MB are written beyond what the SMs ask of L2: lines fetched again, or filled up",
        ),
        (
            row("init", (0, 256 * M), (64 * M, 256 * M, 0, 256 * M)),
            "64.0 MB are read that the kernel does not ask for",
        ),
        (row("memcpy", (256 * M, 256 * M), None), "a copy engine moves it, and ncu counts kernels"),
    ],
)
def test_why_a_count_differs(one: dict[str, Any], said: str) -> None:
    assert why(one, L2) == said


def test_every_kernel_has_arguments_that_its_own_check_accepts() -> None:
    assert list(catalogue_traffic_cases.CALLS) == list(CATALOGUE)


def test_the_whole_run_with_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for ncu that runs no tests: results and counts are there already."""
    results = json.loads(
        (
            Path(catalogue_traffic.__file__).parents[1] / "records" / "nvidia-h200" / "suite.json"
        ).read_text()
    )
    results["gpumem"] = of_today(results["gpumem"])
    document = results["gpumem"]
    one = next(r for r in document["rows"] if r["nodeid"].endswith("test_stream.py::test_triad"))
    one["nodeid"], one["range_name"] = (
        "ci/bench/catalogue_traffic_cases.py::test_kernel[triad]",
        "test_kernel_triad",
    )
    one["key"] = one["nodeid"]
    one["measurement"]["profiled"] = True
    document["rows"] = [one]
    (tmp_path / "made.json").write_text(json.dumps(results))
    line = ncu_csv.line(
        0,
        ncu_csv.TRIAD,
        ncu_csv.measured("test_kernel_triad"),
        ("1073762048", "519266304", "1", "33554432", "16777216"),
    )
    (tmp_path / "log").write_text(ncu_csv.log(line))
    script = tmp_path / "ncu"
    script.write_text(
        f"""#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in --log-file) cp {tmp_path / "log"} "$2" ;; --benchmark-json=*) cp {tmp_path / "made.json"} "${{1#--benchmark-json=}}" ;; esac
  shift
done
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("GPUMEM_NCU", os.fspath(script))
    assert (
        catalogue_traffic.main(
            ["--kernel", "triad", "--kernel", "mul", "--json", str(tmp_path / "record.json")]
        )
        == 1
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["kind"], record["absent"], record["mib"]) == ("catalogue_traffic", ["mul"], 256)
    assert record["rows"][0]["dram_bytes"]["reads"] > 0
    assert (
        record["command"]
        == "python ci/bench/catalogue_traffic.py --kernel triad --kernel mul --json record.json"
    )
    printed = capsys.readouterr().out
    assert "NOT COUNTED: mul" in printed
    assert "triad" in printed
