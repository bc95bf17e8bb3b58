"""Quantities as text: sizes, times, rates, shares, margins, budgets. Parsing is strict, formatting short.

GB is 1e9 bytes, GiB is 2^30 bytes. A text without a unit, with an unknown unit, a negative number or NaN is refused with what is accepted.
Plain numbers are in base units where that is unambiguous: bytes, seconds, bytes per second.
"""

from __future__ import annotations

import math
import operator
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Imported where a text is parsed: a session without --gpumem parses none.
    from collections.abc import Callable, Iterable
    from fractions import Fraction
    from typing import TypeGuard

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_SIZES = {
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "kB": KB,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
}
# Nanoseconds, so that all factors are whole and parsing can be exact. Micro has two code points.
_TIMES = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_RATES = {f"{unit}/s": factor for unit, factor in _SIZES.items()}

SIZES_ACCEPTED = (
    'a size such as "64 MiB", "1.5 GiB" or "2 GB" (units B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)'
)
TIMES_ACCEPTED = 'a time such as "12 us", "0.6 ms" or "1 s" (units ns, us, ms, s, min, h)'
RATES_ACCEPTED = 'a rate such as "2.4 TB/s" or "900 GB/s", or "85% of peak"'
SHARES_ACCEPTED = 'a share such as "0.1%" or "5 %"'
MARGINS_ACCEPTED = 'a slow-down such as "1%", "1% + 0.2 us" or "0.2 us"'
CLAIMS_ACCEPTED = 'the label of another measurement of the test such as "faulting", or with a factor of 1 or more "20 x faulting"'
GROWTHS_ACCEPTED = 'a growth such as "0 B", "64 MiB", "5%" or "5% + 64 MiB"'
BUDGETS_ACCEPTED = 'a time for each measurement such as "1 s", or for the whole run such as "10 min" or "90 s total"'

# Bounded, so that no text makes a number of a million digits.
_NUMBER = r"(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"
# Compiled at their first use: a session without --gpumem uses none.
_QUANTITY = rf"({_NUMBER})\s*([^\s0-9.+-][^\s0-9]*)"
_SHARE_OF_PEAK = rf"({_NUMBER})\s*%\s+of\s+peak"
_CLAIM = rf"(?:({_NUMBER})\s*x\s+)?(\S(?s:.*))"
_BUDGET = r"(?s:(.*?))(?:\s+(total|each))?"
_PLUS = r"(?<![0-9.][eE])\+"
"""Of a sum: the sign of an exponent ("1e+2 us") follows an e behind digits."""


class QuantityError(ValueError):
    """A text that is no such quantity; the message shows the value and what is accepted."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that a wrong one is nearest to, for the end of an error; empty if none is near."""
    import difflib  # here: few sessions need it

    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def refused(value: object, accepted: str, why: str = "is not understood") -> QuantityError:
    """The error of a value: what is wrong with it, and what is accepted."""
    return QuantityError(f"{value!r} {why}; accepted is {accepted}")


# Share, Margin, Budget: named tuples, since dataclasses take ten times as long to make, in every pytest session.
class Share(NamedTuple):
    """A bandwidth as a share of the device's theoretical peak."""

    value: float  # 0.85 for "85% of peak"


class Margin(NamedTuple):
    """An allowed slow-down or growth: `relative` x baseline + `absolute`."""

    relative: float  # share of the baseline's figure, 0.01 for "1%"
    absolute: float  # on top: seconds or bytes

    def over(self, latency: float) -> float:
        """The allowed slow-down of a baseline of `latency` seconds, as a share of it."""
        return self.relative + self.absolute / latency

    def most(self, count: int) -> int:
        """The largest allowed count where the baseline's is `count`. Exact: as floats, 45 + 40 % are less than 63."""
        from fractions import Fraction

        return count + math.floor(count * Fraction(str(self.relative)) + int(self.absolute))


class Budget(NamedTuple):
    """Time to spend on measuring: exactly one of the two is given."""

    each: float | None = None  # seconds for each measurement
    total: float | None = None  # seconds for all measurements of the run together


def parse_bytes(value: str | int) -> int:
    """Bytes of a size such as "64 MiB", or of a plain int. Raises `QuantityError`: not a size, negative, or not a whole number of bytes."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        if operator.index(value) < 0:
            raise refused(value, SIZES_ACCEPTED, "is negative")
        return operator.index(value)
    exact = _exact(value, _SIZES, SIZES_ACCEPTED)
    if exact.denominator != 1:
        raise refused(value, SIZES_ACCEPTED, "is not a whole number of bytes")
    return exact.numerator


def parse_time(value: str | float) -> float:
    """Seconds of a time such as "12 us", or of a plain number of seconds. Raises `QuantityError`: not a time, negative or not finite."""
    if _is_number(value):
        return _finite(value, TIMES_ACCEPTED, value)
    return _finite(value, TIMES_ACCEPTED, _exact(value, _TIMES, TIMES_ACCEPTED) / 10**9)


def parse_rate(value: str | float) -> float | Share:
    """Bytes per second of a rate such as "2.4 TB/s" or of a plain number; a `Share` for "85% of peak".
    Raises `QuantityError`: not a rate, negative, not finite, or above 100% of peak.
    """
    if _is_number(value):
        return _finite(value, RATES_ACCEPTED, value)
    if isinstance(value, str) and (match := re.fullmatch(_SHARE_OF_PEAK, value.strip())):
        share = float(match[1]) / 100
        if share > 1:
            raise refused(value, RATES_ACCEPTED, "is above the peak")
        return Share(share)
    return _finite(value, RATES_ACCEPTED, _exact(value, _RATES, RATES_ACCEPTED))


def parse_share(value: str) -> float:
    """The share of a text such as "0.1%": 0.001.

    A plain number is refused: 0.1 could mean 10 % or 0.1 %.
    Raises `QuantityError`: not a share, or negative.
    """
    return _finite(value, SHARES_ACCEPTED, _exact(value, {"%": 1}, SHARES_ACCEPTED) / 100)


def parse_part(value: str, why: str, *, whole: bool = True) -> float:
    """The share of a text, above 0 and up to 100 %, or below 100 % if not `whole`.
    Raises `QuantityError`: it is another; `why` says what is wrong with it, such as "is no gain".
    """
    share = parse_share(value)
    if not 0 < share <= 1 or (share == 1 and not whole):
        raise refused(
            value, f"{SHARES_ACCEPTED}, above 0 and {'up to' if whole else 'below'} 100 %", why
        )
    return share


def _sum(value: str, parts: list[str], parse: Callable[[str], float], accepted: str) -> Margin:
    """The margin of a sum with at most one share, and one amount, which `parse` reads."""
    found: dict[str, float] = {}
    for part in parts:
        kind = "relative" if "%" in part else "absolute"
        try:
            if kind in found:
                raise refused(value, accepted)
            found[kind] = parse_share(part) if "%" in part else parse(part)
        except QuantityError:
            raise refused(value, accepted) from None
    return Margin(**{"relative": 0.0, "absolute": 0, **found})


def parse_margin(value: str) -> Margin:
    """The allowed slow-down of a text such as "1%", "1% + 0.2 us" or "0.2 us", in seconds.
    Raises `QuantityError`: not a margin, the same kind of part twice, or zero.
    """
    margin = _sum(
        value, re.split(_PLUS, _text(value, MARGINS_ACCEPTED)), parse_time, MARGINS_ACCEPTED
    )
    if not any(margin):
        raise refused(
            value,
            MARGINS_ACCEPTED,
            "allows nothing, and no measurement can show that nothing changed",
        )
    return margin


def parse_growth(value: str) -> Margin:
    """The allowed growth of a count of bytes, such as "0 B", "5%" or "5% + 64 MiB".
    Raises `QuantityError`: not a growth, or the same kind of part twice.
    """
    return _sum(
        value, re.split(_PLUS, _text(value, GROWTHS_ACCEPTED)), parse_bytes, GROWTHS_ACCEPTED
    )


def _text(value: object, accepted: str) -> str:
    if isinstance(value, str):
        return value
    raise refused(value, accepted)


def parse_claim(value: str) -> tuple[float, str]:
    """The factor and the label of a claim such as "20 x faulting"; the factor of "faulting" is 1.
    Raises `QuantityError`: no label, or a factor below 1.
    """
    match = re.fullmatch(_CLAIM, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise refused(value, CLAIMS_ACCEPTED)
    factor = _finite(value, CLAIMS_ACCEPTED, float(match[1])) if match[1] is not None else 1.0
    if factor < 1:
        raise refused(value, CLAIMS_ACCEPTED, "claims less than no difference")
    return factor, match[2]


def parse_budget(value: str | float) -> Budget:
    """The budget of a text: times in ns, us, ms and s are for each measurement, times in min and h for the whole run, unless "total" or
    "each" follows the time. A plain number is seconds for each measurement.
    Raises `QuantityError`: not a budget, or zero.
    """
    if _is_number(value):
        written, word, seconds = "", "each", _finite(value, BUDGETS_ACCEPTED, value)
    else:
        match = re.fullmatch(_BUDGET, value.strip()) if isinstance(value, str) else None
        if match is None:
            raise refused(value, BUDGETS_ACCEPTED)
        written, word = match[1], match[2]
        try:
            seconds = parse_time(written)
        except QuantityError:
            raise refused(value, BUDGETS_ACCEPTED) from None
    if seconds == 0:
        raise refused(value, BUDGETS_ACCEPTED, "leaves no time")
    if word == "total" or (word is None and written.endswith(("min", "h"))):
        return Budget(total=seconds)
    return Budget(each=seconds)


def format_bytes(nbytes: int) -> str:
    """An exact text, such as "64 MiB", "31.25 MiB", "2 GB" or "1234567 B"; `parse_bytes` gives the same number back."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    texts = []
    for unit in ("TiB", "GiB", "MiB", "KiB", "B", "TB", "GB", "MB", "KB"):
        thousandths, rest = divmod(nbytes * 1000, _SIZES[unit])
        if rest == 0 and thousandths >= 1000:
            text = (
                f"{thousandths // 1000}.{thousandths % 1000:03d}".rstrip("0").rstrip(".")
                + f" {unit}"
            )
            if "i" in unit and thousandths < 1_024_000:
                return text
            texts.append(text)
    return min(texts, key=len, default="0 B")


def short_bytes(nbytes: float) -> str:
    """Whole bytes in four significant digits at most, in binary units: "64 MiB", "1.5 GiB", "11.77 MiB", "512 B"."""
    nbytes = round(nbytes)
    if nbytes < 0:
        return "-" + short_bytes(-nbytes)
    unit, factor = next(
        (
            (unit, _SIZES[unit])
            for unit in ("TiB", "GiB", "MiB", "KiB")
            if nbytes >= 0.99995 * _SIZES[unit]
        ),
        ("B", 1),
    )
    text = _digits(nbytes / factor, 4)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def sizes(*values: int) -> tuple[str, ...]:
    """Sizes side by side: rounded as `short_bytes`, exact where two that differ would look the same."""
    rounded = tuple(map(short_bytes, values))
    if len(set(rounded)) == len(set(values)):
        return rounded
    return tuple(
        text if "i" in text else f"{value} B"
        for value, text in zip(values, map(format_bytes, values), strict=True)
    )


def format_time(seconds: float) -> str:
    """Four significant digits: "268.3 us", "1.280 us", "12.60 ms"."""
    return _scaled_text(seconds, (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)))


def format_rate(bytes_per_second: float) -> str:
    """Four significant digits in the unit that datasheets use: "3002 GB/s", "55.30 GB/s", "12.50 TB/s"."""
    # GB/s up to four digits: 2990 and 3002 are easier to compare than 2.990 TB/s and 987.1 GB/s.
    ladder = (("B/s", 1.0), ("KB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9))
    return _scaled_text(
        bytes_per_second, (*ladder, ("TB/s", 1e13)) if abs(bytes_per_second) >= 9999.5e9 else ladder
    )


def format_share(share: float, *, sign: bool = False) -> str:
    """Three significant digits without an exponent: "85.3 %", "0.100 %"; with `sign` also "+1.20 %"."""
    return f"{_digits(share * 100, 3, sign)} %"


def format_shares(low: float, high: float) -> tuple[str, str]:
    """Two signed shares with three digits, or with up to six where they are equal otherwise: "+73.61 %", "+73.64 %"."""
    for digits in (3, 4, 5, 6):
        texts = f"{_digits(low * 100, digits, True)} %", f"{_digits(high * 100, digits, True)} %"
        if texts[0] != texts[1]:
            break
    else:
        return format_share(low, sign=True), format_share(high, sign=True)
    return texts


class Quantity(float):
    """A figure in SI units that a failed assertion shows with its unit. In every other way a float: `str` and formats give the number."""

    __slots__ = ("write",)
    write: Callable[[float], str]

    def __new__(cls, value: float, write: Callable[[float], str]) -> Quantity:
        """`write` gives the text of a figure of this kind, such as `format_time`."""
        made = super().__new__(cls, value)
        made.write = write
        return made

    def __repr__(self) -> str:
        return self.write(float(self))

    __str__ = float.__repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def comparison_text(left: object, relation: str, right: object) -> list[str] | None:
    """Lines about a comparison that failed, such as ["3188 GB/s > 3319 GB/s", "3.95 % below"]; None unless a side is a `Quantity`. A plain
    number on the other side gets the unit of the quantity."""
    quantity = next((side for side in (left, right) if isinstance(side, Quantity)), None)
    if quantity is None or relation not in ("<", "<=", ">", ">=", "=="):
        return None
    if not (_is_number(left) and _is_number(right)):
        return None
    lines = [f"{quantity.write(float(left))} {relation} {quantity.write(float(right))}"]
    if right > 0 and left != right:
        lines.append(
            f"{format_share(abs(left / right - 1))} {'above' if left > right else 'below'}"
        )
    return lines


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value: object, accepted: str, number: float | Fraction) -> float:
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise refused(value, accepted, "is not a finite number")
    if result < 0:
        raise refused(value, accepted, "is negative")
    return result


def _exact(value: object, units: dict[str, int], accepted: str) -> Fraction:
    """A text as a multiple of the base unit. Exact, because 0.2 x 1e-6 is not the float that 0.2e-6 is, and floats miss single bytes of
    large sizes."""
    from fractions import Fraction

    match = re.fullmatch(_QUANTITY, value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise refused(value, accepted)
    return Fraction(match[1]) * units[match[2]]


def _digits(value: float, significant: int, sign: bool = False) -> str:
    """`value` with that many significant digits, never with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:{'+' if sign else ''}.0f}"
    # Rounding may carry into a new digit (9.996 -> 10.00): read the exponent after it.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return f"{value:{'+' if sign else ''}.{max(0, significant - 1 - exponent)}f}"


def _scaled_text(value: float, ladder: tuple[tuple[str, float], ...]) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {ladder[-1][0]}"
    rounded = abs(float(f"{value:.3e}"))
    unit, factor = max(
        (step for step in ladder if rounded >= step[1]), key=lambda step: step[1], default=ladder[0]
    )
    factor = 1e12 if unit == "TB/s" else factor
    return f"{_digits(value / factor, 4)} {unit}"
