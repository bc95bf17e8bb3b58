"""The least favourable conditions between the first sample and the last."""

from __future__ import annotations

from pytest_gpumem.measuring.conductor import worst
from pytest_gpumem.records.measurement import Conditions


def test_nothing_seen_is_nothing() -> None:
    assert worst([]) is None


def test_each_figure_is_the_least_favourable_one() -> None:
    seen = [
        Conditions(1.98e9, 2.6e9, 40.0, 300.0, ("sw_power_cap",), 0),
        Conditions(1.20e9, 2.7e9, 60.0, 200.0, (), 2),
        Conditions(1.50e9, 2.5e9, 50.0, 700.0, ("hw_slowdown", "sw_power_cap"), 1),
    ]
    assert worst(seen) == Conditions(1.20e9, 2.5e9, 60.0, 700.0, ("sw_power_cap", "hw_slowdown"), 2)
    assert worst(seen[:1]) == seen[0]


def test_what_the_driver_does_not_say_is_left_out_and_never_made_up() -> None:
    unknown = Conditions()
    assert worst([unknown, unknown]) == unknown
    known = Conditions(1.98e9, 2.6e9, 40.0, 300.0, (), 0)
    assert worst([unknown, known]) == known
