"""Counters of Nsight Compute by test, from its raw CSV page (`ncu --csv --page raw`).

Nsight Compute profiles kernels only, and each on its own: caches are emptied before it and clocks may be fixed, according to
`--cache-control` and `--clock-control`. Times are of the kernel alone.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.nsight.recording import BadReport, RangePlace, place_of
from pytest_gpumem.nsight.tools import (
    DRAM_READ,
    DRAM_WRITE,
    DURATION,
    L2_READ,
    L2_WRITE,
    numbers_in,
)
from pytest_gpumem.ranges import DOMAIN
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import KernelUse, clock, kernels_together, longest_first

SECTOR = 32  # bytes of a sector, the unit of requests to L2

# Reads of the SMs that hit and missed, in sectors; and the hit rate of all requests.
L2_READ_HIT, L2_READ_MISS = (
    "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "lts__t_sectors_srcunit_tex_op_read_lookup_miss.sum",
)
L2_HIT_RATE = "lts__t_sector_hit_rate.pct"
SECTORS_PER_LOAD = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
SECTORS_PER_STORE = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
# gld_efficiency and gst_efficiency of nvprof: bytes of each sector that the threads use. Counted by instrumented code.
USED_OF_LOAD = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"
USED_OF_STORE = "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.pct"
# gld_transactions and gst_transactions of nvprof: sectors that loads and stores touch in L1.
L1_LOAD, L1_STORE = (
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
)
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
# The clock of the GPCs is that of the SMs; the sections of newer versions show the first as "SM Frequency", of older ones the second.
SM_CLOCKS = ("gpc__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second")
MEMORY_CLOCK = "dram__cycles_elapsed.avg.per_second"
REGISTERS = "launch__registers_per_thread"
SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
SET_ASIDE = "launch__persisting_l2_cache_size"  # the set-aside for persisting accesses; newer versions have it

PROFILE_METRICS = (
    DURATION, DRAM_READ, DRAM_WRITE, L2_READ, L2_WRITE, L2_HIT_RATE, L2_READ_HIT, L2_READ_MISS,
    SECTORS_PER_LOAD, SECTORS_PER_STORE, OCCUPANCY, SM_CLOCKS[0], MEMORY_CLOCK,
)  # fmt: skip
"""Metrics to request (`--metrics`) for a full profile. Those that a report lacks are None in it. `REGISTERS`, `SHARED`, `SET_ASIDE` and
`ACCESS_METRICS` are read if a report has them."""
ACCESS_METRICS = (USED_OF_LOAD, USED_OF_STORE, L1_LOAD, L1_STORE)
"""Metrics that tell wasted sectors from further bytes. Not every GPU has them, and ncu counts nothing if one is missing."""

_METRICS = (*PROFILE_METRICS, *ACCESS_METRICS, SM_CLOCKS[1], REGISTERS, *SHARED, SET_ASIDE)


@dataclass(frozen=True)
class CountedKernel:
    """One launch of a kernel as a report has it."""

    use: KernelUse
    ranges: tuple[str, ...]  # ranges of the domain `gpumem` that were open, outermost first
    process: int | None = None  # process id; None if the report does not have it
    set_aside: int | None = None  # bytes of L2 set aside for persisting accesses


def read_csv(page: str) -> tuple[TestProfile, ...]:
    """The measurements in the output or log of `ncu --csv --page raw`, in base units or others, in the order of the session.
    Raises `BadReport`: it is no such page, a unit is unknown, a figure is no number, or no kernel is in a range of a test.
    """
    lines = lines_of(page, ("Kernel Name", "Grid Size", "Block Size", DURATION))
    if lines is None:
        raise BadReport("no raw page of ncu as CSV; accepted is what `ncu --csv --page raw` writes")
    return _profiles([_kernel_on(line) for line in lines])


def _profiles(kernels: Sequence[CountedKernel]) -> tuple[TestProfile, ...]:
    by_place: dict[tuple[int | None, RangePlace], list[CountedKernel]] = defaultdict(list)
    for one in kernels:
        if (place := place_of(one.ranges)) is not None:
            by_place[one.process, place].append(one)
    if not by_place:
        raise BadReport(
            f"{counted(len(kernels), 'kernel')} outside every NVTX range of the domain {DOMAIN}: run pytest --gpumem under "
            "`ncu --nvtx`, as `gpumem profile ncu` does"
        )
    profiles = []
    for (process, place), launched in by_place.items():
        if not place.measured:
            continue
        uses = longest_first(kernels_together(one.use for one in launched))
        asides = {one.set_aside for one in launched} - {None}
        profiles.append(
            TestProfile(
                name=place.test,
                nodeid=None,
                label=place.label,
                launches=None,
                kernels=uses,
                sm_clock_hz=clock(uses, "sm_clock_hz"),
                memory_clock_hz=clock(uses, "memory_clock_hz"),
                set_aside=asides.pop() if len(asides) == 1 else None,
                process=process,
                tool="ncu",
            )
        )
    return tuple(profiles)


# The raw page as CSV: a line for each kernel, below the units of its columns

_RANGE = re.compile(rf"(?<![\w.:>-]){re.escape(DOMAIN)}:([A-Za-z0-9_.-]+)(?=:|\"|\s|$)")
_STACK = "thread Domain:Push/Pop_Range"


def _kernel_on(line: PageLine) -> CountedKernel:
    """A kernel with its metrics in bytes, sectors, seconds, hertz and shares."""
    figures = {name: value for name in _METRICS if (value := line.figure(name)) is not None}

    def whole(*names: str, times: int = 1) -> int | None:
        found = [figures[name] for name in names if name in figures]
        return round(sum(found)) * times if len(found) == len(names) else None

    hit, miss = whole(L2_READ_HIT), whole(L2_READ_MISS)
    use = KernelUse(
        line.cells["Kernel Name"],
        _size(line.cells["Grid Size"]),
        _size(line.cells["Block Size"]),
        launches=1,
        nanoseconds=round(figures.get(DURATION, 0.0) * 1e9),
        registers=whole(REGISTERS),
        shared=whole(*SHARED),
        dram_read=whole(DRAM_READ),
        dram_written=whole(DRAM_WRITE),
        l2_read=whole(L2_READ, times=SECTOR),
        l2_written=whole(L2_WRITE, times=SECTOR),
        l2_hit_rate=figures.get(L2_HIT_RATE),
        l2_read_hit_rate=hit / (hit + miss)
        if hit is not None and miss is not None and hit + miss
        else None,
        sectors_per_request=figures.get(SECTORS_PER_LOAD),
        sectors_per_store=figures.get(SECTORS_PER_STORE),
        used_of_load=figures.get(USED_OF_LOAD),
        used_of_store=figures.get(USED_OF_STORE),
        l1_load=whole(L1_LOAD, times=SECTOR),
        l1_store=whole(L1_STORE, times=SECTOR),
        occupancy=figures.get(OCCUPANCY),
        sm_clock_hz=next((figures[name] for name in SM_CLOCKS if name in figures), None),
        memory_clock_hz=figures.get(MEMORY_CLOCK),
    )
    process = line.cells.get("Process ID", "").strip()
    return CountedKernel(
        use, line.ranges, int(process) if process.isdigit() else None, whole(SET_ASIDE)
    )


def _size(written: str) -> tuple[int, int, int]:
    numbers = numbers_in(written)
    if not 1 <= len(numbers) <= 3:
        raise BadReport(
            f"ncu gives a grid or block as {written!r}; accepted are up to three numbers"
        )
    x, y, z = (*numbers, *[1] * (3 - len(numbers)))
    return x, y, z


@dataclass(frozen=True)
class PageLine:
    """One kernel of the page."""

    cells: Mapping[str, str]  # by the headings of their columns
    units: Mapping[str, str]  # by the same headings

    @property
    def ranges(self) -> tuple[str, ...]:
        """Ranges of the domain `gpumem` that were open on the kernel's thread, outermost first."""
        return tuple(
            _RANGE.findall(
                " ".join(cell for heading, cell in self.cells.items() if heading.startswith(_STACK))
            )
        )

    def figure(self, metric: str) -> float | None:
        """A metric in bytes, sectors, seconds, hertz or as a share; None for "n/a", or without such a column.
        Raises `BadReport`: it is no number, or its unit is unknown.
        """
        written = self.cells.get(metric, "")
        # A cell may have the parts of its figure behind it: "4.0 (1; 2; 3)".
        plain = written.partition("(")[0].strip()
        if plain.lower() in ("", "n/a", "nan"):
            return None
        one = unit(self.units[metric], metric)
        try:
            return float(plain.replace(",", "")) * one
        except ValueError:
            raise BadReport(f"ncu gives {metric} as {written!r}, which is no number") from None


def lines_of(text: str, needed: Iterable[str]) -> list[PageLine] | None:
    """The lines of a page in the order of the launches; None without a page.
    `text`: the page, with any other output of ncu and its child.
    `needed`: required headings.
    Raises `BadReport`: a column is missing, or a line and the headings differ in length.
    """
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return None
    heading, *rows = list(csv.reader(line + "\n" for line in lines[begin:]))
    missing = [name for name in needed if name not in heading]
    if missing:
        raise BadReport(
            f"ncu's CSV has no {', '.join(missing)}; its columns are {', '.join(heading)}"
        )
    return list(_lines(heading, rows))


def _lines(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[PageLine]:
    units = dict.fromkeys(heading, "")
    for row in rows:
        if not row:
            continue
        if len(row) != len(heading):
            raise BadReport(
                f"ncu's CSV has a line of {len(row)} columns below {len(heading)} headings: {','.join(row)[:120]}"
            )
        cells = dict(zip(heading, row, strict=True))
        if cells["ID"].strip():
            yield PageLine(cells, units)
        else:
            units = cells


_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "g": 1e9, "t": 1e12}
_COUNTS = (
    "block",
    "cluster",
    "grid",
    "inst",
    "pass",
    "register",
    "request",
    "sector",
    "sm",
    "thread",
    "warp",
)
"""Units of counts. A figure for each of them has the unit before the "/"."""
_BASES = {"byte": 1.0, "second": 1.0, "s": 1.0, "hz": 1.0, "%": 0.01, **dict.fromkeys(_COUNTS, 1.0)}


def unit(written: str, metric: str) -> float:
    """The factor of a unit to bytes, seconds, hertz, a share or a count: 0.01 for "%", 1e-9 for "ns" or "nsecond", 1e9 for "Ghz", 1 for
    "block" and "sector/request".
    Raises `BadReport`: the unit is not known.
    """
    plain = written.strip().lower()
    if not plain:
        return 1.0
    # A clock may be in cycles by time.
    if plain.startswith("cycle/"):
        return 1.0 / unit(plain.removeprefix("cycle/"), metric)
    counted, _, each = plain.partition("/")
    if each in _COUNTS:
        return unit(counted, metric)
    if plain in _BASES:
        return _BASES[plain]
    # m is a thousandth of a second, and a million of anything else.
    prefix, base = plain[0], plain[1:]
    if base in _BASES and base != "%":
        if prefix == "m" and base not in ("second", "s"):
            return 1e6 * _BASES[base]
        if prefix in _PREFIXES:
            return _PREFIXES[prefix] * _BASES[base]
    raise BadReport(f"ncu gives {metric} in {written!r}, which is no unit that is known")
