"""Groups of tests in reports, by the part of the memory system that their measurements are about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import groupby

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row

COALESCED = 4  # sectors of 32 bytes that a coalesced request for 32 words of 4 bytes touches


class Behaviour(str, Enum):
    """Kinds of tests. If the rows of a test are of several kinds, the test has the first of them in this order."""

    OVERLAP = "overlap"  # copies and kernels at the same time
    LATENCY = "latency"  # dependent accesses
    MANAGED = "managed memory"  # pages that may migrate
    LINK = "host link"  # bytes that cross PCIe or NVLink
    ALLOCATION = "allocation, host"  # calls timed by the host's clock that move no bytes
    PERSISTING = "persisting L2"  # a stream with an access-policy window
    CACHE = "L2"  # hot mode: caches are not flushed before a sample
    PATTERN = "access pattern"  # requests that touch more or fewer sectors than coalesced ones
    DRAM = "DRAM"  # a footprint of several times L2
    OTHER = "other"  # a small or unknown footprint
    MEMORY = "memory of tests"  # no time is measured, only the memory that the test takes
    NOTHING = "not measured"  # the test failed before it measured anything


ORDER = tuple(Behaviour)


def function_of(row: Row) -> str:
    """The id of a row's test function, without the parameters of this call."""
    module, separator, test = row.nodeid.partition("::")
    return (
        f"{module}{separator}{test.partition('[')[0]}"
        if separator
        else row.nodeid.partition("[")[0]
    )


def behaviour_of(measurement: Measurement | None, facts: DeviceFacts) -> Behaviour:
    """The kind of one measurement."""
    if measurement is None:
        return Behaviour.NOTHING
    traffic = measurement.moved_bytes
    rules = (
        (measurement.overlap is not None, Behaviour.OVERLAP),
        (bool(measurement.accesses_per_launch), Behaviour.LATENCY),
        (measurement.managed or _migrates(measurement), Behaviour.MANAGED),
        (traffic is not None and traffic.link, Behaviour.LINK),
        (
            measurement.sampler == "host" and traffic is None and measurement.footprint is None,
            Behaviour.ALLOCATION,
        ),
        (measurement.window is not None, Behaviour.PERSISTING),
        (measurement.mode == "hot", Behaviour.CACHE),
        (measurement.sectors_per_request not in (None, COALESCED), Behaviour.PATTERN),
        (measurement.not_of_dram(facts) is None, Behaviour.DRAM),
    )
    return next((behaviour for holds, behaviour in rules if holds), Behaviour.OTHER)


def _migrates(measurement: Measurement) -> bool:
    """True if the launch moved pages or faulted. Counting alone says nothing of the memory."""
    launch = measurement.migrations.launch if measurement.migrations is not None else None
    return launch is not None and bool(launch.gpu_faults or launch.cpu_faults or launch.migrated)


def behaviours(rows: Iterable[Row], facts: DeviceFacts) -> dict[str, Behaviour]:
    """The kind of each test function, by its id."""
    found: dict[str, Behaviour] = {}
    for row in rows:
        function, kind = function_of(row), behaviour_of(row.measurement, facts)
        if row.measurement is None and row.footprint is not None:
            kind = Behaviour.MEMORY
        found[function] = min(found.get(function, kind), kind, key=ORDER.index)
    return found


FAILING, SLOWER, UNDECIDED, FINE = range(4)


def attention(row: Row) -> int:
    """How soon a row needs a look: `FAILING` first, `FINE` not at all."""
    verdict = row.verdict
    if row.failed or verdict.outcome is Outcome.FAIL:
        return FAILING
    if verdict.outcome is Outcome.ACCEPTED:
        return UNDECIDED
    if verdict.code is Code.LOOKS_SLOWER or (
        verdict.comparison is not None and verdict.comparison.looks_slower
    ):
        return SLOWER
    return UNDECIDED if verdict.outcome is Outcome.UNDECIDED else FINE


def by_function(rows: Iterable[Row]) -> list[list[Row]]:
    """Runs of neighbouring rows of one test function."""
    return [list(of) for _, of in groupby(rows, key=function_of)]


def ordered(rows: Sequence[Row], facts: DeviceFacts) -> list[tuple[Behaviour, list[Row]]]:
    """Rows by kind of test. Kinds, tests of a kind and rows of a test are each in the order: what got worse, then the slowest."""
    kinds = behaviours(rows, facts)
    tests: dict[str, list[Row]] = {}
    for row in rows:
        tests.setdefault(function_of(row), []).append(row)
    groups: dict[Behaviour, list[list[Row]]] = {}
    for function, of in tests.items():
        groups.setdefault(kinds[function], []).append(sorted(of, key=_rank))
    found = [
        (kind, [row for of in sorted(group, key=lambda of: _rank(of[0])) for row in of])
        for kind, group in groups.items()
    ]
    return sorted(
        found,
        key=lambda group: (
            _rank(group[1][0])[0],
            Behaviour.NOTHING is group[0],
            _rank(group[1][0])[1],
        ),
    )


def _rank(row: Row) -> tuple[int, float]:
    return attention(row), -row.measurement.latency if row.measurement is not None else 0.0
