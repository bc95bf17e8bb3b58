"""What is not as it was for the processes of a row's baseline. Pure.

None of it keeps two rows from being compared: a driver, a compiler or a test that changed is a cause like any other, and a reader has to
know of it. What makes figures incomparable, another GPU, MIG profile or ECC, is the baseline's key instead; another mode, target or
sampler is not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from pytest_gpumem.baselines.history import Accepted
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement

MEMORY_CLOCK = 0.01
"""Change of the memory clock, as a share, that is worth a word: bandwidth follows it."""
SM_CLOCK = 0.05
"""Change of the SM clock, as a share, that is worth a word: it moves by itself with temperature and power."""

TEST_SOURCE = "the test's source"
KERNEL_SOURCE = "the kernel's source"


def changes(measurement: Measurement, facts: DeviceFacts, test_source: str | None, window: Sequence[Accepted]) -> tuple[str, ...]:
    """What differs from some process of the window, each as a short phrase: "driver 580.95.05 -> 590.10".

    What is unknown on either side is no change. A change is said until the window has moved on from the last process before it.

    Args:
        measurement: this run's.
        facts: this run's device.
        test_source: as `Row.test_source`.
        window: what it is compared with, oldest first.
    """
    said = [*_text("driver", facts.driver, [one.process.device.driver for one in window])]
    said += _text("CUDA", facts.cuda, [one.process.device.cuda for one in window])
    if _another(test_source, [one.test_source for one in window]) is not None:
        said.append(TEST_SOURCE)
    if _another(measurement.kernel_source, [one.measurement.kernel_source for one in window]) is not None:
        said.append(KERNEL_SOURCE)
    past = [one.measurement for one in window]
    said += _clock("memory clock", measurement, past, lambda m: [c.memory_clock_hz for c in m.conditions], MEMORY_CLOCK)
    said += _clock("SM clock", measurement, past, lambda m: [c.sm_clock_hz for c in m.conditions], SM_CLOCK)
    return tuple(said)


def _another(now: str | None, then: Sequence[str | None]) -> str | None:
    """The newest known value that is not `now`'s; None where there is none, or `now` is unknown."""
    return None if now is None else next((value for value in reversed(then) if value not in (None, now)), None)


def _text(name: str, now: str | None, then: Sequence[str | None]) -> Iterator[str]:
    if (old := _another(now, then)) is not None:
        yield f"{name} {old} -> {now}"


def _clock(
    name: str, now: Measurement, past: Sequence[Measurement], of: Callable[[Measurement], list[float | None]], least: float
) -> Iterator[str]:
    """A change of a clock under load: after the samples, where it was read; before them the device may still have been idle."""
    after = of(now)[-1]
    known = [clock for measurement in past if (clock := of(measurement)[-1])]
    if after and known and abs(after / (old := statistics.median(known)) - 1) > least:
        yield f"{name} {old / 1e6:.0f} -> {after / 1e6:.0f} MHz"
