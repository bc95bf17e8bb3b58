"""The doctor on a real GPU: CUDA and NVML tell of the same card."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.doctor import examine, text
from pytest_gpumem.doctor.checks import Status


def test_the_doctor_sees_the_card_that_cuda_uses() -> None:
    report = examine()
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
    for name in ("GPU", "CuPy", "cuda-bindings", "nvidia-ml-py"):
        (check,) = [check for check in report.checks if check.name == name]
        assert check.status is Status.OK, check
    assert text(report, 200)[-1].startswith("This machine can measure on ")
    json.dumps(report.to_json(), allow_nan=False)
