"""Joining kernels with measurements, and the file of counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_devices import H100
from measurements import TRIAD, measurement
from msgspec.structs import replace

from pytest_gpumem.nsight.counting import BadFile, CallError, CountedRun, count, counted, kernels_of, load, to_json
from pytest_gpumem.nsight.ncu import CountedKernel
from pytest_gpumem.nsight.tools import ToolMissing
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import Counted, Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.uses import KernelUse
from pytest_gpumem.units import MiB


def row(range_name: str, label: str = "", *, launches: int = 5) -> Row:
    made = measurement(label=label, sampler="plain", placements=((1e-3,) * launches,), profiled=True, **TRIAD)
    return Row(f"t.py::{range_name}", Limits(), Verdict(Outcome.UNDECIDED, "a profiler was attached"), made, label, range_name=range_name)


def kernel(*ranges: str, reads: int = 1000, writes: int = 500, l2: int | None = 64) -> CountedKernel:
    counts = {"dram_read": reads, "dram_written": writes, "l2_read": l2, "l2_written": l2}
    return CountedKernel(KernelUse("triad", (1, 1, 1), (32, 1, 1), launches=1, nanoseconds=1_000_000, **counts), ranges)


def test_kernels_are_joined_by_test_and_label() -> None:
    plain, first, second = row("test_a"), row("test_b", "64 MiB"), row("test_b", "64_MiB")
    bare = row("test_b")
    ran = [
        kernel("test_a", "test_a.setup"),
        kernel("test_a", "test_a.measure", "test_a.launch", reads=1),
        kernel("test_b", labelled("test_b", "64 MiB"), "test_b.measure", "test_b.launch", reads=2),
        kernel("test_b", labelled("test_b", "64_MiB"), "test_b.measure", "test_b.launch", reads=3),
        kernel("test_b", labelled("test_b", "64_MiB"), "test_b.flush", reads=4),
        kernel("test_b", "test_b.measure", "test_b.launch", reads=5),
        kernel("test_a", "test_a.measure", "test_a.launch", "test_a.launch", reads=6),
        kernel(reads=7),
    ]
    found = kernels_of([plain, first, second, bare], ran)
    assert {key: [k.use.dram_read for k in kernels] for key, kernels in found.items()} == {
        "t.py::test_a": [1, 6],
        "t.py::test_b[64 MiB]": [2],
        "t.py::test_b[64_MiB]": [3],
        "t.py::test_b": [5],
    }


def test_a_measurement_labelled_like_a_phase_is_none() -> None:
    labelled_so = row("test_a", "measure")
    ran = kernel("test_a", labelled("test_a", "measure"), "test_a.flush")
    assert kernels_of([labelled_so], [ran]) == {labelled_so.key: ()}


def test_a_count_is_that_of_one_launch() -> None:
    kernels = [kernel(reads=100, writes=10), kernel(reads=300, writes=11)] * 5
    assert counted(kernels, 5, "ncu") == Counted(400, 21, 128, 128, 5, "ncu")


def test_what_one_kernel_lacks_is_not_counted_for_the_launch() -> None:
    found = counted([kernel(), kernel(l2=None)], 1, "ncu")
    assert (found.l2_reads, found.l2_writes) == (None, None)
    assert found.reads == 2000


def test_the_file_is_read_back(tmp_path: Path) -> None:
    one = row("test_a", "x")
    assert one.measurement is not None
    counts = Counted(512 * MiB, 256 * MiB, None, None, 5, "ncu on 2026-11-21")
    rows = (replace(one, measurement=replace(one.measurement, counted=counts)), row("test_b"), replace(row("test_c"), measurement=None))
    found = CountedRun(
        H100,
        rows,
        {one.key: (kernel(),) * 10},
        ("/opt/cuda/ncu", "--csv", "a b", "/opt/venv/bin/python3.12", "--benchmark-json=/tmp/x/results.json"),
    )
    plain = to_json(found, utc="2026-11-21T12:00:00+00:00")
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps(plain, allow_nan=False))
    stored = load(path)
    assert stored.device == H100.key
    assert stored.counts == {one.key: counts}
    first = plain["rows"][0]
    assert first["kernels_per_launch"] == 2
    assert first["seconds_per_launch"] == pytest.approx(2e-3)
    assert first["finding"] == "agrees"
    assert first["declared"]["total"] == 768 * MiB
    assert plain["command"] == "ncu --csv 'a b' python --benchmark-json=results.json"  # nothing of the machine


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "schema 1"),
        ('{"schema": 2, "rows": []}', "schema 1"),
        ('{"schema": 1, "rows": [{}]}', "missing required field `key`"),
        ('{"schema": 1, "device": {"key": "k"}, "rows": [{"key": "t"}]}', "missing required field `counted`"),
        ('{"schema": 1, "device": {"key": "k"}, "rows": [{"key": "t", "counted": {"reads": "1"}}]}', "reads: '1'; expected `int`"),
        (
            '{"schema": 1, "device": {"key": "k"}, "rows": [{"key": "t", "counted": {"reads": -1, "writes": 1, "l2_reads": null, '
            '"l2_writes": null, "launches": 5, "source": "ncu"}}]}',
            "rows[0].counted.reads: -1; expected",
        ),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(text)
    with pytest.raises(BadFile) as raised:
        load(path)
    assert str(path) in str(raised.value)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        load(tmp_path / "traffic.json")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpumem-device", "sim:h100", "t.py"], "sim:h100: the simulated device has no counters"),
        (["--gpumem-device=sim"], "sim: the simulated device has no counters"),
        (["--benchmark-json=x.json"], "--benchmark-json"),
        (["--benchmark-json", "x.json"], "--benchmark-json"),
    ],
)
def test_what_cannot_be_counted_is_refused_before_anything_runs(arguments: list[str], named: str) -> None:
    def run(_line: str) -> None:
        raise AssertionError("nothing may run")

    with pytest.raises(CallError, match=named):
        count(arguments, [], {"PATH": ""}, run, day="2026-11-21")


def test_a_simulated_device_is_said_before_a_missing_tool() -> None:
    environment = {"GPUMEM_DEVICE": "sim:h200", "GPUMEM_NCU": "nowhere"}
    with pytest.raises(CallError, match="GPUMEM_DEVICE=sim:h200: the simulated device has no counters"):
        count((), (), environment, print, day="2026-11-21")
    # The command line wins.
    with pytest.raises(ToolMissing):
        count(("--gpumem-device", "cuda:1"), (), environment, print, day="2026-11-21")
