"""The limits of a measurement: one entry each, from which options, marker keywords and call keywords follow.

A new limit needs an entry in `LIMITS`, a keyword in `LimitKeywords` or `FootprintKeywords`, a field of the same name in
`records.measurement.Limits`, and its rule in `judging.limits` or `judging.footprint`.

Cheap to import: pytest reads this module in every session, also in sessions without --gpumem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from pytest_gpumem import units
from pytest_gpumem.units import refused

YES = ("1", "true", "yes", "on")  # texts of a flag that is set


class LimitKeywords(TypedDict, total=False):
    """Limits as keywords of a measurement. None lifts the limit of the marker and of the session."""

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
    """Limits as keywords of `gpu_memory.watch`. None lifts the limit of the marker and of the session."""

    max_peak: int | str | None
    max_kept: int | str | None
    max_peak_regression: str | None


class Limit(NamedTuple):
    """One limit."""

    name: str  # keyword of the marker and of a measurement, and name of the option
    parse: Callable[
        [Any], str
    ]  # from the value that a user wrote to the text that is kept; raises `QuantityError`
    help: str
    metavar: (
        str | None
    )  # placeholder of the option's value in the help; None for a limit that is no option, because it is about one test
    looser: Callable[
        [str, str], bool
    ]  # True if the first text demands less than the second, at least of some measurements
    of_footprint: bool = False
    """It limits the memory of a test or of a part of it, and no measurement."""
    ini_only: bool = False  # no option of the command line and no variable


def _written(value: object, accepted: str) -> str:
    """A limit as text. A bare number is refused: in base units, 12 seconds or 2.4 bytes per second, it could never fail a test."""
    if not isinstance(value, str):
        raise refused(value, accepted, "has no unit")
    return value.strip()


def _as_written(parse: Callable[[Any], object]) -> Callable[[Any], str]:
    """Keep the text of a value that `parse` accepts."""

    def kept(value: Any) -> str:
        parse(value)
        return str(value).strip()

    return kept


def _more(parse: Callable[[str], Any]) -> Callable[[str, str], bool]:
    """The rule of `Limit.looser` for a limit of which more is looser."""
    return lambda one, other: bool(parse(one) > parse(other))


def _wider(parse: Callable[[str], units.Margin]) -> Callable[[str, str], bool]:
    """The rule of `Limit.looser` for a margin."""
    return lambda one, other: any(
        allowed > demanded for allowed, demanded in zip(parse(one), parse(other), strict=True)
    )


def _looser_claim(one: str, other: str) -> bool:
    (by, label), (demanded, of) = units.parse_claim(one), units.parse_claim(other)
    return label != of or by < demanded


def _min_bandwidth(value: Any) -> str:
    written = _written(value, units.RATES_ACCEPTED)
    if units.parse_rate(written) in (0, units.Share(0)):
        raise refused(value, units.RATES_ACCEPTED, "demands nothing")
    return written


def _looser_bandwidth(one: str, other: str) -> bool:
    least, demanded = units.parse_rate(one), units.parse_rate(other)
    if isinstance(least, units.Share) and isinstance(demanded, units.Share):
        return least.value < demanded.value
    # Which of a rate and a share of the peak demands more depends on the device.
    return isinstance(least, units.Share) or isinstance(demanded, units.Share) or least < demanded


def _max_latency(value: Any) -> str:
    written = _written(value, units.TIMES_ACCEPTED)
    if units.parse_time(written) == 0:
        raise refused(value, units.TIMES_ACCEPTED, "cannot be met")
    return written


def _number(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,12}\s*", value):
        return value.strip()
    raise refused(value, "a whole number from 0 on", "is no number")


def _size(value: Any) -> str:
    return units.format_bytes(units.parse_bytes(value))


def _positive_size(value: Any) -> str:
    if units.parse_bytes(value) == 0:
        raise refused(value, units.SIZES_ACCEPTED, "cannot be met")
    return _size(value)


def count_of(written: str) -> int:
    """The number, or the bytes, of a limit on a count."""
    return int(written) if written.strip().isdecimal() else units.parse_bytes(written)


BASE = "base"  # as a limit on an exact count: no more than the base has


def _exact(parse: Callable[[Any], str]) -> Callable[[Any], str]:
    """Parse a limit on an exact count: the count, or `BASE`."""

    def either(value: Any) -> str:
        if isinstance(value, str) and value.strip() == BASE:
            return BASE
        try:
            return parse(value)
        except units.QuantityError as error:
            raise units.QuantityError(
                f'{error}, or "{BASE}", for no more than the base has'
            ) from None

    return either


def _looser_exact(one: str, other: str) -> bool:
    if BASE in (one, other):
        return one != other  # which of the two demands more depends on the base
    return count_of(one) > count_of(other)


_MORE_BYTES = _more(units.parse_bytes)

_LIMITS = (
    Limit(
        "min_bandwidth",
        _min_bandwidth,
        'Least bandwidth, such as "2.4 TB/s" or "85% of peak".',
        "RATE",
        _looser_bandwidth,
    ),
    Limit(
        "max_latency",
        _max_latency,
        'Longest latency, such as "12 us".',
        "TIME",
        _more(units.parse_time),
    ),
    Limit(
        "max_regression",
        _as_written(units.parse_margin),
        'Largest slow-down against the baseline, such as "1%" or "1% + 0.2 us".',
        "MARGIN",
        _wider(units.parse_margin),
    ),
    Limit(
        "faster_than",
        _as_written(units.parse_claim),
        'Another measurement of the test to beat, such as "faulting" or "20 x faulting".',
        None,
        _looser_claim,
    ),
    Limit(
        "min_overlap",
        _as_written(lambda value: units.parse_part(value, "cannot be hidden")),
        'Least share that overlapping work hides of what overlap can hide, such as "80%".',
        None,
        lambda one, other: units.parse_share(one) < units.parse_share(other),
    ),
    Limit(
        "max_gpu_page_faults",
        _exact(_number),
        "Most page faults of the GPU in one launch.",
        "NUMBER",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_migrated",
        _exact(_size),
        'Most bytes of managed memory that migrate in one launch, such as "64 MiB".',
        "BYTES",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_peak",
        _positive_size,
        'Most device memory that a test uses at once, such as "2 GiB".',
        "SIZE",
        _MORE_BYTES,
        of_footprint=True,
    ),
    Limit(
        "max_kept",
        _size,
        'Most memory that a test still uses after its end, such as "0 B".',
        "SIZE",
        _MORE_BYTES,
        of_footprint=True,
    ),
    Limit(
        "max_peak_regression",
        _as_written(units.parse_growth),
        'Largest growth of the peak against the baseline, such as "0 B", "5%" or "5% + 64 MiB".',
        "GROWTH",
        _wider(units.parse_growth),
        of_footprint=True,
    ),
    Limit(
        "max_kernels",
        _exact(_number),
        "Most kernels in one launch.",
        "NUMBER",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_copies",
        _exact(_number),
        "Most copies in one launch.",
        "NUMBER",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_copied_bytes",
        _exact(_size),
        'Most bytes that copies move in one launch, such as "64 MiB".',
        "BYTES",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_waits",
        _exact(_number),
        "Most times that the host waits for the device: in one launch, or in the body of a test that measures nothing.",
        "NUMBER",
        _looser_exact,
        ini_only=True,
    ),
    Limit(
        "max_spill",
        _exact(_size),
        "Most local memory of a thread of any kernel: spills and stack.",
        "BYTES",
        _looser_exact,
        ini_only=True,
    ),
)
LIMITS: Mapping[str, Limit] = MappingProxyType({limit.name: limit for limit in _LIMITS})  # by name
OF_FOOTPRINT = tuple(
    name for name, limit in LIMITS.items() if limit.of_footprint
)  # limits of the memory of a test
MAX_WAITS = "max_waits"  # limit on one launch of a measurement; of a test that measures nothing, on its body
OF_LAUNCH = (
    "max_gpu_page_faults",
    "max_migrated",
    "max_kernels",
    "max_copies",
    "max_copied_bytes",
    "max_spill",
)
"""Limits on one launch of a measurement: a test that measures nothing cannot have them."""
OF_MEASUREMENT = tuple(
    name for name in LIMITS if name not in OF_FOOTPRINT
)  # limits of a measurement


def of_the_test(origin: str | None) -> bool:
    """True if a limit comes from the test itself, or in a gate from BASE's: no option replaces it. `origin`: as in `Limits.origin`."""
    return origin is not None and origin.partition(" of ")[0] in ("marker", "call")


def demands_more(name: str, one: str | None, other: str | None) -> bool:
    """True if a value of a limit demands more than another one, at least of some measurements. None is no limit."""
    if one is None or one == other:
        return False
    return other is None or LIMITS[name].looser(other, one)
