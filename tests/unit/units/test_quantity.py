from __future__ import annotations

import json
import pickle

import pytest

from pytest_gpumem.units import Quantity, comparison_text, format_rate, format_time


def test_a_quantity_is_a_float_that_shows_its_unit_in_an_assertion_only() -> None:
    latency = Quantity(268.3e-6, format_time)
    assert repr(latency) == "268.3 us"
    assert (str(latency), f"{latency}", f"{latency:.1e}", json.dumps(latency)) == ("0.0002683", "0.0002683", "2.7e-04", "0.0002683")
    assert latency == 268.3e-6
    assert type(latency * 2) is float
    assert type(pickle.loads(pickle.dumps(latency))) is float


@pytest.mark.parametrize(
    ("left", "relation", "right", "lines"),
    [
        (Quantity(3188e9, format_rate), ">", 0.99 * 3352e9, ["3188 GB/s > 3318 GB/s", "3.93 % below"]),
        (1e-5, ">=", Quantity(2e-5, format_time), ["10.00 us >= 20.00 us", "50.0 % below"]),
        (Quantity(2e-5, format_time), "<", 0, ["20.00 us < 0 s"]),
        (3.0, ">", 2.0, None),
        (Quantity(2e-5, format_time), "in", [1.0], None),
        (Quantity(2e-5, format_time), "==", None, None),
    ],
)
def test_a_comparison_has_units_on_both_sides(left: object, relation: str, right: object, lines: list[str] | None) -> None:
    assert comparison_text(left, relation, right) == lines
