"""The doctor on a real GPU: CUDA and NVML tell of the same card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.doctor import Status, examine, health, text


def test_the_doctor_sees_the_card_that_cuda_uses() -> None:
    report = examine()
    assert not report.simulated_only
    facts, card = report.device, report.card
    assert facts is not None
    if card is None:
        pytest.skip("NVML says nothing here, as in a container without the driver's utilities")
    assert (card.name, card.driver) == (facts.name, facts.driver)
    assert card.cards >= 1
    if facts.mig_profile is None and card.ecc is not None:
        assert card.ecc == facts.ecc
    if card.sm_clock_hz is not None and card.max_sm_clock_hz is not None:
        assert 0 < card.sm_clock_hz <= card.max_sm_clock_hz
    if facts.link is not None:
        assert facts.link == f"PCIe Gen{card.max_link_generation} x{card.max_link_width}"
    for name in ("driver", "GPU", "CuPy", "CUDA bindings", "NVML", "kernels", "pytest-benchmark"):
        (check,) = [check for check in report.checks if check.name == name]
        assert check.status is Status.OK, check
    assert text(report, 200)[-1].startswith("This machine can measure latency and bandwidth")
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.usefixtures("free_gpu")
def test_a_gpu_of_a_data_centre_copies_near_its_datasheets_bandwidth_and_is_healthy(
    tmp_path: Path,
) -> None:
    found = health.examine(Storage(tmp_path))
    peak = found.facts.dram_peak
    assert not peak or health.LEAST_SHARE * peak < found.measured.copy < peak
    controls = found.measured.controls
    assert None not in (controls.dram, controls.l2, controls.launch)
    assert controls.latency is not None
    assert 1e-7 < controls.latency < 2e-6
    assert found.verdict == "healthy", found.sentence
    json.dumps(found.to_json(), allow_nan=False)
