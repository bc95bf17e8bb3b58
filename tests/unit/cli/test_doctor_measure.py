"""`gpumem doctor --measure` on simulated GPUs: a sound one, and one for each planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from measurements import passing
from msgspec import structs

from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main
from pytest_gpumem.devices import opening
from pytest_gpumem.devices.opening import NoDevice, choose
from pytest_gpumem.devices.simulated import datasheets
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS, Datasheet
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.doctor import Machine, health
from pytest_gpumem.doctor import examine as examine_machine
from pytest_gpumem.measuring.controls import read_controls
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.measurement import Provenance

SOUND = DATASHEETS["h100"]
SLOW_DRAM = replace(SOUND, fit=replace(SOUND.fit, read_efficiency=0.85 * SOUND.fit.read_efficiency))
CHECKS = ("DRAM bandwidth", "controls", "under load")
Measure = Callable[..., Result]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Runs the command on the simulated H100, or on the sheet that takes its place."""
    report = examine_machine(
        Machine(choose=Mock(side_effect=NoDevice("no driver")), fails=lambda program: None)
    )
    monkeypatch.setattr("pytest_gpumem.doctor.examine", lambda: report)
    monkeypatch.setattr(health, "LOAD", 0.5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GPUMEM_DEVICE", "sim:h100")
    monkeypatch.delenv("GPUMEM_BASELINE", raising=False)

    def run(*arguments: str, sheet: Datasheet = SOUND) -> Result:
        monkeypatch.setitem(datasheets.DATASHEETS, "h100", sheet)
        return CliRunner().invoke(main, ["doctor", "--measure", *arguments])

    return run


def found(result: Result) -> tuple[str, dict[str, str]]:
    """The verdict of a JSON report, and the checks that are no OK with what they say."""
    report = json.loads(result.output)["health"]
    assert tuple(check["name"] for check in report["checks"]) == CHECKS
    assert (report["verdict"] == "healthy") == (result.exit_code == Exit.FINE)
    return report["verdict"], {
        check["name"]: check["detail"] for check in report["checks"] if check["status"] != "OK"
    }


def test_a_sound_gpu_is_healthy_and_its_figures_are_those_of_its_datasheet(
    measure: Measure,
) -> None:
    result = measure("--json", "-")
    assert found(result) == ("healthy", {})
    report = json.loads(result.output)["health"]
    assert 0.8 * SOUND.dram_peak < report["copy_bytes_per_s"] < SOUND.dram_peak
    assert report["controls"]["latency"] == pytest.approx(SOUND.dram_latency, rel=0.03)
    assert report["simulated"]


def test_people_get_a_line_for_each_check_and_the_verdict(measure: Measure) -> None:
    lines = measure().output.splitlines()
    assert all(any(line.startswith("OK") and name in line for line in lines) for name in CHECKS)
    assert lines[-1] == "NVIDIA H100 80GB HBM3 (simulated) is healthy."


def test_a_gpu_far_below_its_datasheet_is_slow(measure: Measure) -> None:
    fit = replace(SOUND.fit, read_efficiency=0.6, write_efficiency=0.6)
    verdict, checks = found(measure("--json", "-", sheet=replace(SOUND, fit=fit)))
    assert (verdict, list(checks)) == ("slow", ["DRAM bandwidth"])
    assert "of the datasheet's 3352 GB/s, less than 75" in checks["DRAM bandwidth"]


@pytest.mark.parametrize("reason", ["sw_power_cap", "hw_thermal_slowdown"])
def test_a_gpu_that_is_slowed_under_load_is_throttled(measure: Measure, reason: str) -> None:
    verdict, checks = found(
        measure("--json", "-", sheet=replace(SOUND, state={"throttle_reasons": (reason,)}))
    )
    assert (verdict, list(checks)) == ("throttled", ["under load"])
    assert reason in checks["under load"]


def test_what_throttles_a_slow_gpu_is_the_verdict(measure: Measure) -> None:
    fit = replace(SOUND.fit, read_efficiency=0.6, write_efficiency=0.6)
    result = measure(sheet=replace(SOUND, fit=fit, state={"throttle_reasons": ("sw_power_cap",)}))
    assert "is throttled: a copy moves" in " ".join(result.output.split())


def save(place: Path, sheet: Datasheet, uuid: str | None) -> None:
    """Save a run of one row, with the controls that a GPU of this sheet shows."""
    chosen = choose("sim:h100")
    device = SimulatedDevice(sheet)
    controls = read_controls(device)
    device.close()
    facts = structs.replace(chosen.facts, uuid=uuid)
    row = passing(
        "tests/test_a.py::test_copy",
        provenance=Provenance("2026-11-20T12:00:00+00:00", uuid, controls),
    )
    row = structs.replace(row, verdict=structs.replace(row.verdict, simulated=True))
    assert Store(place, facts).save([row], None).path is not None


@pytest.mark.parametrize(
    ("uuid", "whose"), [(None, "this GPU"), ("GPU-1", "other GPUs of the model")]
)
def test_controls_that_are_slower_than_the_baselines_are_slow(
    measure: Measure, tmp_path: Path, uuid: str | None, whose: str
) -> None:
    for _ in range(3):
        save(tmp_path / "store", SOUND, uuid)
    sound = measure("--json", "-", "--baseline", "store")
    assert found(sound) == ("healthy", {})
    assert f"of {whose} in the baseline" in sound.output
    verdict, checks = found(measure("--json", "-", "--baseline", "store", sheet=SLOW_DRAM))
    assert (verdict, list(checks)) == ("slow", ["controls"])
    assert "a read of DRAM takes +" in checks["controls"]
    assert f"of {whose} in the baseline" in checks["controls"]


def test_its_own_runs_count_before_those_of_other_gpus(measure: Measure, tmp_path: Path) -> None:
    save(tmp_path / "store", SLOW_DRAM, None)
    save(tmp_path / "store", SOUND, "GPU-1")
    assert found(measure("--json", "-", "--baseline", "store", sheet=SLOW_DRAM)) == ("healthy", {})


def test_another_variant_of_the_card_is_named_and_no_fault(
    measure: Measure, tmp_path: Path
) -> None:
    save(tmp_path / "store", SOUND, "GPU-1")
    result = measure(
        "--json",
        "-",
        "--baseline",
        "store",
        sheet=replace(SOUND, dram_latency=1.037 * SOUND.dram_latency),
    )
    assert found(result) == ("healthy", {})
    assert "another variant of the card" in result.output


@pytest.mark.parametrize("variable", ["", "auto", "cuda"])
def test_without_a_gpu_nothing_is_measured(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(opening, "_cuda", Mock(side_effect=NoDevice("no CUDA device 0: no driver")))
    monkeypatch.setenv("GPUMEM_DEVICE", variable)
    result = measure()
    assert result.exit_code == Exit.NO_VERDICT
    assert result.stderr.startswith("gpumem: nothing was measured: ")
    assert result.stderr.endswith("no CUDA device 0: no driver\n")


def test_a_baseline_without_measuring_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["doctor", "--baseline", "store"])
    assert result.exit_code == Exit.USAGE
    assert "add --measure" in result.stderr
