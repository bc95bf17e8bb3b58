"""`gpumem card` on simulated cards: a sound one, and one for each planted fault."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
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
from pytest_gpumem.doctor.card import Known, on_record, reach
from pytest_gpumem.measuring.controls import read_controls
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.device import CardFigures, CardProcess
from pytest_gpumem.records.measurement import Provenance

SOUND = DATASHEETS["h100"]
CHECKS = ("like its model", "throttling", "configuration", "ageing")
Card = Callable[..., Result]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    """Runs `gpumem card` on the simulated H100, or on the sheet that takes its place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("GPUMEM_BASELINE", raising=False)

    def run(*arguments: str, sheet: Datasheet = SOUND) -> Result:
        monkeypatch.setitem(datasheets.DATASHEETS, "h100", sheet)
        return CliRunner().invoke(main, ["card", "--device", "sim:h100", *arguments])

    return run


def test_a_card_is_never_a_simulated_one_for_want_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "choose", choices := Mock(side_effect=NoDevice("no driver")))
    for arguments, variable in ((["--device", "auto"], "sim"), ([], "auto"), ([], "")):
        monkeypatch.setenv("GPUMEM_DEVICE", variable)
        result = CliRunner().invoke(main, ["card", *arguments])
        assert (result.exit_code, result.stdout) == (6, "")
    assert [call.args for call in choices.call_args_list] == [("cuda",)] * 3


def planted(**state: Any) -> Datasheet:
    return replace(SOUND, state=state)


def findings(result: Result) -> dict[str, str]:
    """The checks of a JSON report that are no OK, with what they say."""
    report = json.loads(result.output)
    assert tuple(check["name"] for check in report["checks"]) == CHECKS
    assert report["healthy"] == (result.exit_code == Exit.FINE)
    return {check["name"]: check["detail"] for check in report["checks"] if check["status"] != "OK"}


def test_a_sound_card_is_healthy_and_its_figures_are_those_of_its_datasheet(card: Card) -> None:
    result = card("--json", "-")
    assert result.exit_code == Exit.FINE
    assert findings(result) == {}
    report = json.loads(result.output)
    figures = report["figures"]
    assert all(figures.values())
    for name in ("dram_read", "dram_write", "dram_copy"):
        assert 0.8 * SOUND.peak_bandwidth < figures[name] < SOUND.peak_bandwidth
    assert figures["l2_read"] == pytest.approx(SOUND.l2_bandwidth, rel=0.05)
    assert figures["dram_latency"] == pytest.approx(SOUND.dram_latency, rel=0.03)
    assert figures["l2_latency"] == pytest.approx(SOUND.l2_latency, rel=0.05)
    for name in ("to_device", "to_host"):
        assert figures[name] == pytest.approx(SOUND.pinned_bandwidth, rel=0.01)
    assert len(report["known"]) == 5
    assert report["card"]["link_width"] == 16


def test_people_get_a_line_for_each_figure_and_for_each_check(card: Card) -> None:
    result = card("--quick")
    assert result.exit_code == Exit.FINE
    lines = result.output.splitlines()
    assert sum("on 5 cards" in line for line in lines) == len(CardFigures.__struct_fields__)
    assert all(any(line.startswith("OK") and name in line for line in lines) for name in CHECKS)


SLOW_DRAM = replace(SOUND, fit=replace(SOUND.fit, read_efficiency=0.85 * SOUND.fit.read_efficiency))
OLDER_SLOT = replace(SOUND, link_generation=4, pinned_share=2 * SOUND.pinned_share)
"""At the rate of a newer one: the slot alone is the fault."""
FAULTS = {
    "slow DRAM": (SLOW_DRAM, "like its model", ("DRAM, read", "DRAM, copied")),
    "slow L2": (replace(SOUND, l2_bandwidth=0.7 * SOUND.l2_bandwidth), "like its model", ("L2, read",)),
    "slow link": (replace(SOUND, pinned_share=SOUND.pinned_share / 2), "like its model", ("host to device", "device to host")),
    "another variant": (replace(SOUND, dram_latency=1.037 * SOUND.dram_latency), "like its model", ("another variant",)),
    "power cap": (planted(throttle_reasons=("sw_power_cap",)), "throttling", ("sw_power_cap",)),
    "heat": (planted(throttle_reasons=("hw_thermal_slowdown",)), "throttling", ("hw_thermal_slowdown",)),
    "eight lanes": (planted(link_width=8), "configuration", ("only 8 lanes",)),
    "a slow slot": (planted(max_link_generation=4, link_generation=4), "configuration", ("could do Gen5",)),
    "an older slot": (OLDER_SLOT, "configuration", ("PCIe Gen4 x16", "PCIe Gen5 x16")),
    "no ECC": (replace(SOUND, ecc=False), "configuration", ("ECC",)),
    "less power": (planted(power_limit_w=500.0, default_power_limit_w=700.0, power_w=400.0), "configuration", ("500", "700")),
    "another process": (planted(processes=(CardProcess(7, "python", 1 << 30),)), "configuration", ("1 on the GPU",)),
    "replaced rows": (planted(remapped_rows=2), "ageing", ("2 rows",)),
    "memory errors": (planted(uncorrected_errors=3), "ageing", ("3 over",)),
    "a row that could not be replaced": (planted(remap_failed=True), "ageing", ("could not be replaced",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(card: Card, fault: str) -> None:
    sheet, check, words = FAULTS[fault]
    result = card("--json", "-", "--quick", sheet=sheet)
    assert result.exit_code == Exit.FAILED
    found = findings(result)
    assert list(found) == [check]
    assert all(word in found[check] for word in words)


def save(place: Path, sheet: Datasheet, uuid: str | None) -> None:
    """Save a run of one row, with the controls that a card of this sheet shows."""
    chosen = choose("sim:h100")
    device = SimulatedDevice(sheet)
    controls = read_controls(device)
    device.close()
    facts = structs.replace(chosen.facts, uuid=uuid)
    row = passing("tests/test_a.py::test_copy", provenance=Provenance("2026-11-20T12:00:00+00:00", uuid, controls))
    row = structs.replace(row, verdict=structs.replace(row.verdict, simulated=True))
    assert Store(place, facts).save([row], None).path is not None


def test_a_card_that_became_slower_than_its_own_runs_ages(card: Card, tmp_path: Path) -> None:
    for _ in range(3):
        save(tmp_path / "store", SOUND, None)
    sound = card("--json", "-", "--quick", "--baseline", "store")
    assert findings(sound) == {}
    assert "3 earlier processes" in sound.output or "1 earlier process" in sound.output
    found = findings(card("--json", "-", "--quick", "--baseline", "store", sheet=SLOW_DRAM))
    assert "its own history" in found["ageing"]
    assert "a read of DRAM" in found["ageing"]


def test_runs_of_other_cards_in_the_store_are_others_of_the_model(card: Card, tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "store", SOUND, f"GPU-{number}")
    assert findings(card("--json", "-", "--quick", "--baseline", "store")) == {}
    found = findings(card("--json", "-", "--quick", "--baseline", "store", sheet=SLOW_DRAM))
    assert list(found) == ["like its model"]
    assert "other cards of the store" in found["like its model"]


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_gpumem.devices import opening

    def none(*_: object) -> None:
        raise opening.NoDevice("no CUDA device 0: no driver")

    monkeypatch.setattr(opening, "_cuda", none)
    monkeypatch.delenv("GPUMEM_DEVICE", raising=False)
    result = CliRunner().invoke(main, ["card"])
    assert result.exit_code == Exit.NO_VERDICT
    assert result.output == "gpumem: nothing was measured: no CUDA device 0: no driver\n"


@pytest.mark.parametrize(("arguments", "named"), [(["--device", "gpu"], "--device: 'gpu'"), ([], "GPUMEM_DEVICE: 'cuda:x'")])
def test_a_device_that_is_none_is_a_usage_error(arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUMEM_DEVICE", "cuda:x")
    result = CliRunner().invoke(main, ["card", *arguments])
    assert result.exit_code == Exit.USAGE
    assert named in result.output


def test_too_few_cards_judge_nothing() -> None:
    one = {"NVIDIA X": [Known(CardFigures(dram_read=1e12))]}
    assert reach("dram_read", 1, False, one) is None
    two = {"NVIDIA X": [Known(CardFigures(dram_read=1e12)), Known(CardFigures(dram_read=1.001e12))]}
    limit = reach("dram_read", 2, False, two)
    assert limit is not None
    # A single difference says little about the spread: only a third of the bandwidth would be beyond doubt.
    assert limit > 0.1
    three = {**two, "NVIDIA Y": [Known(CardFigures(dram_read=b)) for b in (2e12, 2.001e12, 2.002e12, 2.001e12, 2e12)]}
    assert (reach("dram_read", 2, False, three) or 1.0) < 0.01


def test_the_cards_on_record_are_those_of_the_records() -> None:
    root = Path(__file__).parents[3]
    spec = importlib.util.spec_from_file_location("card_reference", root / "ci/card_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    shipped = json.loads((root / "pytest_gpumem/doctor/cards.json").read_text())
    real = {name: cards for name, cards in shipped.items() if not name.startswith("simulated")}
    assert script.measured(root / "ci/records") == real
    assert {name for name in on_record() if name.startswith("simulated")} == {f"simulated {one.name}" for one in DATASHEETS.values()}
    assert "GPU-" not in json.dumps(shipped)
