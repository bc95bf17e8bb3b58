"""What the conditions were over a whole measurement, from the moments at which somebody looked. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_gpumem.records.measurement import Conditions


def worst(seen: Sequence[Conditions]) -> Conditions | None:
    """The least favourable of what was seen: lowest clocks, every throttle reason, highest temperature and power, most other processes.

    None for nothing seen. A figure that the driver never gave stays None.
    """
    if not seen:
        return None
    return Conditions(
        sm_clock_hz=_over(min, [c.sm_clock_hz for c in seen]),
        memory_clock_hz=_over(min, [c.memory_clock_hz for c in seen]),
        temperature_c=_over(max, [c.temperature_c for c in seen]),
        power_w=_over(max, [c.power_w for c in seen]),
        throttle_reasons=tuple(dict.fromkeys(reason for c in seen for reason in c.throttle_reasons)),
        other_processes=_most([c.other_processes for c in seen]),
    )


def _over(choose: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
