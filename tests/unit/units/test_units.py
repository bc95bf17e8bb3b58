"""Quantities: what is read, what is refused, and that what is printed can be read again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from cases import naming
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem import units
from pytest_gpumem.units import (
    GB,
    GiB,
    KiB,
    Margin,
    MiB,
    Quantity,
    QuantityError,
    comparison_text,
    format_rate,
    format_time,
)

PARSERS: list[Callable[[Any], Any]] = [
    units.parse_bytes,
    units.parse_time,
    units.parse_rate,
    units.parse_share,
    units.parse_margin,
    units.parse_budget,
]

JUNK: list[object] = [
    *(
        "",
        "  ",
        "64",
        "us",
        "GiB",
        "12 parsec",
        "64 mib",
        "64 gb/s",
        "-1 us",
        "-5%",
        "+5 us",
        "nan s",
        "NaN",
        "inf s",
    ),
    *(
        "1,5 us",
        "1_0 us",
        "0x10 B",
        "१ us",
        "12 us 3",
        "1e9999 s",
        "1e999 B",
        "1 us\n2 us",
        "1" * 5000 + " us",
        "1" * 5000 + "%",
    ),
    *(None, True, float("nan"), float("inf"), -1.0, b"1 us", ["1 s"]),
]


def test_sizes() -> None:
    cases: list[tuple[str | int, int | None]] = [
        ("64 MiB", 64 * MiB),
        (" 1.5 KiB ", 1536),
        ("2 GB", 2 * GB),
        ("1e9 B", GB),
        ("4.000000000000000001 TiB", None),
        (4096, 4096),
    ]
    for text, nbytes in cases:
        with naming(text):
            if nbytes is None:
                with pytest.raises(QuantityError, match="whole number of bytes"):
                    units.parse_bytes(text)
            else:
                assert units.parse_bytes(text) == nbytes


def test_times_are_the_nearest_float() -> None:
    cases = [
        ("12 us", 12e-6),
        ("268.3 µs", 268.3e-6),
        ("32 ns", 32e-9),
        ("1 h", 3600.0),
    ]
    for text, seconds in cases:
        assert units.parse_time(text) == seconds, text


def test_rates_and_shares_of_the_peak() -> None:
    assert units.parse_rate("2.4 TB/s") == (2.4e12, False)
    assert units.parse_rate("1 GiB/s") == (float(GiB), False)
    assert units.parse_rate("85% of peak") == (0.85, True)
    assert units.parse_rate("100 %  of peak") == (1.0, True)
    with pytest.raises(QuantityError, match="above the peak"):
        units.parse_rate("101% of peak")
    # A share alone does not say of what.
    with pytest.raises(QuantityError, match="85% of peak"):
        units.parse_rate("85%")


def test_a_plain_number_is_no_share() -> None:
    """0.1 could be 10 % or 0.1 %."""
    assert units.parse_share("0.1%") == 0.001
    for number in (0.1, 1, "0.1"):
        with pytest.raises(QuantityError, match="accepted is a share"):
            units.parse_share(number)  # type: ignore[arg-type]


def test_margins() -> None:
    for text, margin in [
        ("1%", Margin(0.01, 0.0)),
        ("1% + 0.2 us", Margin(0.01, 0.2e-6)),
        ("0.2us+1 %", Margin(0.01, 0.2e-6)),
        ("0.2 us", Margin(0.0, 0.2e-6)),
        ("2e+1 us + 5%", Margin(0.05, 20e-6)),
    ]:
        assert units.parse_margin(text) == margin, text


def test_margins_refused() -> None:
    cases: list[Any] = [
        "1% + 2%",
        "1% + 1 us + 1 us",
        "+ 1%",
        "0%",
        0.01,
    ]
    for text in cases:
        with naming(text), pytest.raises(QuantityError, match="accepted is a slow-down such as"):
            units.parse_margin(text)


def test_an_absolute_margin_weighs_more_on_a_short_kernel() -> None:
    margin = units.parse_margin("1% + 0.2 us")
    assert margin.over(100e-6) == pytest.approx(0.012)
    assert margin.over(10e-6) == pytest.approx(0.03)


def test_budgets() -> None:
    cases: list[tuple[str, tuple[float | None, float | None]]] = [
        ("1 s", (1.0, None)),
        ("500 ms", (0.5, None)),
        ("10min", (None, 600.0)),
        ("1 h", (None, 3600.0)),
        ("90 s total", (None, 90.0)),
        ("2 min each", (120.0, None)),
    ]
    for text, budget in cases:
        assert units.parse_budget(text) == budget, text


def test_budgets_refused() -> None:
    for text in [
        "0 s",
        "10",
        "total",
        "-1 s",
    ]:
        with naming(text):
            with pytest.raises(QuantityError) as refused:
                units.parse_budget(text)
            assert repr(text) in str(refused.value)
            assert "10 min" in str(refused.value)


def test_junk_is_refused_and_shown() -> None:
    for junk in JUNK:
        for parse in PARSERS:
            with naming(junk, parse):
                with pytest.raises(QuantityError) as refused:
                    parse(junk)
                message = str(refused.value)
                assert message.startswith(repr(junk))
                assert "accepted is a" in message
                assert "\n" not in message


@given(st.text(max_size=30) | st.from_regex(r"[0-9.eE+ -]{0,12} ?(us|%|GB|GB/s|of peak|total)?"))
def test_no_text_raises_anything_else(text: str) -> None:
    for parse in PARSERS:
        try:
            value = parse(text)
        except QuantityError:
            continue
        if isinstance(value, float):
            assert math.isfinite(value)
            assert value >= 0


@given(st.integers(0, 2**63))
def test_a_printed_size_is_exact(nbytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(nbytes)) == nbytes


@given(st.integers(1, 1000), st.sampled_from([KiB, MiB, GiB]))
def test_round_sizes_print_short(count: int, unit: int) -> None:
    name = {KiB: "KiB", MiB: "MiB", GiB: "GiB"}[unit]
    assert units.format_bytes(count * unit) == f"{count} {name}"


@given(st.floats(1e-9, 1e5))
def test_a_printed_time_is_right_to_four_digits(seconds: float) -> None:
    text = units.format_time(seconds)
    assert units.parse_time(text) == pytest.approx(seconds, rel=5.01e-4)
    assert 4 <= sum(c.isdigit() for c in text) <= 6


@given(st.floats(1.0, 1e16))
def test_a_printed_rate_is_right_to_four_digits(rate: float) -> None:
    assert units.parse_rate(units.format_rate(rate))[0] == pytest.approx(rate, rel=5.01e-4)


@given(st.floats(1e-6, 1e3))
def test_a_printed_share_is_right_to_three_digits(share: float) -> None:
    assert units.parse_share(units.format_share(share)) == pytest.approx(share, rel=5.01e-3)


def test_printing() -> None:
    for text, expected in [
        (units.format_time(2.683e-4), "268.3 us"),
        (units.format_time(0.99996e-3), "1.000 ms"),
        (units.format_time(-3e-9), "-3.000 ns"),
        (units.format_time(0.0), "0 s"),
        (units.format_rate(3.0023e12), "3002 GB/s"),
        (units.format_rate(9999.7e9), "10.00 TB/s"),
        (units.format_share(0.012, sign=True), "+1.20 %"),
        (units.format_share(-0.012, sign=True), "-1.20 %"),
        (units.format_bytes(32_768_000), "31.25 MiB"),
        (units.format_bytes(1234567), "1234567 B"),
        (units.format_bytes(-4096), "-4 KiB"),
    ]:
        assert text == expected, text


def test_a_comparison_has_units_on_both_sides() -> None:
    for left, relation, right, lines in [
        (
            Quantity(3188e9, format_rate),
            ">",
            0.99 * 3352e9,
            ["3188 GB/s > 3318 GB/s", "3.93 % below"],
        ),
        (1e-5, ">=", Quantity(2e-5, format_time), ["10.00 us >= 20.00 us", "50.0 % below"]),
        (Quantity(2e-5, format_time), "<", 0, ["20.00 us < 0 s"]),
        (3.0, ">", 2.0, None),
        (Quantity(2e-5, format_time), "in", [1.0], None),
        (Quantity(2e-5, format_time), "==", None, None),
    ]:
        assert comparison_text(left, relation, right) == lines, (left, relation, right, lines)


def test_sizes_side_by_side_are_in_binary_units() -> None:
    assert units.sizes(64 * MiB, 64 * units.MB) == ("64 MiB", "61.04 MiB")
    assert units.sizes(12_300_000, 12_300_004) == ("12300000 B", "12300004 B")
