"""The limits: an entry in a table each, from which options, marker and call keywords follow.

docs/architecture.md says what a new limit needs. pytest imports this module in every session: it is
cheap to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from pytest_gpumem import units
from pytest_gpumem.units import refused

YES = ("1", "true", "yes", "on")  # texts of a flag that is set
BASE = "base"  # as a limit on an exact count: no more than the base has


class LimitKeywords(TypedDict, total=False):
    """Limits as keywords of a measurement. None lifts the limit of the marker and of the
    session."""

    min_bandwidth: str | float | None
    max_latency: str | float | None
    max_regression: str | float | None
    faster_than: str | None
    min_overlap: str | None
    max_gpu_page_faults: int | str | None
    max_migrated: int | str | None
    max_kernels: int | str | None
    max_copies: int | str | None
    max_copied_bytes: int | str | None
    max_waits: int | str | None
    max_spill: int | str | None


class FootprintKeywords(TypedDict, total=False):
    """Limits as keywords of `gpu_memory.watch`. None lifts the limit of the marker and of the
    session."""

    max_peak: int | str | None
    max_kept: int | str | None
    max_peak_regression: str | None


class Limit(NamedTuple):
    name: str  # of the keyword, the ini key and the option
    parse: Callable[[Any], str]  # from a user's value to the kept text; raises `QuantityError`
    looser: Callable[[str, str], bool]  # True if the first text can demand less than the second
    help: str
    metavar: str | None  # of the option in the help; None: a limit of single tests, no option
    ini_only: bool = False  # no option of the command line and no variable


def _as_written(parse: Callable[[Any], object]) -> Callable[[Any], str]:
    def checked(value: Any) -> str:
        parse(value)
        return str(value).strip()

    return checked


def _rate(value: Any) -> units.Share | float:
    if not isinstance(value, str):  # a number without a unit could never fail a test
        raise refused(value, units.RATES_ACCEPTED, "has no unit")
    rate = units.parse_rate(value)
    if rate in (0, units.Share(0)):
        raise refused(value, units.RATES_ACCEPTED, "demands nothing")
    return rate


def _lower_rate(limit: str, other: str) -> bool:
    rate, other_rate = units.parse_rate(limit), units.parse_rate(other)
    if isinstance(rate, units.Share) and isinstance(other_rate, units.Share):
        return rate.value < other_rate.value
    if isinstance(rate, units.Share) or isinstance(other_rate, units.Share):
        return True  # the device decides which of a rate and a share demands more
    return rate < other_rate


def _time(value: Any) -> float:
    if not isinstance(value, str):
        raise refused(value, units.TIMES_ACCEPTED, "has no unit")
    seconds = units.parse_time(value)
    if seconds == 0:
        raise refused(value, units.TIMES_ACCEPTED, "cannot be met")
    return seconds


def _longer(limit: str, other: str) -> bool:
    return units.parse_time(limit) > units.parse_time(other)


def _wider(parse: Callable[[str], units.Margin]) -> Callable[[str, str], bool]:
    def wider(limit: str, other: str) -> bool:
        margin, other_margin = parse(limit), parse(other)
        return margin.relative > other_margin.relative or margin.absolute > other_margin.absolute

    return wider


def _looser_claim(limit: str, other: str) -> bool:
    factor, label = units.parse_claim(limit)
    other_factor, other_label = units.parse_claim(other)
    return label != other_label or factor < other_factor


def _part(value: Any) -> float:
    return units.parse_part(value, "cannot be hidden")


def _smaller_part(limit: str, other: str) -> bool:
    return units.parse_share(limit) < units.parse_share(other)


def _size(value: Any) -> str:
    return units.format_bytes(units.parse_bytes(value))


def _positive_size(value: Any) -> str:
    if units.parse_bytes(value) == 0:
        raise refused(value, units.SIZES_ACCEPTED, "cannot be met")
    return _size(value)


def _number_or_base(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and re.fullmatch(rf"\s*([0-9]{{1,12}}|{BASE})\s*", value):
        return value.strip()
    accepted = f'a whole number from 0 on, or "{BASE}", for no more than the base has'
    raise refused(value, accepted, "is no number")


def _size_or_base(value: Any) -> str:
    if isinstance(value, str) and value.strip() == BASE:
        return BASE
    try:
        return _size(value)
    except units.QuantityError as error:
        remedy = f'{error}, or "{BASE}", for no more than the base has'
        raise units.QuantityError(remedy) from None


def _higher(limit: str, other: str) -> bool:
    if BASE in (limit, other):
        return limit != other  # the base decides which of the two demands more
    return count_of(limit) > count_of(other)


def count_of(text: str) -> int:
    """Return the number, or the bytes, of a limit on a count."""
    return int(text) if text.strip().isdecimal() else units.parse_bytes(text)


def _number(name: str, text: str) -> Limit:
    """Return a limit on an exact number of a launch."""
    return Limit(name, _number_or_base, _higher, text, "NUMBER", ini_only=True)


def _bytes(name: str, text: str) -> Limit:
    """Return a limit on exact bytes of a launch."""
    return Limit(name, _size_or_base, _higher, text, "BYTES", ini_only=True)


_OF_TIME = (
    Limit(
        "min_bandwidth",
        _as_written(_rate),
        _lower_rate,
        'Least bandwidth, such as "2.4 TB/s" or "85% of peak".',
        "RATE",
    ),
    Limit("max_latency", _as_written(_time), _longer, 'Longest latency, such as "12 us".', "TIME"),
    Limit(
        "max_regression",
        _as_written(units.parse_margin),
        _wider(units.parse_margin),
        'Largest slow-down against the baseline, such as "1%" or "1% + 0.2 us".',
        "MARGIN",
    ),
    Limit(
        "faster_than",
        _as_written(units.parse_claim),
        _looser_claim,
        'Another measurement of the test to beat, such as "faulting" or "20 x faulting".',
        None,
    ),
    Limit(
        "min_overlap",
        _as_written(_part),
        _smaller_part,
        'Least share that overlapping work hides of what overlap can hide, such as "80%".',
        None,
    ),
)
_FOOTPRINT = (
    Limit(
        "max_peak",
        _positive_size,
        _higher,
        'Most device memory that a test uses at once, such as "2 GiB".',
        "SIZE",
    ),
    Limit(
        "max_kept",
        _size,
        _higher,
        'Most memory that a test still uses after its end, such as "0 B".',
        "SIZE",
    ),
    Limit(
        "max_peak_regression",
        _as_written(units.parse_growth),
        _wider(units.parse_growth),
        'Largest growth of the peak against the baseline, such as "0 B", "5%" or "5% + 64 MiB".',
        "GROWTH",
    ),
)
_LAUNCH = (
    _number("max_gpu_page_faults", "Most page faults of the GPU in a launch."),
    _bytes(
        "max_migrated",
        'Most bytes of managed memory that migrate in a launch, such as "64 MiB".',
    ),
    _number("max_kernels", "Most kernels in a launch."),
    _number("max_copies", "Most copies in a launch."),
    _bytes("max_copied_bytes", 'Most bytes that copies move in a launch, such as "64 MiB".'),
    _bytes("max_spill", "Most local memory of a thread of any kernel: spills and stack."),
)
MAX_WAITS = "max_waits"  # in a launch; of a test that measures nothing, in its body
_WAITS = _number(
    MAX_WAITS,
    "Most times that the host waits for the device: in a launch, or in the body of a test that "
    "measures nothing.",
)

LIMITS: Mapping[str, Limit] = MappingProxyType(
    {limit.name: limit for limit in (*_OF_TIME, *_LAUNCH, _WAITS, *_FOOTPRINT)}
)
"""All limits by name."""
OF_FOOTPRINT = tuple(limit.name for limit in _FOOTPRINT)  # of the memory of a test or a part
OF_LAUNCH = tuple(limit.name for limit in _LAUNCH)
"""Limits on one launch: a test that measures nothing cannot have them."""
OF_MEASUREMENT = tuple(name for name in LIMITS if name not in OF_FOOTPRINT)


def of_the_test(origin: str | None) -> bool:
    """Return True if the origin of a limit is the test itself, or in a gate that of BASE: no option
    replaces it."""
    return origin is not None and origin.partition(" of ")[0] in ("marker", "call")


def demands_more(name: str, limit: str | None, other: str | None) -> bool:
    """Return True if a value of a limit can demand more than another. None is no limit."""
    if limit is None or limit == other:
        return False
    return other is None or LIMITS[name].looser(other, limit)
