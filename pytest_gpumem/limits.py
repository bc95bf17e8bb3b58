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
    max_host_time: str | float | None
    max_regression: str | float | None
    fail_if_faster: str | None
    faster_than: str | None
    min_overlap: str | None
    max_gpu_page_faults: int | str | None
    max_migrated: int | str | None
    max_kernels: int | str | None
    max_copies: int | str | None
    max_copied_bytes: int | str | None
    max_waits: int | str | None
    max_registers: int | str | None
    max_spill: int | str | None
    same_kernels: bool | str | None
    max_dram_bytes: int | str | None
    max_sectors_per_request: float | str | None
    min_l2_hit_rate: str | None


class FootprintKeywords(TypedDict, total=False):
    """Limits as keywords of `gpu_memory.watch`. None lifts the limit of the marker and of the session."""

    max_peak: int | str | None
    max_kept: int | str | None
    max_reserved: int | str | None
    max_allocations: int | str | None
    max_peak_regression: str | None
    max_kernels: int | str | None
    max_copies: int | str | None
    max_copied_bytes: int | str | None
    max_waits: int | str | None


class Limit(NamedTuple):
    """One limit."""

    name: str  # keyword of the marker and of a measurement, and name of the option
    parse: Callable[
        [Any], str
    ]  # from the value that a user wrote to the text that is kept; raises `QuantityError`
    help: str
    metavar: str | None = None
    """Placeholder of the option's value in the help; empty for a flag, None for a limit that is no option, because it is about one test."""
    looser: Callable[[str, str], bool] | None = None
    """True if the first text demands less than the second, at least of some measurements; None for a limit that has one value."""
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


def _share(why: str, *, whole: bool = True) -> Callable[[Any], str]:
    """Keep the text of a share above 0: arguments as of `units.parse_part`."""
    return _as_written(lambda value: units.parse_part(value, why, whole=whole))


def _more(parse: Callable[[str], Any]) -> Callable[[str, str], bool]:
    """The rule of `Limit.looser` for a limit of which more is looser."""
    return lambda one, other: bool(parse(one) > parse(other))


def _wider(parse: Callable[[str], units.Margin]) -> Callable[[str, str], bool]:
    """The rule of `Limit.looser` for a margin."""
    return lambda one, other: any(
        allowed > demanded for allowed, demanded in zip(parse(one), parse(other), strict=True)
    )


def _less_share(one: str, other: str) -> bool:
    return units.parse_share(one) < units.parse_share(other)


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


def _yes(value: object) -> str:
    if value is True or (isinstance(value, str) and value.strip().lower() in YES):
        return "true"
    raise refused(value, "True, and None to lift it")


def _sectors(value: object) -> str:
    try:
        sectors = (
            float(value)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool)
            else 0.0
        )
    except ValueError:
        sectors = 0.0
    if not 1 <= sectors <= 32:
        raise refused(value, "a number from 1 to 32", "is no number of sectors of one request")
    return f"{sectors:g}"


def count_of(written: str) -> int:
    """The number, or the bytes, of a limit on a count."""
    return int(written) if written.strip().isdecimal() else units.parse_bytes(written)


def over_baseline(written: str, parse: Callable[[str], int] = count_of) -> units.Margin | None:
    """The growth over the baseline that a limit on a count allows; None for a limit that names its own count."""
    return units.parse_over_baseline(written, parse)


def _exact(parse: Callable[[Any], str]) -> Callable[[Any], str]:
    """Parse a limit on an exact count: the count, or a growth over the baseline's."""

    def either(value: Any) -> str:
        if (
            isinstance(value, str)
            and over_baseline(value, lambda amount: count_of(parse(amount))) is not None
        ):
            return value.strip()
        try:
            return parse(value)
        except units.QuantityError as error:
            raise units.QuantityError(f"{error}, or {units.BASELINE_ACCEPTED}") from None

    return either


def _looser_exact(one: str, other: str) -> bool:
    growth, demanded = over_baseline(one), over_baseline(other)
    if growth is not None and demanded is not None:
        return any(allowed > least for allowed, least in zip(growth, demanded, strict=True))
    # Which of a count and a growth demands more depends on the baseline.
    return growth is not None or demanded is not None or count_of(one) > count_of(other)


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
        "max_host_time",
        _max_latency,
        'Longest time that the host takes to queue one launch, such as "50 us".',
        "TIME",
        _more(units.parse_time),
        ini_only=True,
    ),
    Limit(
        "max_regression",
        _as_written(units.parse_margin),
        'Largest slow-down against the baseline, such as "1%" or "1% + 0.2 us".',
        "MARGIN",
        _wider(units.parse_margin),
    ),
    Limit(
        "fail_if_faster",
        _share("is no gain", whole=False),
        'Gain against the baseline, such as "5%", that fails because the baseline is stale.',
        "SHARE",
        _more(units.parse_share),
        ini_only=True,
    ),
    Limit(
        "faster_than",
        _as_written(units.parse_claim),
        'Another measurement of the test to beat, such as "faulting" or "20 x faulting".',
        looser=_looser_claim,
    ),
    Limit(
        "min_overlap",
        _share("cannot be hidden"),
        'Least share that overlapping work hides of what overlap can hide, such as "80%".',
        looser=_less_share,
    ),
    Limit(
        "max_gpu_page_faults",
        _exact(_number),
        "Most page faults of the GPU in one launch.",
        "NUMBER",
        _looser_exact,
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
        "max_reserved",
        _size,
        'Most memory that the pools of libraries hold unused after a test, beyond that before, such as "512 MiB".',
        "SIZE",
        _MORE_BYTES,
        of_footprint=True,
        ini_only=True,
    ),
    Limit(
        "max_allocations",
        _number,
        "Most allocations of a test.",
        "COUNT",
        _more(int),
        of_footprint=True,
        ini_only=True,
    ),
    Limit(
        "max_peak_regression",
        _as_written(units.parse_growth),
        'Largest growth of the peak against the baseline, such as "0 B", "5%" or "5% + 64 MiB".',
        "GROWTH",
        _wider(units.parse_growth),
        of_footprint=True,
    ),
    Limit("max_kernels", _exact(_number), "Most kernels in one launch.", "NUMBER", _looser_exact),
    Limit("max_copies", _exact(_number), "Most copies in one launch.", "NUMBER", _looser_exact),
    Limit(
        "max_copied_bytes",
        _exact(_size),
        'Most bytes that copies move in one launch, such as "64 MiB".',
        "BYTES",
        _looser_exact,
    ),
    Limit(
        "max_waits",
        _exact(_number),
        "Most times that the host waits for the device in one launch.",
        "NUMBER",
        _looser_exact,
    ),
    Limit(
        "max_registers",
        _exact(_number),
        "Most registers that a thread of any kernel uses.",
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
    Limit(
        "same_kernels",
        _yes,
        "The kernels of a launch and their shapes are those of the baseline.",
        "",
    ),
    Limit(
        "max_dram_bytes",
        _size,
        "Most bytes of DRAM in one launch, where Nsight Compute counted.",
        "BYTES",
        _MORE_BYTES,
        ini_only=True,
    ),
    Limit(
        "max_sectors_per_request",
        _sectors,
        "Most sectors that a load of a warp touches, of any kernel, where Nsight Compute counted.",
        "SECTORS",
        _more(float),
        ini_only=True,
    ),
    Limit(
        "min_l2_hit_rate",
        _share("is no hit rate"),
        'Least hit rate of L2, such as "80%", of any kernel, where Nsight Compute counted.',
        "SHARE",
        _less_share,
        ini_only=True,
    ),
)
LIMITS: Mapping[str, Limit] = MappingProxyType({limit.name: limit for limit in _LIMITS})  # by name
OF_FOOTPRINT = tuple(
    name for name, limit in LIMITS.items() if limit.of_footprint
)  # limits of the memory of a test
OF_CALLS = ("max_kernels", "max_copies", "max_copied_bytes", "max_waits")
"""Limits on one launch of a measurement; where nothing is measured, on the calls of a test's body or of a part of it."""
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
    looser = LIMITS[name].looser
    return other is None or looser is None or looser(other, one)
