"""What follows from the points of an L2 sweep."""

from __future__ import annotations

import pytest

from pytest_gpumem.records.l2_sweep import OFF, Change, Point, Setting, Sweep
from pytest_gpumem.units import MiB


def sweep(share: float = 0.5, low: float = 0.4) -> Sweep:
    best = Point(Setting(3 * MiB, 0.75), 1e-3, None)
    return Sweep(
        "triad",
        "GPU",
        False,
        4 * MiB,
        (),
        51,
        Point(OFF, 1.5e-3, None),
        best,
        Change(share, low, share + 0.1),
        (),
    )


@pytest.mark.parametrize(
    ("share", "low", "pays"),
    [
        (0.5, 0.4, True),
        (0.01, 0.005, True),
        (0.0099, 0.005, False),
        (0.02, 0.0, False),
        (0.02, 1e-9, True),
        (0.5, -0.1, False),
    ],
)
def test_a_gain_of_one_percent_that_is_sure_is_recommended(
    share: float, low: float, pays: bool
) -> None:
    found = sweep(share, low)
    assert found.pays is pays
    assert found.recommend() == (
        {"set_aside": 3 * MiB, "hit_ratio": 0.75} if pays else {"set_aside": "off"}
    )


@pytest.mark.parametrize(
    ("set_aside", "hit_ratio", "fitted"),
    [(3, 0.75, True), (3, 1.0, False), (4, 1.0, True), (6, 1.0, True), (0, 0.0, True)],
)
def test_a_fitted_hit_ratio_fills_the_set_aside(
    set_aside: int, hit_ratio: float, fitted: bool
) -> None:
    assert sweep().fitted(Setting(set_aside * MiB, hit_ratio)) is fitted
