from __future__ import annotations

import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.row import NOT_REACHED, ROW, TEST, Omission
from pytest_gpumem.reporting.terminal import (
    REMEDY,
    baseline_line,
    header,
    missing_lines,
    one_place,
    wants_colour,
)
from pytest_gpumem.settings import Settings


def test_header_of_a_gpu(facts: DeviceFacts) -> None:
    settings = {
        "mode": "clean-cold",
        "sampler": "auto",
        "placements": 8,
        "precision": 0.001,
        "budget": 1.0,
        "max_regression": "1%",
    }
    conditions = Conditions(sm_clock_hz=1.98e9, memory_clock_hz=2.619e9, temperature_c=34)
    assert header(
        facts, settings, baseline_line(3, 0.008, ".benchmarks"), conditions=conditions
    ) == [
        "gpumem: NVIDIA H100 80GB HBM3 (sm_90, 132 SMs, 79.2 GiB, L2 50 MiB, peak 3352 GB/s)",
        "  driver 580.95.05, CUDA 13.0, ECC on, MIG off, MPS off, PCIe Gen5 x16",
        "  conditions: SM 1980 MHz, memory 2619 MHz, 34 C, not throttled",
        "  mode clean-cold, sampler auto, 8 placements, max_regression 1%, precision 0.100 %, 1.000 s a measurement",
        "  baseline: 3 processes in .benchmarks; catches slow-downs from 0.800 %",
    ]


def test_an_unknown_peak_is_no_peak_of_zero(facts: DeviceFacts) -> None:
    assert "L2 50 MiB, peak unknown)" in header(replace(facts, dram_peak=0.0), {})[0]


def test_what_spoils_a_measurement_stands_out(facts: DeviceFacts) -> None:
    conditions = Conditions(throttle_reasons=("sw_power_cap",), other_processes=2)
    text = "\n".join(
        header(replace(facts, mps=True, mig_profile="1g.10gb", ecc=None), {}, conditions=conditions)
    )
    assert "conditions: THROTTLED: sw_power_cap, 2 OTHER PROCESSES" in text
    assert "ECC unknown, MIG 1g.10gb, MPS on" in text


def test_a_simulated_device_is_announced_with_its_reason(facts: DeviceFacts) -> None:
    lines = header(
        replace(facts, simulated=True), {}, fallback_reason="no CUDA device 0: no driver"
    )
    assert (
        lines[0]
        == "*** SIMULATED DEVICE: no GPU is measured. Times come from a model of NVIDIA H100 80GB HBM3. ***"
    )
    assert lines[1] == "*** Reason: no CUDA device 0: no driver ***"
    assert lines[2].startswith("gpumem: simulated NVIDIA H100")
    assert not any("driver 580" in line for line in lines)


def test_baseline_lines() -> None:
    assert baseline_line(0, None, ".benchmarks") == "none in .benchmarks; --gpumem-save makes one"
    assert baseline_line(1, None, ".benchmarks") == "1 process in .benchmarks"


def test_streams_that_end_in_one_place(tmp_path: Path) -> None:
    with (
        (tmp_path / "a").open("w") as one,
        (tmp_path / "a").open("a") as same,
        (tmp_path / "b").open("w") as other,
    ):
        assert one_place(one, same)
        assert not one_place(one, other)
        assert not one_place(one, io.StringIO())
    assert not one_place(one, same)  # closed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(
    stream: io.StringIO, environment: dict[str, str], expected: bool
) -> None:
    assert wants_colour(stream, environment) is expected


def test_the_short_header_is_two_lines(facts: DeviceFacts) -> None:
    settings = Settings().to_json() | {"max_regression": "1%"}
    assert header(facts, settings, baseline_line(3, 0.008, ".benchmarks"), short=True) == [
        "gpumem: NVIDIA H100 80GB HBM3, driver 580.95.05, CUDA 13.0, peak 3352 GB/s",
        "  mode clean-cold, max_regression 1%; baseline: 3 processes in .benchmarks; catches slow-downs from 0.800 %",
    ]
    first, _ = header(
        replace(facts, simulated=True), settings, fallback_reason="no driver", short=True
    )
    assert (
        first
        == "gpumem: SIMULATED NVIDIA H100 80GB HBM3: no GPU is measured, times come from a model (no driver)"
    )
    throttled = Conditions(throttle_reasons=("sw_power_cap",), other_processes=1)
    assert header(facts, settings, conditions=throttled, short=True)[0].endswith(
        "; THROTTLED: sw_power_cap, 1 OTHER PROCESS"
    )


def test_tests_that_a_crash_kept_from_running_are_one_line_without_advice() -> None:
    lost = [
        Omission(f"t.py::test_{n}", "", "lost", NOT_REACHED, what=what)
        for n in range(8)
        for what in (ROW, TEST)
    ]
    said = "lost: 8 tests not reached, because the session ended before; --gpumem-isolate runs them all the same"
    assert missing_lines(lost) == [said]
    assert missing_lines([*lost, Omission("t.py::gone", "", "lost", "gone")])[1:] == [
        "lost: t.py::gone: gone",
        REMEDY,
    ]
