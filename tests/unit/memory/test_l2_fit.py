"""The set-aside and hit ratio that fit a window."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.memory.l2 import fit_hit_ratio, fit_set_aside
from pytest_gpumem.units import MiB

H100 = choose("sim:h100").facts


@pytest.mark.parametrize(
    ("window", "set_aside"),
    [
        (1 * MiB, 6.25 * MiB),  # one step of L2/16 holds it, and one more
        (3.125 * MiB, 6.25 * MiB),
        (8 * MiB, 12.5 * MiB),
        (7.5 * MiB, 9.375 * MiB),  # three steps, with half of one free
        (9.5 * MiB, 12.5 * MiB),  # four steps hold it
        (16 * MiB, 18.75 * MiB),
        (24 * MiB, 25 * MiB),
        (40 * MiB, 25 * MiB),  # never above L2/2, although the device would grant 31.25 MiB
    ],
)
def test_what_holds_the_window_and_a_step_more_where_that_pays(window: float, set_aside: float) -> None:
    assert H100.l2_bytes == 50 * MiB
    assert fit_set_aside(H100, int(window)) == int(set_aside)


def test_a_device_with_a_smaller_maximum_than_half_of_l2_limits_it() -> None:
    small = replace(H100, persisting_l2_max_bytes=10 * MiB)
    assert fit_set_aside(small, 40 * MiB) == 9.375 * MiB


def test_hit_ratio_is_what_fits_and_at_most_one() -> None:
    assert fit_hit_ratio(25 * MiB, 40 * MiB) == pytest.approx(0.625)
    assert fit_hit_ratio(25 * MiB, 8 * MiB) == 1.0
