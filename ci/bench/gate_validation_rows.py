"""What the gate's validation measures: rows, each with the same code made slower by a known share beside it.

A row is a launch of a catalogue kernel on arrays of a size. Its *twins* are the same launch with more work, as much as makes it slower by
a planned share: more bytes, or more steps of a pointer chase. How much that takes, an earlier record tells, since part of a launch's time
does not grow with its bytes. What the twins are really slower by, the measurements of all processes together say
(`gate_validation_verdicts.measured_ratios`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.units import MiB

SLOPES = (0.2, 1.5)
"""Between these lies how latency grows with work, logarithm over logarithm; what a record shows outside is its noise."""
UNRELATED = 37 * MiB
"""Bytes of the unrelated allocation that new code makes first."""
CHASE_STEPS = 400
CHASE_NODES = 8 * MiB
MODES, SLOW_MODE = 0.003, 0.3
"""By what share the slower mode of a bimodal row is slower, and which share of the processes is in it."""
ARRAYS = {"triad": 3, "stream_add": 3}
"""Arrays of a kernel; else 2."""
STEP = {"dot": 32 * 1024, "chase": 1}
"""Bytes (or steps) that the work of a kernel is a multiple of; else 4096 bytes."""


@dataclass(frozen=True)
class Row:
    """One measurement of every process."""

    name: str
    """What its test is parametrised with."""
    kernel: str
    """Of the catalogue, on floats of 4 bytes unless ":f8" says otherwise."""
    size: str
    """Group that it is counted in."""
    work: int
    """Bytes of each array, or steps; of the row that it is a twin of."""
    of: str
    """The row that this would be, had its code not changed: itself, unless it is a twin or follows an unrelated allocation."""
    planned: float = 0.0
    """Share by which it is meant to be slower than that row."""
    unrelated: int = 0
    """Bytes that are allocated before its arrays."""
    bimodal: bool = False
    """A process is in one of two modes."""

    @property
    def changed(self) -> bool:
        """Whether it stands for new code of another row."""
        return self.of != self.name


@dataclass(frozen=True)
class Asked:
    """What a run is held to."""

    limit: str
    """`max_regression`."""
    processes: int
    """Processes of one run, at most."""


SIZES = {
    "256 MiB": Asked("1%", 3),
    "32 MiB": Asked("1%", 6),
    "2 MiB": Asked("10%", 3),
    "chase": Asked("1%", 3),
    "bimodal": Asked("2%", 3),
}
"""By group of rows."""


def _with_twins(
    kernel: str, size: str, work: int, planned: tuple[float, ...], *, bimodal: bool = False
) -> list[Row]:
    name = f"{kernel}-{size.removesuffix(' MiB')}" if size.endswith(" MiB") else size
    own = Row(name, kernel, size, work, name, bimodal=bimodal)
    return [
        own,
        *(
            Row(f"{name}+{100 * share:g}", kernel, size, work, name, share, bimodal=bimodal)
            for share in planned
        ),
    ]


def _rows() -> tuple[Row, ...]:
    rows = _with_twins("triad", "256 MiB", 256 * MiB, (0.0025, 0.005, 0.01, 0.02, 0.05))
    for kernel in ("copy", "stream_add"):
        rows += _with_twins(kernel, "256 MiB", 256 * MiB, (0.005, 0.01))
    for kernel in ("mul", "triad:f8"):
        rows += _with_twins(kernel, "256 MiB", 256 * MiB, (0.01,))
    rows += _with_twins("triad", "32 MiB", 32 * MiB, (0.005, 0.01, 0.02))
    others = ("copy", "mul", "stream_add", "dot", "offset_copy", "permuted_copy")
    for kernel in (*others, *(f"{name}:f8" for name in ("triad", "stream_add", "copy", "mul"))):
        rows += _with_twins(kernel, "32 MiB", 32 * MiB, (0.01,))
    rows += _with_twins("triad", "2 MiB", 2 * MiB, (0.01, 0.05, 0.1))
    rows += _with_twins("copy", "2 MiB", 2 * MiB, (0.1,))
    rows += _with_twins("chase", "chase", CHASE_STEPS, (0.01,))
    rows += _with_twins("triad", "bimodal", 256 * MiB, (0.02,), bimodal=True)
    rows += [
        Row(
            f"triad-{mib} after an allocation",
            "triad",
            f"{mib} MiB",
            mib * MiB,
            f"triad-{mib}",
            unrelated=UNRELATED,
        )
        for mib in (256, 32)
    ]
    return tuple(rows)


ROWS = _rows()
"""All rows that a record may have; a process measures those of its set in an order of its own."""
TWELVE = (
    *(
        "triad-256",
        "triad-256+1",
        "stream_add-256",
        "triad-32",
        "triad-32+1",
        "mul-32",
        "dot-32",
        "dot-32+1",
        "permuted_copy-32",
    ),
    *("triad-2", "triad-2+10", "chase"),
)
"""Rows of every size, so few that a session of a minute has some 25 processes."""


@dataclass(frozen=True)
class Set:
    """What a session measures."""

    rows: tuple[Row, ...]
    baseline: tuple[int, ...]
    """Processes of each run of the baseline, which are the session's first processes."""


SETS = {
    "all": Set(ROWS, (1,) * 20),
    "minute": Set(tuple(row for row in ROWS if row.name in TWELVE), (3, 3, 3)),
}
BY_NAME = {row.name: row for row in ROWS}


def rounded(kernel: str, work: float) -> int:
    """The nearest work that the kernel can do."""
    step = STEP.get(kernel, 4096)
    return round(work / step) * step


def work_of(row: Row, slopes: dict[str, float], *, slow: bool = False) -> int:
    """Bytes of each array, or steps, that make a row as slow as it is meant to be.

    Args:
        row: the row.
        slopes: by row, or by kernel and work, as an earlier record has them; 1 where it has none.
        slow: a bimodal row is in its slower mode.
    """
    factor = (1 + row.planned) * (1 + MODES if slow else 1)
    launch = slopes.get(f"{row.kernel}-{row.work}", 1.0)
    return rounded(row.kernel, row.work * factor ** (1 / slopes.get(row.name, launch)))
