"""The limits: an entry in a table each, from which options, marker and call keywords follow.

docs/architecture.md says what a new limit needs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

from pytest_gpumem import units
from pytest_gpumem.units import refused

BASE = "base"  # as a limit on an exact count
_OR_BASE = f'or "{BASE}", for no more than the base has'


class LimitKeywords(TypedDict, total=False):
    """Limits as keywords of a measurement; None lifts that of the marker and of the session."""

    min_bandwidth: str | None
    max_latency: str | None
    max_regression: str | None
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
    """Limits as keywords of `gpu_memory.watch`, as above."""

    max_peak: int | str | None
    max_kept: int | str | None
    max_peak_regression: str | None


Demand = tuple[object, tuple[float, ...]]
"""What two values need in common to be compared, and figures: larger ones demand more."""


class Limit(NamedTuple):
    name: str  # of the keyword, the ini key and the option
    demand: Callable[[Any], Demand]  # of a user's value; raises `QuantityError`
    help: str
    metavar: str | None  # of the option in the help; None: a limit of single tests, no option
    write: Callable[[Any], str] = str  # gives the text that is kept of an accepted value
    ini_only: bool = False  # no option of the command line and no variable

    def parse(self, value: Any) -> str:
        """Return the text that is kept of a user's value. Raises `QuantityError`."""
        self.demand(value)
        return self.write(value).strip()

    def looser(self, limit: str, other: str) -> bool:
        """Return True if the first text can demand less than the second."""
        kind, figures = self.demand(limit)
        other_kind, others = self.demand(other)
        return kind != other_kind or any(map(operator.lt, figures, others))


def _rate(value: Any) -> Demand:
    rate, of_peak = units.parse_rate(value)
    if rate == 0:
        raise refused(value, units.RATES_ACCEPTED, "demands nothing")
    return of_peak, (rate,)  # the device decides which of a rate and a share demands more


def _time(value: Any) -> Demand:
    seconds = units.parse_time(value)
    if seconds == 0:
        raise refused(value, units.TIMES_ACCEPTED, "cannot be met")
    return "", (-seconds,)


def _slow_down(value: Any) -> Demand:
    margin = units.parse_margin(value)
    return "", (-margin.relative, -margin.absolute)


def _growth(value: Any) -> Demand:
    margin = units.parse_growth(value)
    return "", (-margin.relative, -margin.absolute)


def _claim(value: Any) -> Demand:
    factor, label = units.parse_claim(value)
    return label, (factor,)


def _part(value: Any) -> Demand:
    return "", (units.parse_part(value, "cannot be hidden"),)


def _size(value: Any) -> Demand:
    return "", (-units.parse_bytes(value, f'{units.SIZES_ACCEPTED}, or "0 B"'),)


def _positive_size(value: Any) -> Demand:
    if units.parse_bytes(value) == 0:
        raise refused(value, units.SIZES_ACCEPTED, "cannot be met")
    return _size(value)


def _is_base(value: Any) -> bool:
    return isinstance(value, str) and value.strip() == BASE


def _number_or_base(value: Any) -> Demand:
    if _is_base(value):
        return BASE, ()
    if isinstance(value, (int, str)) and re.fullmatch(r"\s*[0-9]{1,12}\s*", str(value)):
        return "", (-int(value),)
    raise refused(value, f"a whole number from 0 on, {_OR_BASE}")


def _size_or_base(value: Any) -> Demand:
    if _is_base(value):
        return BASE, ()
    try:
        return _size(value)
    except units.QuantityError as error:
        raise units.QuantityError(f"{error}, {_OR_BASE}") from None


def _text_of_size(value: Any) -> str:
    return BASE if _is_base(value) else units.format_bytes(units.parse_bytes(value))


def count_of(text: str) -> int:
    return int(text) if text.strip().isdecimal() else units.parse_bytes(text)


def _number(name: str, text: str) -> Limit:
    return Limit(name, _number_or_base, text, "NUMBER", ini_only=True)


def _bytes(name: str, text: str) -> Limit:
    return Limit(name, _size_or_base, text, "BYTES", _text_of_size, ini_only=True)


_OF_TIME = (
    Limit("min_bandwidth", _rate, 'Least bandwidth, such as "2.4 TB/s" or "85% of peak".', "RATE"),
    Limit("max_latency", _time, 'Longest latency, such as "12 us".', "TIME"),
    Limit(
        "max_regression",
        _slow_down,
        'Largest slow-down against the baseline, such as "1%" or "1% + 0.2 us".',
        "MARGIN",
    ),
    Limit(
        "faster_than",
        _claim,
        'Another measurement of the test to beat, such as "faulting" or "20 x faulting".',
        None,
    ),
    Limit(
        "min_overlap",
        _part,
        'Least share that overlapping work hides of what overlap can hide, such as "80%".',
        None,
    ),
)
_FOOTPRINT = (
    Limit(
        "max_peak",
        _positive_size,
        'Most device memory that a test uses at once, such as "2 GiB".',
        "SIZE",
        _text_of_size,
    ),
    Limit(
        "max_kept",
        _size,
        'Most memory that a test still uses after its end, such as "0 B".',
        "SIZE",
        _text_of_size,
    ),
    Limit(
        "max_peak_regression",
        _growth,
        'Largest growth of the peak against the baseline, such as "0 B", "5%" or "5% + 64 MiB".',
        "GROWTH",
    ),
)
_LAUNCH = (
    _number("max_gpu_page_faults", "Most page faults of the GPU in a launch."),
    _bytes(
        "max_migrated", 'Most bytes of managed memory that migrate in a launch, such as "64 MiB".'
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

LIMITS: Mapping[str, Limit] = {
    limit.name: limit for limit in (*_OF_TIME, *_LAUNCH, _WAITS, *_FOOTPRINT)
}
"""All limits by name."""
OF_FOOTPRINT = tuple(limit.name for limit in _FOOTPRINT)  # of the memory of a test or a part
OF_WATCHED = (*OF_FOOTPRINT, MAX_WAITS)  # of a test whose memory and waits are read
AT_THE_END = ("max_kept",)
"""Limits on what is there when the test has ended; the others are judged at its body's end."""
OF_LAUNCH = tuple(limit.name for limit in _LAUNCH)
"""Limits on one launch: a test that measures nothing cannot have them."""
OF_MEASUREMENT = tuple(name for name in LIMITS if name not in OF_FOOTPRINT)
STEPS = ("max_kernels", "max_copies", "max_copied_bytes", MAX_WAITS, "max_spill")
"""Limits on what a launch runs. They are exact, and hold on a GPU that others use too."""
EXACT = ("max_gpu_page_faults", "max_migrated", *STEPS)
"""Limits on exact counts of a launch."""
TIME, PEAK = "max_regression", "max_peak_regression"
COMPARED = (TIME, PEAK, *EXACT)
"""Limits on a change, which a duet judges."""


def relative(limits: object) -> list[str]:
    """Those of a row's `records.limits.Limits` on exact counts that are "base"."""
    return [name for name in EXACT if getattr(limits, name) == BASE]


def of_the_test(origin: str | None) -> bool:
    """Return True if the test has the limit itself, or BASE's test in a gate."""
    return origin is not None and origin.partition(" of ")[0] in ("marker", "call")


def demands_more(name: str, limit: str | None, other: str | None) -> bool:
    """Return True if a value of a limit can demand more than another."""
    if limit is None or limit == other:
        return False
    return other is None or LIMITS[name].looser(other, limit)
