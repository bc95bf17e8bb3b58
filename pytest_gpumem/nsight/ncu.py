"""Counters of kernels by test: from the raw CSV page of Nsight Compute, or times from `nsys stats`.

Nsight Compute profiles kernels only, and each on its own, with empty caches before it.
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.nsight.tools import (
    FORBIDDEN,
    NCU,
    NSYS,
    find,
    ncu_cause,
    ncu_command,
    nsys_cause,
    nsys_command,
)
from pytest_gpumem.outcomes import FileError, NoAnswer
from pytest_gpumem.ranges import DOMAIN, MEASURE, phase
from pytest_gpumem.runs import processes
from pytest_gpumem.units import format_time, short_bytes


class CountersForbidden(NoAnswer):
    """This user may not read the GPU's counters."""


@dataclass(frozen=True)
class Counter:
    """A figure of a kernel."""

    title: str
    metrics: tuple[str, ...]  # of ncu; the figure is their sum
    text: Callable[[float], str]


def _time(nanoseconds: float) -> str:
    return format_time(nanoseconds / 1e9)


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _number(value: float) -> str:
    return f"{value:.4g}"


_LOCAL = "l1tex__t_bytes_pipe_lsu_mem_local_op_"
_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_"
TIME = Counter("time", ("gpu__time_duration.sum",), _time)
COUNTERS = (
    Counter("DRAM bytes", ("dram__bytes_read.sum", "dram__bytes_write.sum"), short_bytes),
    Counter("L2 hit rate", ("lts__t_sector_hit_rate.pct",), _percent),
    Counter("sectors/load", (f"{_SECTORS}ld.ratio",), _number),
    Counter("sectors/store", (f"{_SECTORS}st.ratio",), _number),
    Counter("registers", ("launch__registers_per_thread",), _number),
    Counter("local bytes", (f"{_LOCAL}ld.sum", f"{_LOCAL}st.sum"), short_bytes),
    Counter("occupancy", ("sm__warps_active.avg.pct_of_peak_sustained_active",), _percent),
)
METRICS = sum((counter.metrics for counter in COUNTERS), TIME.metrics)
RAW_CSV = ("--csv", "--page", "raw", "--print-units", "base")
"""Options of a page that `read_launches` reads."""


@dataclass(frozen=True)
class ProfiledKernel:
    """A kernel in a measurement: a launch, or all of them with means. Metrics are in bytes,
    nanoseconds, percent and counts."""

    test: str  # name of the test's range
    label: str  # of the measurement in its range; empty without one
    name: str  # demangled
    launches: int
    metrics: Mapping[str, float]

    @property
    def place(self) -> str:
        """The measurement, such as "test_sum_f4 small"."""
        return f"{self.test} {self.label}".rstrip()

    def figure(self, counter: Counter) -> float | None:
        total = 0.0
        for metric in counter.metrics:
            if metric not in self.metrics:
                return None
            total += self.metrics[metric]
        return total


def kernels_of(launches: Iterable[ProfiledKernel]) -> list[ProfiledKernel]:
    """The kernels of each measurement, without metrics that a launch lacks."""
    groups: dict[tuple[str, str, str], list[ProfiledKernel]] = {}
    for launch in launches:
        groups.setdefault((launch.test, launch.label, launch.name), []).append(launch)
    kernels = []
    for key, group in groups.items():
        count = sum(launch.launches for launch in group)
        means = {}
        for metric in group[0].metrics:
            if all(metric in launch.metrics for launch in group):
                total = sum(launch.metrics[metric] * launch.launches for launch in group)
                means[metric] = total / count
        kernels.append(ProfiledKernel(*key, count, means))
    return kernels


# Nsight Compute

_STACK = "thread Domain:Push/Pop_Range"  # begins the headings of the columns with ranges
_RANGE = re.compile(rf'"{DOMAIN}:([A-Za-z0-9_.-]+):')
_UNITS = (
    "",
    "byte",
    "byte/block",
    "ns",
    "nsecond",
    "%",
    "sector",
    "sector/request",
    "register/thread",
)


def read_launches(page: str, metrics: Sequence[str] = METRICS) -> list[ProfiledKernel]:
    """The measured launches of `ncu --csv --page raw --print-units base` among other output. Raises
    `FileError`: it is no such page, or a figure or its unit is unknown."""
    _, heading, rest = page.partition('"ID"')
    lines = (heading + rest).splitlines()
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    headings = table.fieldnames or []
    for name in ("ID", "Kernel Name"):
        if name not in headings:
            raise FileError(f"ncu's CSV has no column {name}: no `ncu --csv --page raw`")
    launches = []
    units: Mapping[str, str] = {}
    for row in table:
        if None in row or None in row.values():
            raise FileError(f"ncu's CSV has a line that is no row of {len(headings)} columns")
        if not row["ID"]:
            units = row
            continue
        stack = []
        for heading, cell in row.items():
            if heading.startswith(_STACK):
                stack += _RANGE.findall(cell)
        place = place_of(stack)
        if place is not None:
            figures = _figures(row, units, metrics)
            launches.append(ProfiledKernel(*place, row["Kernel Name"], 1, figures))
    return launches


def _figures(
    row: Mapping[str, str], units: Mapping[str, str], metrics: Sequence[str]
) -> dict[str, float]:
    figures = {}
    for metric in metrics:
        # A cell may have the parts of its figure behind it: "4.0 (1; 2; 3)".
        text = row.get(metric, "").partition("(")[0].strip().replace(",", "")
        if text.lower() in ("", "n/a", "nan", "inf"):
            continue
        if units.get(metric) not in _UNITS:
            raise FileError(f"ncu gives {metric} in {units.get(metric)!r}, which is no base unit")
        try:
            figures[metric] = float(text)
        except ValueError:
            raise FileError(f"ncu gives {metric} as {text!r}, which is no number") from None
    return figures


def place_of(ranges: Sequence[str]) -> tuple[str, str] | None:
    """The test and the label of a measured launch by its open ranges, outermost first, or None."""
    # The innermost: a test that runs pytest itself has another test's ranges around it.
    for name in reversed(ranges):
        if name.endswith(f".{MEASURE}"):
            test = name.removesuffix(f".{MEASURE}")
            break
    else:
        return None
    prefix = phase(test, "label.")
    for name in ranges:
        if name.startswith(prefix):
            return test, name.removeprefix(prefix)
    return test, ""


def count_launches(
    command: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    *,
    folder: Path | None = None,
    metrics: Sequence[str] = METRICS,
) -> tuple[list[ProfiledKernel], int]:
    """Run pytest's `command` under Nsight Compute: the measured launches, and pytest's exit code.
    Raises `CountersForbidden`, or `NoAnswer`: nothing was counted."""
    program = find(NCU, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as scratch:
        log = Path(scratch, "ncu.log")
        output = [*RAW_CSV, "--log-file", str(log)]
        ncu = ncu_command(program, command, output, metrics=metrics)
        finished = processes.run(ncu, environment, echo, folder=folder)
        page = log.read_text(errors="replace") if log.exists() else ""
    cause = ncu_cause(page + finished.stdout)
    if cause is not None and FORBIDDEN in cause:
        raise CountersForbidden(cause)
    launches = []
    if '"ID"' in page:
        try:
            launches = read_launches(page, metrics)
        except FileError as error:
            raise NoAnswer(cause or str(error)) from None
    if not launches:
        raise NoAnswer(
            cause or f"ncu counted no measured launch ({processes.ending(finished.returncode)})"
        )
    return launches, finished.returncode


def table(kernels: Sequence[ProfiledKernel]) -> list[str]:
    """A table: below each measurement its kernels, and below each kernel its figures."""
    counters = (TIME, *COUNTERS)
    lines = [_line(counter.title for counter in counters)]
    place = None
    for kernel in kernels:
        if kernel.place != place:
            place = kernel.place
            lines.append(place)
        lines.append(f"  {kernel.launches} × {kernel.name}")
        figures = []
        for counter in counters:
            value = kernel.figure(counter)
            figures.append("-" if value is None else counter.text(value))
        lines.append(_line(figures))
    return lines


def _line(cells: Iterable[str]) -> str:
    line = "  "
    for cell, counter in zip(cells, (TIME, *COUNTERS), strict=True):
        line += "  " + cell.rjust(max(len(counter.title), 9))
    return line


# Nsight Systems


def time_launches(
    command: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    *,
    folder: Path,
) -> tuple[list[ProfiledKernel], int]:
    """As `count_launches`, under Nsight Systems: each kernel with its launches and mean time."""
    program = find(NSYS, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as scratch:
        report = Path(scratch, f"run{NSYS.report}")
        tracing = nsys_command(program, command, report, test=None, managed=False)
        traced = processes.run(tracing, environment, echo, folder=folder)
        stats = [str(program), "stats", "--report", "nvtx_kern_sum", "--format", "csv", str(report)]
        printed = processes.run(stats, environment, folder=folder)
    launches = read_times(printed.stdout)
    if not launches:
        cause = nsys_cause(traced.stdout, report)
        raise NoAnswer(
            cause or f"nsys recorded no measured launch ({processes.ending(traced.returncode)})"
        )
    return launches, traced.returncode


def read_times(page: str) -> list[ProfiledKernel]:
    _, heading, rest = page.partition("NVTX Range,")
    launches = []
    for row in csv.DictReader((heading + rest).splitlines()):
        domain, _, name = row["NVTX Range"].partition(":")
        place = place_of([name])
        kernel, count, mean = row.get("Kernel Name"), row.get("Kern Inst"), row.get("Avg (ns)")
        if domain != DOMAIN or place is None or not kernel or not count or not mean:
            continue
        try:
            time = {TIME.metrics[0]: float(mean)}
            launches.append(ProfiledKernel(*place, kernel, int(count), time))
        except ValueError:
            continue
    return launches
