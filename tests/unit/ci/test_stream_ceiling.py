"""Our STREAM in BabelStream's way, on the simulated device, and the figures that it is compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import stream_ceiling

from pytest_gpumem.devices.opening import choose


def test_every_kernel_counts_babelstreams_bytes() -> None:
    device = choose("sim").open()
    elements = 2**20
    found = stream_ceiling.measured(device, elements, 3)
    device.close()
    nbytes = {one["kernel"]: one["bytes"] for one in found["stream"]}
    array = elements * 8
    sums = array // stream_ceiling.tile_bytes("dot") * 8
    assert nbytes == {
        "copy": 2 * array,
        "mul": 2 * array,
        "add": 3 * array,
        "triad": 3 * array,
        "dot": 2 * array + sums,
        "dot with final sum": 2 * array + sums,
    }
    for one in found["stream"]:
        assert one["host"]["min"] <= one["host"]["median"]
        assert (one["events"] is None) == (one["kernel"] == "dot with final sum")
    assert [one["kernel"] for one in found["one_way"]] == ["read", "write"]


def record(name: str, rate: float, share: float) -> dict[str, Any]:
    """All kernels at `rate` times BabelStream's figure, read and write at `share` of the peak."""
    theirs = stream_ceiling.BABELSTREAM[name]
    return {
        "device": {"name": name, "simulated": False, "driver": "580", "peak_bandwidth": 3352e9},
        "ended": "2026-11-21T00:00:00",
        "elements": 2**27,
        "times": 100,
        "babelstream": {"source": "there", "gb_per_s": theirs},
        "stream": [
            {"kernel": k, "bytes": 10**9, "host": {"min": 1 / (rate * g), "median": 1.0}, "events": {"min": 1.0, "median": 1.0}}
            for k, g in theirs.items()
        ],
        "one_way": [{"kernel": k, "bytes": 10**9, "events": {"min": 1e-6, "median": 1 / (share * 3352)}} for k in ("read", "write")],
    }


def holding(name: str, rate: float, share: float) -> dict[str, bool | None]:
    return {line["kernel"]: line["holds"] for line in stream_ceiling.lines(record(name, rate, share))}


def test_each_kernel_must_reach_babelstreams_figure_by_its_best_time_on_the_hosts_clock() -> None:
    reached, missed = holding("NVIDIA H200", 1.001, 0.9), holding("NVIDIA H200", 0.999, 0.9)
    assert [reached[k] for k in ("copy", "mul", "add", "triad", "dot")] == [True] * 5
    assert [missed[k] for k in ("copy", "mul", "add", "triad", "dot")] == [False] * 5
    assert (reached["read"], reached["write"]) == (None, None)


def test_read_and_write_must_reach_a_share_of_the_peak_by_their_median_on_an_h100() -> None:
    name = "NVIDIA H100 80GB HBM3"
    assert [holding(name, 1.0, share)[k] for share in (0.929, 0.931) for k in ("read",)] == [False, True]
    assert [holding(name, 1.0, share)[k] for share in (0.949, 0.951) for k in ("write",)] == [False, True]


def test_the_table_marks_a_miss() -> None:
    text = stream_ceiling.table(record("NVIDIA H100 80GB HBM3", 0.9, 0.94))
    assert text.count("MISS") == 6
    assert "0.900" in text
    assert "94.0" in text


def test_the_script_runs_on_the_simulated_device_and_compares_it_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ceiling.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "sim", "--elements", str(2**20), "--times", "3", "--json", str(file)])
    assert stream_ceiling.main() == 0
    held = json.loads(file.read_text())
    assert held["kind"] == "stream_ceiling"
    assert held["babelstream"]["gb_per_s"] is None
    assert all(line["holds"] is None for line in held["must_show"])
    assert capsys.readouterr().out.startswith("SIMULATED")


def test_our_read_must_be_as_fast_as_any_other_shape() -> None:
    def holds(ours: float, fastest: float) -> bool | None:
        run = record("NVIDIA H200", 1.001, 0.94)
        run["reads"] = [
            {"kernel": name, "bytes": 10**9, "events": {"min": 1 / rate, "median": 1 / rate}}
            for name, rate in (("ours", ours), ("other", fastest))
        ]
        run["read_sizes"] = [{"bytes": n, "events": {"min": t, "median": t}} for n, t in ((10**9, 1.1), (2 * 10**9, 2.1))]
        return next(line["holds"] for line in stream_ceiling.lines(run) if line["kernel"] == "read beside others")

    assert holds(1.0, 0.9)
    assert holds(0.995, 1.0)
    assert not holds(0.985, 1.0)


def test_what_a_read_costs_besides_its_bytes_is_the_line_through_the_largest_sizes() -> None:
    sizes = [{"bytes": n, "events": {"min": t, "median": t}} for n, t in ((1, 9.0), (1000, 3.0), (2000, 5.0))]
    assert stream_ceiling.cost_of_a_launch(sizes) == (pytest.approx(1.0), pytest.approx(500.0))
