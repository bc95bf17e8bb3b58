"""Sweeps of persisting L2 as JSON: in pytest-benchmark's file beside the document of the run, where anything was swept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.schema import SchemaError

KEY = "gpumem_l2_sweeps"
"""In the file."""


class _Of(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodeid: str
    sweep: Sweep


def sweeps_to_json(sweeps: Iterable[tuple[str, Sweep]]) -> list[dict[str, Any]]:
    """Each sweep with its test's id, as plain values."""
    return [msgspec.to_builtins(_Of(nodeid, sweep)) for nodeid, sweep in sweeps]


def sweeps_from_json(value: object) -> tuple[tuple[str, Sweep], ...]:
    """What `sweeps_to_json` wrote.

    Raises:
        SchemaError: a value that does not fit, or a map without a measurement that is off, against which gains are told.
    """
    try:
        read = msgspec.convert(value, tuple[_Of, ...])
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
        raise SchemaError(f"$.{KEY}: {error}") from None
    for index, one in enumerate(read):
        latencies = [point.latency for point in (*one.sweep.points, one.sweep.off, one.sweep.best)]
        if not all(math.isfinite(latency) and latency > 0 for latency in latencies):
            raise SchemaError(f"$.{KEY}[{index}].sweep: a latency in it is no time of a launch")
        if not any(not point.setting.set_aside for point in one.sweep.points):
            raise SchemaError(f"$.{KEY}[{index}].sweep.points: none of them is off")
    return tuple((one.nodeid, one.sweep) for one in read)
