"""Differences as text. All of their sentences are here."""

from __future__ import annotations

from pytest_gpumem.judging.differences import shape
from pytest_gpumem.records.row import (
    CPU_FAULTS,
    DECLARED,
    FURTHER,
    GPU_FAULTS,
    MIGRATED,
    ORDER,
    Difference,
    Row,
    Value,
)
from pytest_gpumem.units import short_bytes, sizes

_OF_BYTES = (DECLARED, MIGRATED, "shared", "dynamic_shared", "local", "nbytes")
"""Kinds, and fields of a step, whose values are bytes."""
_WORDS = {
    "shared": "static shared memory",
    "dynamic_shared": "dynamic shared memory",
    "local": "local memory of a thread",
    "nbytes": "size",
    "source": "reads",
    "window": "access-policy window",
}


def why_lines(row: Row) -> list[str]:
    """A sentence for each difference of a row."""
    return [describe(difference) for difference in row.differences]


def describe(difference: Difference) -> str:
    """One difference as a sentence: "kernel triad: block 256 → 128"."""
    kind, field, was, now = difference.kind, difference.field, difference.was, difference.now
    if kind == ORDER:
        return "the same steps in another order"
    if kind == FURTHER:
        return f"{now} {kind}"
    if kind in (GPU_FAULTS, CPU_FAULTS) and was == 0:
        return f"{now} {kind} where there were none"
    subject = f"{kind} {difference.name}".rstrip()
    if difference.times > 1:
        subject = f"{difference.times} × {subject}"
    if field == "code":
        # The reference that a simulated device runs has no machine code.
        if difference.name == "reference":
            return "reference: other source"
        return f"{subject}: its module changed"
    if not field and (was is None or now is None):
        value = was or now
        what = "removed" if now is None else "added"
        return f"{subject} {what} ({value})" if value else f"{subject} {what}"
    values = " → ".join(_values(difference))
    if field.startswith("argument"):
        return f"{subject}: {field}: {values}"
    if field:
        return f"{subject}: {_WORDS.get(field, field)} {values}"
    if difference.name:
        return f"{subject}: {values}"
    return f"{subject} {values}"


def _values(difference: Difference) -> tuple[str, ...]:
    was, now = difference.was, difference.now
    of_bytes = (difference.field or difference.kind) in _OF_BYTES
    if of_bytes and isinstance(was, int) and isinstance(now, int):
        return sizes(was, now)
    return _value(was, difference.field, of_bytes), _value(now, difference.field, of_bytes)


def _value(value: Value, field: str, of_bytes: bool) -> str:
    if value is None and field == "window":
        return "none"
    if value is None:
        return "unknown"
    if isinstance(value, tuple):
        return shape(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    if of_bytes and isinstance(value, int):
        return short_bytes(value)
    return str(value)
