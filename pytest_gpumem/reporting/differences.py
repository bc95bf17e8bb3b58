"""Differences, and the lines of code that take memory, as text. All of their sentences are here."""

from __future__ import annotations

from pathlib import PurePosixPath

from pytest_gpumem.judging.differences import shape
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.difference import (
    CPU_FAULTS,
    DECLARED,
    FURTHER,
    GPU_FAULTS,
    MIGRATED,
    ORDER,
    PEAK,
    Difference,
    Value,
)
from pytest_gpumem.records.footprint import Site
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import short_bytes, sizes

_NO_PYTHON = "a thread without Python code, such as PyTorch's backward pass"
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


def place_of(row: Row) -> tuple[str, int] | None:
    """The file and line of a row's first difference, relative to pytest's root folder; None if it is of no line there."""
    site = row.differences[0].site if row.differences else None
    if site is None or not site.file or PurePosixPath(site.file).is_absolute():
        return None
    return site.file, site.line


def describe(difference: Difference) -> str:
    """One difference as a sentence: "kernel triad: block 256 → 128", "+16 MiB at model.py:4 in layer: y = x * 2 (64 MiB before)"."""
    if difference.site is not None:
        return _of_memory(difference, difference.site)
    kind, field, was, now = difference.kind, difference.field, difference.was, difference.now
    if kind == ORDER:
        return "the same steps in another order"
    if kind == FURTHER:
        return "1 further difference" if now == 1 else f"{now} {kind}"
    if kind in (GPU_FAULTS, CPU_FAULTS) and was == 0:
        return f"{now} {kind} where there were none"
    subject = f"{kind} {difference.name}".rstrip()
    if difference.times > 1:
        subject = f"{difference.times} × {subject}"
    if field == "code":
        # The reference that a simulated device runs has no machine code.
        return (
            "reference: other source"
            if difference.name == "reference"
            else f"{subject}: its module changed"
        )
    if not field and was is None:
        return f"{subject} added" + (f" ({now})" if now else "")
    if not field and now is None:
        return f"{subject} removed" + (f" ({was})" if was else "")
    values = " → ".join(_values(difference))
    if field:
        colon = ":" if field.startswith("argument") else ""
        return f"{subject}: {_WORDS.get(field, field)}{colon} {values}"
    return f"{subject}: {values}" if difference.name else f"{subject} {values}"


def _values(difference: Difference) -> tuple[str, ...]:
    was, now = difference.was, difference.now
    of_bytes = (difference.field or difference.kind) in _OF_BYTES
    if of_bytes and isinstance(was, int) and isinstance(now, int):
        return sizes(was, now)
    return _value(was, difference.field, of_bytes), _value(now, difference.field, of_bytes)


def _value(value: Value, field: str, of_bytes: bool) -> str:
    if value is None:
        return "none" if field in ("window", "cluster") else "unknown"
    if isinstance(value, tuple):
        return shape(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return short_bytes(value) if of_bytes and isinstance(value, int) else str(value)


def _of_memory(difference: Difference, site: Site) -> str:
    assert isinstance(difference.now, int)
    if difference.was is None:
        return f"{short_bytes(difference.now)} at {place(site)} ({allocations_of(site, difference.kind)})"
    assert isinstance(difference.was, int)
    return f"+{short_bytes(difference.now - difference.was)} at {place(site)} ({before_text(difference)})"


def place(site: Site) -> str:
    """The place of a site in one line: "model.py:12 in forward: y = a * b"."""
    if not site.file:
        return _NO_PYTHON
    code = f": {site.code}" if site.code else ""
    return f"{site.file}:{site.line} in {site.function}{code}"


def allocations_of(site: Site, kind: str) -> str:
    """The library of a site and the number of its allocations: "PyTorch, 3 allocations"."""
    memory = "" if site.kind == "device" else f" {site.kind}"
    return f"{site.library}{memory}, {counted(_count(site, kind), 'allocation')}"


def before_text(difference: Difference) -> str:
    """What a line that grew took before: "64 MiB before", with its text where that was another."""
    assert isinstance(difference.was, int)
    if not difference.was:
        return "new"
    before = f"{short_bytes(difference.was)} before"
    return f"{before}, by {difference.name}" if difference.name else before


def _count(site: Site, kind: str) -> int:
    return site.at_peak_count if kind == PEAK else site.kept_count
