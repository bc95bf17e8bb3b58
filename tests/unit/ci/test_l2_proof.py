"""The proof that a window was active: what CUPTI, the driver and ncu's counts are taken to say."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import l2_proof
import msgspec
import pytest
from ncu_csv import HEADING, UNITS, line, log, stack

from pytest_gpumem.nsight import ncu

SCRIPT = Path(l2_proof.__file__)
WINDOW = {"address": 4096, "nbytes": 8 << 20, "hit_ratio": 1.0, "hit": "persisting", "miss": "streaming"}


def carriers(cupti: dict[str, Any]) -> dict[str, Any]:
    """All carriers, with what CUPTI reports of each."""
    read_back = {"off": [None], "stream": [WINDOW], "graph": [WINDOW], "launch": None}
    return {
        name: {"asked": None if name == "off" else WINDOW, "read_back": read_back[name], "cupti": cupti.get(name)} for name in read_back
    }


def proved(record: dict[str, Any]) -> list[bool]:
    return [holds for _, holds in l2_proof.checks(record)]


def test_cupti_and_the_driver_say_what_was_asked_for() -> None:
    record = {"windows": {"carriers": carriers({"off": [None], "stream": [WINDOW], "graph": [WINDOW], "launch": [WINDOW]})}}
    assert [claim.rpartition(": ")[2] for claim, _ in l2_proof.checks(record)] == [
        "CUPTI and the driver says so",
        "CUPTI and the driver says so",
        "CUPTI and the driver says so",
        "CUPTI says so",
    ]
    assert all(proved(record))


def test_a_cupti_that_never_reports_a_window_proves_nothing() -> None:
    silent = carriers({name: [None] for name in l2_proof.CARRIERS})
    said = dict(zip(silent, l2_proof.checks({"windows": {"carriers": silent}}), strict=True))
    assert said["off"][0].endswith(": the driver says so")
    assert said["stream"][1]
    assert not said["launch"][1]  # nobody can be asked


def test_another_window_is_no_proof() -> None:
    other = {**WINDOW, "nbytes": 4 << 20}
    seen = carriers({"launch": [WINDOW, other]})
    assert l2_proof.seen_by(seen["launch"], seen) == []
    assert "another" in l2_proof.table({**RECORD, "windows": {"carriers": seen}})


def csv(figures: dict[tuple[int, str], tuple[int, int, int]]) -> str:
    """ncu's log with a launch of each table and setting: DRAM bytes read, sectors that L2 had, sectors that it had not."""
    heading, units = (*HEADING, *l2_proof.MORE), (*UNITS, "%", "sector", "sector")
    lines = []
    for (mib, setting), (reads, hits, misses) in figures.items():
        base = (reads, 1 << 30, "400000", hits + misses, 1 << 25, 40 if hits == misses else 72.5, hits, misses)
        place = stack(f"reset_data_{mib}_{setting}.measure")
        lines.append(line(len(lines), "void reset_data<int>(T1 *, const T1 *)", place, base))  # type: ignore[arg-type]
    lines.append(line(9, "void read<float>(T1 *)", stack("reset_data_8_off.measure"), (1, 1, "1", 1, 1, "1", 1, 1)))  # type: ignore[arg-type]
    return log(*lines, heading=heading, units=units)


RECORD: dict[str, Any] = {
    "device": {"name": "NVIDIA H200", "driver": "580"},
    "ended": "2026-11-21T00:00:00",
    "out_mib": 1024,
    "windows": {},
    "counted": {"launches": [], "error": None},
    "traffic": {"rows": {}, "error": None},
}
SECTORS = 1 << 25
RISES = {(8, "off"): (500 << 20, SECTORS // 2, SECTORS // 2), (8, "fitted"): (8 << 20, SECTORS - 1000, 1000)}


def test_fewer_reads_and_more_hits_are_the_proof() -> None:
    launches = l2_proof.counts(ncu.kernels_in(csv(RISES)), (8,))
    record = {**RECORD, "counted": {"launches": launches, "error": None}}
    assert proved(record) == [True, True, True]
    drawn = l2_proof.table(record)
    assert "50.0 %" in drawn
    assert "MISS" not in drawn


def test_the_same_counts_are_none() -> None:
    same = {**RISES, (8, "fitted"): RISES[8, "off"]}
    launches = l2_proof.counts(ncu.kernels_in(csv(same)), (8,))
    assert proved({"counted": {"launches": launches}}) == [False, False, False]
    # Without the counters of L2 there are DRAM's bytes.
    counted = [
        dataclasses.replace(one, use=msgspec.structs.replace(one.use, l2_hit_rate=None, l2_read_hit_rate=None))
        for one in ncu.kernels_in(csv(RISES))
    ]
    launches = l2_proof.counts(counted, (8,))
    assert proved({"counted": {"launches": launches}}) == [True]


def test_the_driver_gives_back_every_window_also_where_cupti_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupti.py").write_text("raise ImportError('no cupti')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    found = l2_proof.look_at_windows("sim:h200")
    assert set(found["carriers"]) == set(l2_proof.CARRIERS)
    assert len(found["errors"]) == 1
    assert "no cupti" in found["errors"][0]
    said = found["carriers"]
    assert [said[name]["asked"] is None for name in l2_proof.CARRIERS] == [True, False, False, False]
    assert [l2_proof.seen_by(said[name], said) for name in l2_proof.CARRIERS] == [["the driver"]] * 3 + [[]]


def test_a_warm_count_leaves_the_caches_alone_and_says_when_ncu_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ncu"
    program.write_text('#!/bin/sh\necho "==ERROR== ERR_NVGPUCTRPERM"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("GPUMEM_NCU", str(program))
    found = l2_proof.count_warm("cuda", (8,), 64, lambda _: None)
    assert found["launches"] == []
    assert "ERR_NVGPUCTRPERM" in found["error"]
    assert "--cache-control none" in found["command"]
    assert "--replay-mode application" in found["command"]
    assert ncu.L2_READ_HIT in found["command"]
    assert found["command"].startswith("ncu --clock-control")
    assert found["command"].endswith("--log-file ncu.log python ci/bench/l2_proof.py launches cuda 8 64")
