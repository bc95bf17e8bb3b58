"""Quantities as text: sizes, times, rates, shares, margins and budgets.

A plain number is of bytes; all else has a unit. What is refused raises `QuantityError`.
"""

from __future__ import annotations

import math
import operator
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Imported where a text is parsed: a session without --gpumem parses none.
    from collections.abc import Callable, Iterable, Mapping
    from fractions import Fraction
    from typing import TypeGuard

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_BINARY = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_DECIMAL = {"KB": KB, "MB": MB, "GB": GB, "TB": TB}
_SIZES = {**_BINARY, **_DECIMAL, "kB": KB}
_RATES = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
# In nanoseconds: whole factors make parsing exact. Micro has two code points.
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
_TIMES |= {"min": 60 * 10**9, "h": 3600 * 10**9}

SIZES_ACCEPTED = (
    'a size such as "64 MiB", "1.5 GiB" or "2 GB" (units B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)'
)
TIMES_ACCEPTED = 'a time such as "12 us", "0.6 ms" or "1 s" (units ns, us, ms, s, min, h)'
RATES_ACCEPTED = 'a rate such as "2.4 TB/s" or "900 GB/s", or "85% of peak"'
_SHARES_ACCEPTED = 'a share such as "0.1%" or "5 %"'
_MARGINS_ACCEPTED = 'a slow-down such as "1%", "1% + 0.2 us" or "0.2 us"'
_GROWTHS_ACCEPTED = 'a growth such as "0 B", "64 MiB", "5%" or "5% + 64 MiB"'
_CLAIMS_ACCEPTED = (
    'the label of another measurement such as "faulting", or with a factor of 1 or more '
    '"20 x faulting"'
)
_BUDGETS_ACCEPTED = (
    'a time for each measurement such as "1 s", or for the whole run such as "10 min" or '
    '"90 s total"'
)

# Bounded, so that no text makes a number of a million digits.
_NUMBER = r"(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"
_PLUS = r"(?<![eE])\+"  # of a sum, not of an exponent


class ShownError(Exception):
    """An error that is shown with the user's line that led to it, without a traceback."""


class QuantityError(ShownError, ValueError):
    """A text that is no such quantity: a line with the value and what is accepted."""


def counted(count: int, thing: str) -> str:
    """Return "1 process", "3 processes", "8 placements", "2 copies"."""
    if count == 1:
        return f"1 {thing}"
    if thing.endswith("py"):
        return f"{count} {thing[:-1]}ies"
    if thing.endswith(("s", "ch")):
        return f"{count} {thing}es"
    return f"{count} {thing}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest known name for the end of an error, or an empty text."""
    import difflib

    for match in difflib.get_close_matches(name, list(known), n=1):
        return f" (did you mean {match}?)"
    return ""


def refused(value: object, accepted: str, why: str = "is not understood") -> QuantityError:
    return QuantityError(f"{value!r} {why}; accepted is {accepted}")


class Margin(NamedTuple):
    """An allowed slow-down or growth: `relative` x baseline + `absolute`."""

    relative: float  # share of the baseline's figure, 0.01 for "1%"
    absolute: float  # on top: seconds or bytes

    def over(self, latency: float) -> float:
        """Return the allowed slow-down as a share of a baseline of `latency` seconds."""
        return self.relative + self.absolute / latency

    def most(self, count: int) -> int:
        """Return the largest allowed count where the baseline's is `count`. Exact."""
        from fractions import Fraction

        return count + math.floor(count * Fraction(str(self.relative)) + int(self.absolute))


def parse_bytes(value: str | int, accepted: str = SIZES_ACCEPTED) -> int:
    """Return the bytes of a size such as "64 MiB", or of an integer."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        if operator.index(value) < 0:
            raise refused(value, accepted, "is negative")
        return operator.index(value)
    size = _quantity(value, _SIZES, accepted)
    _finite(value, accepted, size)
    if size.denominator != 1:
        raise refused(value, accepted, "is not a whole number of bytes")
    return size.numerator


def parse_time(value: str) -> float:
    """Return the seconds of a time such as "12 us"."""
    return _finite(value, TIMES_ACCEPTED, _quantity(value, _TIMES, TIMES_ACCEPTED) / 10**9)


def parse_rate(value: str) -> tuple[float, bool]:
    """Return bytes per second of "2.4 TB/s" and False, or the share of "85% of peak" and True."""
    match = _match(rf"({_NUMBER})\s*%\s+of\s+peak", value)
    if match is None:
        return _finite(value, RATES_ACCEPTED, _quantity(value, _RATES, RATES_ACCEPTED)), False
    share = float(match[1]) / 100
    if share > 1:
        raise refused(value, RATES_ACCEPTED, "is above the peak")
    return share, True


def parse_share(value: str) -> float:
    """Return 0.001 for "0.1%". A number is refused: 0.1 could mean 10 % or 0.1 %."""
    return _finite(value, _SHARES_ACCEPTED, _quantity(value, {"%": 1}, _SHARES_ACCEPTED) / 100)


def parse_part(value: str, why: str, *, whole: bool = True) -> float:
    """Return a share above 0 and up to 100 %, or below 100 % if not `whole`."""
    share = parse_share(value)
    if not 0 < share <= 1 or (share == 1 and not whole):
        bound = "up to" if whole else "below"
        raise refused(value, f"{_SHARES_ACCEPTED}, above 0 and {bound} 100 %", why)
    return share


def parse_margin(value: str) -> Margin:
    """Return the allowed slow-down, in seconds, of "1%", "1% + 0.2 us" or "0.2 us", not 0."""
    margin = _sum(value, parse_time, _MARGINS_ACCEPTED)
    if margin == (0, 0):
        why = "allows nothing, and no measurement can show that nothing changed"
        raise refused(value, _MARGINS_ACCEPTED, why)
    return margin


def parse_growth(value: str) -> Margin:
    """Return the allowed growth of "0 B", "5%" or "5% + 64 MiB", in bytes."""
    return _sum(value, parse_bytes, _GROWTHS_ACCEPTED)


def parse_claim(value: str) -> tuple[float, str]:
    """Return factor and label of "20 x faulting"; the factor of "faulting" is 1."""
    match = _match(rf"(?:({_NUMBER})\s*x\s+)?(\S(?s:.*))", value)
    if match is None:
        raise refused(value, _CLAIMS_ACCEPTED)
    factor = _finite(value, _CLAIMS_ACCEPTED, float(match[1] or 1))
    if factor < 1:
        raise refused(value, _CLAIMS_ACCEPTED, "claims less than no difference")
    return factor, match[2]


def parse_budget(value: str) -> tuple[float | None, float | None]:
    """Return the seconds for each measurement, or else for the whole run, as for min and h."""
    match = _match(r"(?s)(.*?)(?:\s+(total|each))?", value)
    time, scope = match.groups() if match is not None else (value, None)
    try:
        seconds = parse_time(time)
    except QuantityError:
        raise refused(value, _BUDGETS_ACCEPTED) from None
    if seconds == 0:
        raise refused(value, _BUDGETS_ACCEPTED, "leaves no time")
    if scope == "total" or (scope is None and time.endswith(("min", "h"))):
        return None, seconds
    return seconds, None


def format_bytes(nbytes: int) -> str:
    """Return an exact text that `parse_bytes` reads: "31.25 MiB", "2 GB" or "1234567 B"."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    return _exact(nbytes, _BINARY, _DECIMAL)


def _exact(nbytes: int, *systems: Mapping[str, int]) -> str:
    for units in systems:
        unit, factor = _largest(units, nbytes)
        if nbytes >= factor > 1 and nbytes * 1000 % factor == 0:
            return f"{nbytes / factor:.12g} {unit}"
    return f"{nbytes} B"


def short_bytes(nbytes: float) -> str:
    """Return bytes with four significant digits at most: "64 MiB", "11.77 MiB", "512 B"."""
    nbytes = round(nbytes)
    if nbytes < 0:
        return "-" + short_bytes(-nbytes)
    unit, factor = _largest(_BINARY, nbytes / 0.99995)  # 1023.99 KiB are 1 MiB
    text = _digits(nbytes / factor, 4)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}"


def sizes(*values: int) -> tuple[str, ...]:
    """Return sizes side by side: short, or exact where two that differ look the same."""
    texts = tuple(short_bytes(value) for value in values)
    if len(set(texts)) == len(set(values)):
        return texts
    return tuple(_exact(value, _BINARY) for value in values)


def format_time(seconds: float) -> str:
    """Return four significant digits: "268.3 us", "1.280 us", "12.60 ms"."""
    return _scaled(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0})


def format_rate(bytes_per_second: float) -> str:
    """Return four significant digits, as datasheets do in GB/s up to four: "3002 GB/s"."""
    if abs(bytes_per_second) >= 9999.5e9:
        return _scaled(bytes_per_second, {"TB/s": 1e12})
    return _scaled(bytes_per_second, {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9})


def format_share(share: float, *, sign: bool = False) -> str:
    """Return three significant digits: "85.3 %", "0.100 %"; with `sign` also "+1.20 %"."""
    return f"{_digits(share * 100, 3, sign)} %"


class Quantity(float):
    """A figure in SI units that a failed assertion shows with its unit."""

    __slots__ = ("write",)
    write: Callable[[float], str]

    def __new__(cls, value: float, write: Callable[[float], str]) -> Quantity:
        quantity = super().__new__(cls, value)
        quantity.write = write
        return quantity

    def __repr__(self) -> str:
        return self.write(float(self))

    __str__ = float.__repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


def comparison_text(left: object, relation: str, right: object) -> list[str] | None:
    """Return ["3188 GB/s > 3319 GB/s", "3.95 % below"] of a failed comparison with a `Quantity`."""
    if not (_is_number(left) and _is_number(right)):
        return None
    quantity = left if isinstance(left, Quantity) else right
    if not isinstance(quantity, Quantity) or relation not in ("<", "<=", ">", ">=", "=="):
        return None
    lines = [f"{quantity.write(float(left))} {relation} {quantity.write(float(right))}"]
    if right > 0 and left != right:
        side = "above" if left > right else "below"
        lines.append(f"{format_share(abs(left / right - 1))} {side}")
    return lines


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _match(pattern: str, value: object) -> re.Match[str] | None:
    return re.fullmatch(pattern, value.strip()) if isinstance(value, str) else None


def _quantity(value: object, units: Mapping[str, int], accepted: str) -> Fraction:
    from fractions import Fraction

    match = _match(rf"({_NUMBER})\s*([^\s0-9.+-][^\s0-9]*)", value)
    if match is None or match[2] not in units:
        raise refused(value, accepted)
    return Fraction(match[1]) * units[match[2]]


def _finite(value: object, accepted: str, number: float | Fraction) -> float:
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise refused(value, accepted, "is not a finite number")
    return result


def _sum(value: object, parse: Callable[[str], float], accepted: str) -> Margin:
    parts = re.split(_PLUS, value) if isinstance(value, str) else [""]
    shares = [part for part in parts if "%" in part]
    amounts = [part for part in parts if "%" not in part]
    if len(shares) > 1 or len(amounts) > 1:
        raise refused(value, accepted)
    try:
        relative = sum(parse_share(part) for part in shares)
        absolute = sum(parse(part) for part in amounts)
    except QuantityError:
        raise refused(value, accepted) from None
    return Margin(relative, absolute)


def _largest(units: Mapping[str, float], value: float) -> tuple[str, float]:
    first, *larger = units.items()
    for unit in reversed(larger):
        if value >= unit[1]:
            return unit
    return first


def _scaled(value: float, units: Mapping[str, float]) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f} {list(units)[-1]}"
    unit, factor = _largest(units, abs(value) / 0.99995)  # 999.96 us are 1.000 ms
    return f"{_digits(value / factor, 4)} {unit}"


def _digits(value: float, significant: int, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if value == 0 or not math.isfinite(value):
        return f"{value:{plus}.0f}"
    # Rounding may carry into a new digit (9.996 -> 10.00): the exponent is read after it.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return f"{value:{plus}.{max(0, significant - 1 - exponent)}f}"
