"""Joining kernels with measurements, and the file of counts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from known_devices import H100
from measurements import TRIAD, measurement
from msgspec.structs import replace
from ncu_csv import HEADING, UNITS, line, log, stack

from pytest_gpumem.nsight.counting import CountedRun, count, counted, to_json
from pytest_gpumem.nsight.ncu import L2_HIT_RATE, SECTORS_PER_LOAD, read_csv
from pytest_gpumem.nsight.reading import by_row
from pytest_gpumem.nsight.tools import ToolMissing
from pytest_gpumem.outcomes import NoAnswer, Outcome, UserError
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import DramBytes, Limits
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.uses import KernelUse
from pytest_gpumem.units import MiB


def row(range_name: str, label: str = "", *, launches: int = 5) -> Row:
    made = measurement(
        label=label, sampler="plain", placements=((1e-3,) * launches,), profiled=True, **TRIAD
    )
    return Row(
        f"t.py::{range_name}",
        Limits(),
        Verdict(Outcome.UNDECIDED, "a profiler was attached"),
        made,
        label,
        range_name=range_name,
    )


def profile(*kernels: KernelUse, launches: int = 5) -> TestProfile:
    return TestProfile("test_a", "t.py::test_a", "x", launches, kernels)


def kernel(name: str = "triad", *, launches: int = 5, **figures: Any) -> KernelUse:
    """Sums over some launches of 1 ms."""
    counts = {"dram_read": 1000, "dram_written": 500, "l2_read": 64, "l2_written": 64, **figures}
    return KernelUse(
        name, (1, 1, 1), (32, 1, 1), launches=launches, nanoseconds=launches * 1_000_000, **counts
    )


def test_measured_launches_are_joined_by_test_and_label() -> None:
    rows = [
        row("test_a"),
        row("test_b", "64 MiB"),
        row("test_b", "64_MiB"),
        row("test_b"),
        row("test_a", "measure"),
    ]
    ran = [
        stack("test_a", "test_a.setup"),
        stack("test_a", "test_a.measure", "test_a.launch"),
        stack("test_b", labelled("test_b", "64 MiB"), "test_b.measure", "test_b.launch"),
        stack("test_b", labelled("test_b", "64_MiB"), "test_b.measure", "test_b.launch"),
        stack("test_b", labelled("test_b", "64_MiB"), "test_b.flush"),
        stack("test_b", "test_b.measure", "test_b.launch"),
        stack("test_a", "test_a.measure", "test_a.launch", "test_a.launch"),
        stack(
            "test_a", labelled("test_a", "measure"), "test_a.flush"
        ),  # a label like a phase is none
        "",
    ]
    page = log(*(line(i, "k", ranges, (10**i, 0, 1, 0, 0)) for i, ranges in enumerate(ran)))
    found = by_row(read_csv(page), rows)
    assert {key: sum(k.dram_read or 0 for k in one.kernels) for key, one in found.items()} == {
        "t.py::test_a": 10 + 10**6,
        "t.py::test_b[64 MiB]": 10**2,
        "t.py::test_b[64_MiB]": 10**3,
        "t.py::test_b": 10**5,
    }


def test_a_count_is_that_of_one_launch() -> None:
    kernels = (
        kernel(dram_read=500, dram_written=50),
        kernel("other", dram_read=1500, dram_written=55, launches=10),
    )
    assert counted(profile(*kernels), "ncu") == DramBytes(400, 21, 26, 26, 5, "ncu")


def test_sectors_and_hit_rate_are_means_over_launches_of_the_worst_kernel() -> None:
    cell = stack("test_a", "test_a.measure")
    figures = [("triad", "4", "90"), ("triad", "6", "70"), ("other", "n/a", "85")]
    page = log(
        *(
            line(i, name, cell, (1, 1, 1, 100, 0, sectors, hits))
            for i, (name, sectors, hits) in enumerate(figures)
        ),
        heading=(*HEADING, SECTORS_PER_LOAD, L2_HIT_RATE),
        units=(*UNITS, "", "%"),
    )
    (one,) = by_row(read_csv(page), [row("test_a", launches=2)]).values()
    found = counted(one, "ncu")
    assert (found.sectors_per_request, found.l2_hit_rate) == pytest.approx((5, 0.8))


def test_what_one_kernel_lacks_is_not_counted_for_the_launch() -> None:
    found = counted(
        profile(kernel(), kernel("other", l2_read=None, l2_written=None), launches=1), "ncu"
    )
    assert (found.l2_reads, found.l2_writes) == (None, None)
    assert found.reads == 2000
    with pytest.raises(NoAnswer, match="ncu counted no DRAM bytes of other"):
        counted(profile(kernel(), kernel("other", dram_written=None)), "ncu")


def test_the_file_has_counts_beside_declarations() -> None:
    one = row("test_a", "x")
    assert one.measurement is not None
    counts = DramBytes(512 * MiB, 256 * MiB, None, None, 5, "ncu on 2026-11-21")
    rows = (
        replace(one, measurement=replace(one.measurement, dram_bytes=counts)),
        row("test_b"),
        replace(row("test_c"), measurement=None),
    )
    found = CountedRun(
        H100,
        rows,
        {one.key: profile(kernel(), kernel("other"))},
        (
            "/opt/cuda/ncu",
            "--csv",
            "a b",
            "/opt/venv/bin/python3.12",
            "--benchmark-json=/tmp/x/results.json",
        ),
    )
    plain = to_json(found, utc="2026-11-21T12:00:00+00:00")
    assert json.loads(json.dumps(plain, allow_nan=False))["device"]["key"] == H100.key
    first = plain["rows"][0]
    assert first["kernels_per_launch"] == 2
    assert first["seconds_per_launch"] == pytest.approx(2e-3)
    assert first["finding"] == "agrees"
    assert first["dram_bytes"] == msgspec.to_builtins(counts)
    assert first["moved_bytes"]["total"] == 768 * MiB
    assert (
        plain["command"] == "ncu --csv 'a b' python --benchmark-json=results.json"
    )  # nothing of the machine


def test_a_simulated_device_is_said_before_a_missing_tool() -> None:
    environment = {"GPUMEM_DEVICE": "sim:h200", "GPUMEM_NCU": "nowhere"}
    with pytest.raises(
        UserError, match="GPUMEM_DEVICE=sim:h200: the simulated device has no counters"
    ):
        count((), (), environment, print, day="2026-11-21")
    # The command line wins.
    with pytest.raises(ToolMissing):
        count(("--gpumem-device", "cuda:1"), (), environment, print, day="2026-11-21")
