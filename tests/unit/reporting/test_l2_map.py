"""The map of a sweep as text."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_gpumem.records.l2_sweep import OFF, Change, Point, Setting, Sweep, Textbook
from pytest_gpumem.reporting.l2_sweep import drawn
from pytest_gpumem.units import MiB

STEP = 3276800
FOUND = Sweep(
    target="reset_data",
    device="Test GPU",
    simulated=False,
    window_bytes=8 * MiB,
    points=(
        Point(OFF, 2e-3, None),
        Point(Setting(3 * STEP, 1.0), 1e-3, 1e-6),
        Point(Setting(3 * STEP, 0.8), 1.6e-3, None),
        Point(Setting(STEP, STEP / (8 * MiB)), 2.5e-3, None),
    ),
    grid=51,
    off=Point(OFF, 2e-3, 1e-6),
    best=Point(Setting(3 * STEP, 1.0), 1e-3, 1e-6),
    gain=Change(1.0, 0.99, 1.01),
    textbook=(
        Textbook("the maximum", Point(Setting(10 * STEP, 1.0), 3e-3, 1e-6), Change(2.0, 1.9, 2.1)),
    ),
    notes=("a note",),
)


@pytest.mark.parametrize("width", [120, 80])
def test_gains_by_set_aside_and_hit_ratio(width: int) -> None:
    text = drawn("test_it", FOUND, width=width, colour=False)
    assert text.isascii()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert all(len(line) <= width for line in text.splitlines())
    assert "hit ratio 3.12 9.38" in lines
    # The fitted row holds the smaller set-aside, the others the larger one.
    assert [line for line in lines if line.startswith("fitted")] == [
        f"fitted {'-20.0' if width == 120 else '-20'} ."
    ]
    assert [line for line in lines if line.startswith("1 ")] == [
        f"1 . {'+100.0' if width == 120 else '+100'}*"
    ]
    assert [line for line in lines if line.startswith("0.8 ")] == [
        f"0.8 . {'+25.0' if width == 120 else '+25'}"
    ]


def test_what_is_said() -> None:
    text = " ".join(drawn("test_it", FOUND, width=100, colour=False).split())
    assert text.startswith(
        "test_it: reset_data on Test GPU, window 8 MiB; gain in % against off (2.000 ms)"
    )
    assert (
        "persistence pays: 9.375 MiB at hit ratio 1 gains +100 % against off, 95 % interval +99.0 % to +101 %"
        in text
    )
    assert (
        "the maximum, 31.25 MiB at hit ratio 1: latency +200 % against what is recommended" in text
    )
    assert "4 of 51 settings measured" in text
    assert "a note" in text
    assert text.endswith("recommended: persisting_stream(buffer, set_aside=9830400, hit_ratio=1.0)")


def test_a_model_and_off_are_named() -> None:
    found = replace(FOUND, simulated=True, gain=Change(0.02, -0.01, 0.05))
    text = " ".join(drawn("test_it", found, width=100, colour=False).split())
    assert "Test GPU (simulated)" in text
    assert "persistence does not pay, leave it off: the interval of the gain includes 0" in text
    assert text.endswith("recommended: persisting_stream(buffer, set_aside='off')")
