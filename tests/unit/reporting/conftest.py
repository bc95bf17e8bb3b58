from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from known_devices import H100
from measurements import TRIAD, measurement
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Comparison, Row, Verdict


@pytest.fixture
def facts() -> DeviceFacts:
    return replace(H100, driver="580.95.05", cuda="13.0", link="PCIe Gen5 x16")


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A row of a triad over 768 MiB that takes 268.3 us; keywords change the measurement."""

    def make(
        nodeid: str = "tests/test_stream.py::test_triad",
        outcome: Outcome = Outcome.PASS,
        *,
        label: str = "",
        reason: str = "within its limits",
        comparison: Comparison | None = None,
        code: Code | None = None,
        simulated: bool = False,
        measured: bool = True,
        **changes: Any,
    ) -> Row:
        placements = ((268.2e-6, 268.3e-6, 268.9e-6), (268.3e-6, 268.3e-6, 268.3e-6))
        given = {
            "sampler": "graph",
            "sampler_reason": "it can be captured",
            "placements": placements,
            "half_width": 0.2683e-6,
            "floor": 1.28e-6,
            **TRIAD,
        }
        taken = measurement(label=label, **given | changes) if measured else None
        return Row(
            nodeid,
            Limits(),
            Verdict(outcome, reason, comparison, simulated, code),
            taken,
            label=label,
        )

    return make
