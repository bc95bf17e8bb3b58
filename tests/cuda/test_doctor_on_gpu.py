"""The doctor on a real GPU: CUDA and NVML tell of the same card."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.doctor import OK, examine, text


def test_the_doctor_sees_the_card_that_cuda_uses() -> None:
    report = examine()
    facts, card = report.device, report.card
    assert facts is not None
    if card is None:
        pytest.skip("NVML says nothing here, as in a container without the driver's utilities")
    assert card.name == facts.name
    for name in ("GPU", "CuPy", "cuda-bindings", "nvidia-ml-py"):
        (check,) = [check for check in report.checks if check.name == name]
        assert check.status == OK, check
    assert text(report, 200)[-1].startswith("This machine can measure on ")
    json.dumps(report.to_json(), allow_nan=False)
