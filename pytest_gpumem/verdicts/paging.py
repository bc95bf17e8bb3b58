"""Limits on what managed pages do: `max_gpu_page_faults` and `max_migrated`, held against the counting pass.

Counts are exact for the launch that was counted, so there is no margin. What was not counted is never a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.verdict import Code, Outcome
from pytest_gpumem.units import format_bytes, parse_bytes
from pytest_gpumem.verdicts.finding import Finding


def paging(measurement: Measurement, limits: Limits) -> Iterator[Finding]:
    """One finding for each of the two limits that is set.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    migrations = measurement.migrations
    counts = migrations.launch if migrations is not None else None
    for limit in ("max_gpu_page_faults", "max_migrated"):
        written = getattr(limits, limit)
        if written is None:
            continue
        name = f"{limit} {written} ({limits.origin.get(limit, 'limit')})"
        if counts is None:
            why = migrations.not_counted if migrations is not None else "no counting pass was taken"
            yield Finding(Outcome.UNDECIDED, f"{name} cannot be judged, not counted: {why}", Code.CONDITIONS)
        elif limit == "max_gpu_page_faults":
            yield _held(_faults(counts), name, counts.gpu_faults, int(written))
        else:
            yield _held(_moved(counts), name, counts.migrated, parse_bytes(written))


def _held(said: str, name: str, value: int, most: int) -> Finding:
    if value > most:
        return Finding(Outcome.FAIL, f"{said}, above {name}")
    return Finding(Outcome.PASS, f"{said}, not above {name}")


def _faults(counts: PageCounts) -> str:
    return f"{counts.gpu_faults} page faults of the GPU in one launch"


def _moved(counts: PageCounts) -> str:
    causes = ", ".join(f"{cause} {format_bytes(nbytes)}" for cause, nbytes in counts.causes.items() if nbytes)
    return f"{format_bytes(counts.migrated)} migrated in one launch" + (f" ({causes})" if causes else "")
