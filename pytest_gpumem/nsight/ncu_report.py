"""What Nsight Compute counted of each measurement, from its raw CSV page or from a report by its Python module `ncu_report`.

Nsight Compute sees kernels only, and each on its own: caches are emptied before it and clocks may be fixed, as it was told
(`--cache-control`, `--clock-control`). Times are those of the kernel alone.
"""

from __future__ import annotations

import glob
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.nsight.ncu import (
    DRAM_READ,
    DRAM_WRITE,
    DURATION,
    L2_HIT_RATE,
    L2_READ,
    L2_READ_HIT,
    L2_READ_MISS,
    L2_WRITE,
    SECTOR,
)
from pytest_gpumem.nsight.raw_page import BadOutput, lines_of, unit
from pytest_gpumem.nsight.recording import Place, Recording, clock, kernels_together, place_of
from pytest_gpumem.ranges import DOMAIN
from pytest_gpumem.records.profile import Besides, TestProfile
from pytest_gpumem.records.uses import KernelUse

SECTORS_PER_LOAD = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
SECTORS_PER_STORE = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
# What gld_efficiency and gst_efficiency of nvprof were: bytes that the threads use of each sector. Counted by instrumented code.
USED_OF_LOAD = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"
USED_OF_STORE = "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.pct"
# What gld_transactions and gst_transactions of nvprof were: sectors that loads and stores touch in L1.
L1_LOAD, L1_STORE = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
# The clock of the GPCs is that of the SMs; the sections of newer versions show the first as "SM Frequency", of older ones the second.
SM_CLOCKS = ("gpc__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second")
MEMORY_CLOCK = "dram__cycles_elapsed.avg.per_second"
REGISTERS = "launch__registers_per_thread"
SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")
SET_ASIDE = "launch__persisting_l2_cache_size"
"""The set-aside for persisting accesses; newer versions have it."""

PROFILE_METRICS = (
    DURATION, DRAM_READ, DRAM_WRITE, L2_READ, L2_WRITE, L2_HIT_RATE, L2_READ_HIT, L2_READ_MISS,
    SECTORS_PER_LOAD, SECTORS_PER_STORE, OCCUPANCY, SM_CLOCKS[0], MEMORY_CLOCK,
)  # fmt: skip
"""What to ask of Nsight Compute (`--metrics`) so that a profile holds all that can be told. Metrics that a report lacks are None in it;
`REGISTERS`, `SHARED`, `SET_ASIDE` and those of `ACCESS_METRICS` are read where a report has them."""
ACCESS_METRICS = (USED_OF_LOAD, USED_OF_STORE, L1_LOAD, L1_STORE)
"""What tells wasted sectors from further bytes. Not every GPU has them, and ncu counts nothing where it is asked for what it lacks."""

_METRICS = (*PROFILE_METRICS, *ACCESS_METRICS, SM_CLOCKS[1], REGISTERS, *SHARED, SET_ASIDE)

MODULE_FOLDERS = ("/opt/nvidia/nsight-compute/*/extras/python", "/usr/local/cuda*/nsight-compute-*/extras/python")
"""Where installers put the module `ncu_report`; patterns, of several matches the newest version is taken."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch as a report has it."""

    name: str
    """Demangled name."""
    ranges: tuple[str, ...]
    """Ranges of our domain that were open, outermost first."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    process: int | None
    """Process id; None where the report does not say."""
    figures: Mapping[str, float]
    """Metrics by name, in bytes, sectors, seconds, hertz and shares; what was not counted is missing."""


def read_csv(text: str) -> Recording:
    """The measurements in what `ncu --csv --page raw` printed or logged, in base units or others.

    Raises:
        BadOutput: it is no such page, a unit is unknown, a figure is none, or no kernel lies in a range of a test.
    """
    return _recording(list(_csv_launches(text)), "")


def _csv_launches(text: str) -> Iterator[Launch]:
    lines = lines_of(text, ("Kernel Name", "Grid Size", "Block Size", DURATION))
    if lines is None:
        raise BadOutput("no raw page of ncu as CSV; accepted is what `ncu --csv --page raw` writes")
    for line in lines:
        process = line.cells.get("Process ID", "").strip()
        yield Launch(
            line.cells["Kernel Name"],
            line.ranges,
            _size(line.cells["Grid Size"]),
            _size(line.cells["Block Size"]),
            int(process) if process.isdigit() else None,
            {name: value for name in _METRICS if (value := line.figure(name)) is not None},
        )


def _size(written: str) -> tuple[int, int, int]:
    numbers = re.findall(r"[0-9]+", written)
    if not 1 <= len(numbers) <= 3:
        raise BadOutput(f"ncu gives a grid or block as {written!r}; accepted are up to three numbers")
    x, y, z = (*map(int, numbers), *[1] * (3 - len(numbers)))
    return x, y, z


def module(program: Path | None) -> Any:
    """The module `ncu_report`: importable already, beside the program, or in a usual folder. None where there is none, or it fails.

    Args:
        program: the command line of Nsight Compute, whose folder has the module that fits it.
    """
    folders = [] if program is None else [str(parent / "extras" / "python") for parent in program.resolve().parents]
    for pattern in MODULE_FOLDERS:
        folders += sorted(glob.glob(pattern), key=lambda folder: [int(n) for n in re.findall(r"[0-9]+", folder)], reverse=True)
    for folder in (None, *folders):
        if folder is not None and not Path(folder, "ncu_report.py").is_file():
            continue
        before = list(sys.path)
        try:
            if folder is not None:
                sys.path.insert(0, folder)
            return importlib.import_module("ncu_report")
        except Exception:
            # A native module of another platform or Python fails in its own ways; the program itself reads the report then.
            continue
        finally:
            sys.path[:] = before
    return None


def read_report(ncu_report: Any, path: Path) -> Recording:
    """The measurements in a report file.

    Args:
        ncu_report: the module.
        path: a `.ncu-rep`.

    Raises:
        BadOutput: the file cannot be loaded, a unit is unknown, or no kernel lies in a range of a test.
    """
    try:
        context = ncu_report.load_report(str(path))
        # Objects of this module point into those that they came from and do not keep them: all are held until everything is read.
        ranges = [context.range_by_idx(number) for number in range(context.num_ranges())]
        actions = [one.action_by_idx(index) for one in ranges for index in range(one.num_actions())]
        launches = [_launch(action) for action in actions]
        version = str(ncu_report.get_version()) if hasattr(ncu_report, "get_version") else ""
    except BadOutput:
        raise
    except Exception as error:
        # The module raises its own errors, and RuntimeError for a file that it cannot parse.
        lines = str(error).splitlines()
        raise BadOutput(f"no report that the module ncu_report can read: {lines[0] if lines else type(error).__name__}") from None
    return _recording(launches, version)


def _launch(action: Any) -> Launch:
    def metric(name: str) -> Any:
        found = action.metric_by_name(name)
        return None if found is None or found.value() is None else found

    def size(what: str) -> tuple[int, int, int]:
        # Whatever unit the module gives them, such as "block" for the threads of a block, these are numbers.
        found = (metric(f"launch__{what}_dim_{axis}") for axis in "xyz")
        x, y, z = (1 if one is None else round(one.as_double()) for one in found)
        return x, y, z

    state = action.nvtx_state()
    domains = [] if state is None else [state.domain_by_id(identity) for identity in state.domains()]
    names = [str(name) for domain in domains if domain.name() == DOMAIN for name in domain.push_pop_ranges()]
    taken = {name: found for name in _METRICS if (found := metric(name)) is not None}
    figures = {name: float(found.as_double()) * unit(found.unit() or "", name) for name, found in taken.items()}
    return Launch(str(action.name(action.NameBase_DEMANGLED)), tuple(names), size("grid"), size("block"), None, figures)


def _recording(launches: Sequence[Launch], version: str) -> Recording:
    measured: dict[tuple[int | None, str, str], list[Launch]] = defaultdict(list)
    rest: dict[tuple[int | None, str, str], list[Launch]] = defaultdict(list)
    outside = []
    order: dict[tuple[int | None, str, str], None] = {}
    for one in launches:
        place: Place | None = place_of(one.ranges)
        if place is None:
            outside.append(one)
            continue
        key = one.process, place.test, place.label
        order[key] = None
        (measured if place.measured else rest)[key].append(one)
    if not order:
        raise BadOutput(
            f"{len(launches)} kernels, none of them in an NVTX range of the domain {DOMAIN}: run pytest --gpumem under `ncu --nvtx`, as "
            "`gpumem profile ncu` does"
        )
    profiles = []
    for key in order:
        kernels = kernels_together(_use(one) for one in measured[key])
        asides = {one.figures[SET_ASIDE] for one in measured[key] if SET_ASIDE in one.figures}
        profiles.append(
            TestProfile(
                name=key[1],
                nodeid=None,
                label=key[2],
                launches=None,
                kernels=kernels,
                rest=Besides(kernels_together(_use(one) for one in rest[key])),
                sm_clock_hz=clock(kernels, "sm_clock_hz"),
                memory_clock_hz=clock(kernels, "memory_clock_hz"),
                set_aside=round(asides.pop()) if len(asides) == 1 else None,
                process=key[0],
                tool="ncu",
                tool_version=version,
            )
        )
    return Recording(tuple(profiles), Besides(kernels_together(_use(one) for one in outside)), _notes(launches), "ncu", version)


def _notes(launches: Iterable[Launch]) -> tuple[str, ...]:
    absent = [name for name in (DURATION, DRAM_READ, DRAM_WRITE) if not all(name in one.figures for one in launches)]
    return (f"not counted of every kernel: {', '.join(absent)}",) if absent else ()


def _use(one: Launch) -> KernelUse:
    figures = one.figures

    def whole(*names: str, times: int = 1) -> int | None:
        found = [figures[name] for name in names if name in figures]
        return round(sum(found)) * times if len(found) == len(names) else None

    hit, miss = whole(L2_READ_HIT), whole(L2_READ_MISS)
    return KernelUse(
        one.name,
        one.grid,
        one.block,
        launches=1,
        nanoseconds=round(figures.get(DURATION, 0.0) * 1e9),
        registers=whole(REGISTERS),
        shared=whole(*SHARED),
        dram_read=whole(DRAM_READ),
        dram_written=whole(DRAM_WRITE),
        l2_read=whole(L2_READ, times=SECTOR),
        l2_written=whole(L2_WRITE, times=SECTOR),
        l2_hit_rate=figures.get(L2_HIT_RATE),
        l2_read_hit_rate=hit / (hit + miss) if hit is not None and miss is not None and hit + miss else None,
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
