"""What the drawings are made of."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import pytest

from pytest_gpumem.records.row import Past
from pytest_gpumem.reporting.families import Ceiling, PlotPoint, Series, colours, curve
from pytest_gpumem.reporting.plots.bars import MOST, Delta, Rung, forest, ladder, largest
from pytest_gpumem.reporting.plots.runs import MOST as MOST_SAMPLES
from pytest_gpumem.reporting.plots.runs import history, strip, thinned
from pytest_gpumem.reporting.plots.svg import (
    Scale,
    Unit,
    fitted,
    nice_step,
    number,
    rate_unit,
    short,
    spanned,
    time_unit,
)


def test_a_scale_is_linear_or_logarithmic() -> None:
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(0, 10, 0, 1).ticks == [0, 2, 4, 6, 8, 10]
    assert Scale(0, 3e-6, 0, 1, unit=Unit("us", 1e-6)).ticks == pytest.approx([0, 1e-6, 2e-6, 3e-6])
    assert Scale(3, 4200, 0, 1, log=True).ticks == pytest.approx(
        [5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    )
    assert all(0.97 <= tick <= 1.03 for tick in Scale(0.97, 1.03, 0, 1).ticks)
    assert [nice_step(least) for least in (0.011, 1, 3, 7)] == pytest.approx([0.02, 1, 5, 10])


def test_units_by_the_largest_figure() -> None:
    assert (time_unit([3e-6, 4e-4]).name, time_unit([2e-3]).name, time_unit([]).name) == (
        "us",
        "ms",
        "ns",
    )
    assert (rate_unit([3e12]).name, rate_unit([3e13]).name, rate_unit([5e6]).name) == (
        "GB/s",
        "TB/s",
        "MB/s",
    )
    assert [short(value) for value in (0, 0.0625, 3002.4, 12.5, 123456, 1.5e7)] == [
        "0",
        "0.0625",
        "3002",
        "12.5",
        "123456",
        "15000000",
    ]


def test_a_range_holds_its_values_also_where_they_are_equal() -> None:
    low, high = spanned([2.0, 2.0])
    assert low < 2.0 < high
    assert spanned([1, 3], margin=0.5) == (0, 4)


def test_long_texts_and_coordinates_are_short() -> None:
    assert (number(3.0), number(3.14159), number(-0.04)) == ("3", "3.1", "-0")
    assert fitted("x" * 100, 69) == "x" * 3 + "\N{HORIZONTAL ELLIPSIS}" + "x" * 6
    assert fitted("short", 69) == "short"


def test_thinning_keeps_extremes_and_order() -> None:
    samples = [1.0] * 1000
    samples[137], samples[700] = 9.0, 0.1
    kept = thinned(samples, 40)
    assert len(kept) <= 40
    assert {(137, 9.0), (700, 0.1)} <= set(kept)
    assert [place for place, _ in kept] == sorted({place for place, _ in kept})
    assert thinned([1.0, 2.0], 40) == [(0, 1.0), (1, 2.0)]


def test_a_strip_shows_every_sample_and_every_median() -> None:
    drawn = strip([(1e-4, 2e-4), (3e-4,)], [1.5e-4, 3e-4])
    (samples,) = re.findall(r'class="s0 sample few" d="([^"]*)"', drawn)
    (medians,) = re.findall(r'class="s1 median" d="([^"]*)"', drawn)
    assert (samples.count("h0"), medians.count("M")) == (3, 2)
    assert "3 samples on 2 placements" in drawn
    assert "1 samples" not in strip([(1e-4,)], [1e-4])
    many = strip([tuple(1e-4 * (1 + index % 7) for index in range(100_000))], [4e-4])
    assert re.findall(r'class="s0 sample" d="([^"]*)"', many)[0].count("h0") <= MOST_SAMPLES
    assert len(many) < 6000


def test_a_curve_with_its_ceiling_and_intervals() -> None:
    points = tuple(
        PlotPoint(x, y * 1e9, y * 0.9e9, y * 1.1e9) for x, y in ((1, 10), (10, 20), (100, 15))
    )
    unit = Unit("GB/s", 1e9)
    drawn = curve(
        [Series("one", points), Series("expected", points, predicted=True)],
        "MiB",
        unit,
        [Ceiling(40e9, "peak")],
        "what",
    )
    assert drawn.count("<circle") == 3
    assert drawn.count("whisker") == 3
    assert "peak 40" in drawn
    assert "one: 10 MiB, 20 GB/s" in drawn
    # Over two decades the axis is logarithmic: equal factors are equally far apart.
    at = [float(x) for x in re.findall(r'cx="([\d.]+)"', drawn)]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2)
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights[1] < heights[2] < heights[0]


def test_the_name_of_a_ceiling_is_where_no_point_is() -> None:
    unit = Unit("GB/s", 1e9)
    for heights, side in (((10, 40), "start"), ((40, 10), "end"), ((10, 10), "end")):
        points = tuple(PlotPoint(x, height * 1e9) for x, height in enumerate(heights))
        drawn = curve([Series("one", points)], "MiB", unit, [Ceiling(40e9, "peak")], "what")
        assert ('text-anchor="end" class="unit">peak' in drawn) == (side == "end")


def test_a_predicted_series_has_the_colour_of_the_one_before() -> None:
    point = (PlotPoint(1, 1),)
    found = colours([Series("a", point), Series("b", point, predicted=True), Series("c", point)])
    assert found == ["s0", "s0", "s1"]


def test_a_forest_shows_what_changed_most_slowest_first() -> None:
    deltas = [
        Delta(f"row {i}", f"t-{i}", i / 1000, i / 1000 - 0.01, i / 1000 + 0.01, "pass", 0.01)
        for i in range(-50, 50)
    ]
    deltas.append(Delta("failed", "t-f", 0.0, 0.0, 0.0, "fail"))
    drawn = largest(deltas)
    assert len(drawn) == MOST
    assert [one.delta for one in drawn] == sorted((one.delta for one in drawn), reverse=True)
    assert {"failed", "row -50", "row 49"} <= {one.name for one in drawn}
    text = forest(deltas)
    assert text.count('href="#t-') == MOST
    assert "row 49: +4.90 %, +3.90 to +5.90 %" in text


def test_a_ladder_is_quickest_first_and_logarithmic() -> None:
    drawn = ladder(
        [Rung("host", "t-1", 1.2e-6), Rung("L2", "t-2", 150e-9, 1e-9), Rung("DRAM", "t-3", 600e-9)]
    )
    assert re.findall(r">(L2|DRAM|host)</text>", drawn) == ["L2", "DRAM", "host"]
    widths = [float(width) for width in re.findall(r'class="s0 bar"[^>]* width="([\d.]+)"', drawn)]
    assert widths[1] - widths[0] == pytest.approx(2 * (widths[2] - widths[1]), abs=0.5)


def test_a_history_ends_with_this_run() -> None:
    past = [
        Past(datetime(2026, 11, day, tzinfo=timezone.utc), 1e-4, 1e-6, of)
        for day, of in ((1, None), (2, "a|b<"))
    ]
    drawn = history(past, 2e-4, 1e-6)
    assert drawn.count("<circle") == 1  # this run's; the others are marks on the line
    ((thread, tips),) = re.findall(r'thread" d="M([^"]*)" data-tips="([^"]*)"', drawn)
    assert tips == "11-01 100.0 us|11-02 a/b&lt; 100.0 us"
    at = [tuple(map(float, point.split())) for point in thread.split("L")]
    assert at[0][0] < at[1][0] < at[2][0]
    assert at[2][1] < at[1][1] == at[0][1]
    assert "2026-11-02" in drawn
