"""Changes around a row since its baseline: driver, CUDA, sources and clocks. Pure.

Rows with such changes are still compared: a changed driver, compiler or test is a possible cause, which a reader must know. A different
GPU, MIG profile or ECC mode makes figures incomparable; these are part of the baseline's key. Rows of another mode, target or sampler are
not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from pytest_gpumem.baselines.history import Accepted
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement

MEMORY_CLOCK = 0.01
"""Smallest change of the memory clock that is reported, as a share: bandwidth follows it."""
SM_CLOCK = 0.05
"""Smallest change of the SM clock that is reported, as a share: it varies with temperature and power."""

TEST_SOURCE = "the test's source"
KERNEL_SOURCE = "the kernel's source"


def changes(measurement: Measurement, facts: DeviceFacts, test_source: str | None, window: Sequence[Accepted]) -> tuple[str, ...]:
    """Differences from any process of the window, as short phrases: "driver 580.95.05 -> 590.10".

    An unknown value on either side is no difference. A change is reported until the window has moved past it.

    Args:
        test_source: as `Row.test_source`.
        window: the runs to compare with, oldest first.
    """
    phrases = [*_text("driver", facts.driver, [one.process.device.driver for one in window])]
    phrases += _text("CUDA", facts.cuda, [one.process.device.cuda for one in window])
    if _another(test_source, [one.test_source for one in window]) is not None:
        phrases.append(TEST_SOURCE)
    if _another(measurement.kernel_source, [one.measurement.kernel_source for one in window]) is not None:
        phrases.append(KERNEL_SOURCE)
    past = [one.measurement for one in window]
    phrases += _clock("memory clock", measurement, past, lambda m: [c.memory_clock_hz for c in m.conditions], MEMORY_CLOCK)
    phrases += _clock("SM clock", measurement, past, lambda m: [c.sm_clock_hz for c in m.conditions], SM_CLOCK)
    return tuple(phrases)


def _another(now: str | None, then: Sequence[str | None]) -> str | None:
    """The newest known value that differs from `now`; None without one, or if `now` is unknown."""
    return None if now is None else next((value for value in reversed(then) if value not in (None, now)), None)


def _text(name: str, now: str | None, then: Sequence[str | None]) -> Iterator[str]:
    if (old := _another(now, then)) is not None:
        yield f"{name} {old} -> {now}"


def _clock(
    name: str, now: Measurement, past: Sequence[Measurement], of: Callable[[Measurement], list[float | None]], least: float
) -> Iterator[str]:
    """A change of a clock under load, read after the samples: before them the device may be idle."""
    after = of(now)[-1]
    known = [clock for measurement in past if (clock := of(measurement)[-1])]
    if after and known and abs(after / (old := statistics.median(known)) - 1) > least:
        yield f"{name} {old / 1e6:.0f} -> {after / 1e6:.0f} MHz"
