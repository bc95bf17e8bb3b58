"""One thing in which a row differs from what it is compared with."""

from __future__ import annotations

from pytest_gpumem.records.footprint import Site
from pytest_gpumem.records.record import Count, Record

Value = int | float | str | tuple[int, ...] | None
"""Bytes, a count, the blocks or threads in x, y and z, or words."""

DECLARED = "declared bytes"
SECTORS = "sectors per request"
WINDOW = "access-policy window"
GPU_FAULTS, CPU_FAULTS = "GPU page faults", "CPU page faults"
MIGRATED = "migrated bytes"
PEAK, KEPT = "peak memory", "kept memory"
ORDER = "order"  # the same steps in another order
FURTHER = "further differences"  # their number is in `now`


class Difference(Record, frozen=True, omit_defaults=True):
    """One thing in which a row differs from what it is compared with."""

    kind: str
    """What differs: "declared bytes", "sectors per request", "access-policy window", "GPU page
    faults", "CPU page faults", "migrated bytes"; a kind of step such as "kernel", "call", "state"
    or "order"; "peak memory" and "kept memory" of a line; or "further differences", whose number is
    `now`."""
    was: Value = None  # Value on the first side; None for what was added, and where it is unknown
    now: Value = None
    """Value on the second side; None for what was removed, and where it is unknown."""
    name: str = ""
    """Kernel, direction of a copy, function of CUDA, or part of the state; of a line, its text on
    the first side where that was another."""
    field: str = ""  # Of a step or call: what changed, such as "grid" or "argument 3"
    times: Count = 1  # Steps of the launch that differ so
    site: Site | None = None  # Of memory: the line that allocates it
