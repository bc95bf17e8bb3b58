"""Nsight Compute: the command line that counts traffic, and what it counted of each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.nsight.raw_page import BadOutput as BadOutput
from pytest_gpumem.nsight.raw_page import Line, lines_of
from pytest_gpumem.ranges import DOMAIN, MEASURE

SECTOR = 32
"""Bytes of a sector, the unit in which L2 is asked."""

DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Asked by the SMs. The sum over all units (lts__t_sectors_op_read) counts a sector twice that crosses between the two halves of
# L2 of an A100 or H100.
L2_READ, L2_WRITE = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
DURATION = "gpu__time_duration.sum"
# What the SMs read and L2 had, in sectors, and the share that L2 had of all that anybody asked of it.
L2_READ_HIT, L2_READ_MISS = "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum", "lts__t_sectors_srcunit_tex_op_read_lookup_miss.sum"
L2_HIT_RATE = "lts__t_sector_hit_rate.pct"
METRICS = (DURATION, DRAM_READ, DRAM_WRITE, L2_READ, L2_WRITE)

MEASURED_RANGES = f"regex:{DOMAIN}@.+.{MEASURE}/"
"""Filter of `--nvtx-include` on every test's measured launches. Its third point stands for one without a backslash, which ncu reads
as an escape; what it finds too much is left out by `Kernel.ranges`."""

COUNTERS_DOCUMENT = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel as ncu counted it."""

    name: str
    """Demangled name with its template and parameter types."""
    ranges: tuple[str, ...]
    """Ranges of our domain that were open, outermost first."""
    seconds: float
    """Duration in seconds, at the clocks of the moment."""
    reads: int
    """Bytes read from DRAM."""
    writes: int
    """Bytes written to DRAM."""
    l2_reads: int | None
    """Bytes that the SMs read from L2, in whole sectors; None where this GPU has no such counter."""
    l2_writes: int | None
    """Bytes that the SMs wrote to L2, in whole sectors; None where this GPU has no such counter."""
    more: Mapping[str, float | None] = field(default_factory=dict)
    """Further metrics that were asked for, by name: sectors, and shares for those in percent; None where there is no such counter."""


def counting_command(
    ncu: Path, child: Sequence[str], log: Path, *, warm: bool = False, hot: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """The command that counts the measured launches of a child.

    Clocks are left alone. The caches are emptied before every kernel, as ncu does by default: each one is counted cold, whatever
    the measurement's mode, and several kernels of one launch are counted as if they shared nothing through L2.

    Args:
        ncu: the program.
        child: the command that it runs and watches, with all its child processes.
        log: file for what ncu itself says, CSV included.
        warm: leave the caches as the child's own work leaves them, lines that persist included. What does not fit into one pass is
            counted in another run of the child, because a kernel that is replayed finds what its replay left; so every run must make
            the same launches.
        hot: leave the caches as each pass finds them, which is hot from the second one on: for kernels that are measured hot.
        more: metrics beside `METRICS`.
    """
    command = [str(ncu), "--clock-control", "none", "--cache-control", "none" if warm or hot else "all", "--target-processes", "all"]
    command += ["--replay-mode", "application"] if warm else []
    command += ["--nvtx", "--nvtx-include", MEASURED_RANGES]
    command += ["--metrics", ",".join((*METRICS, *more)), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
    return [*command, *child]


def trouble(text: str) -> str | None:
    """The cause and the remedy that stand in what ncu said, in one line; None if it complained of nothing."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): load the driver with NVreg_RestrictProfilingToAdminUsers=0, "
            f"or run as administrator, in a container with --cap-add=SYS_ADMIN; see {COUNTERS_DOCUMENT}"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    # That the tests failed is pytest's to say: ncu calls every exit code but 0 an error.
    errors = [error for error in errors if error and "returned an error code" not in error]
    return f"ncu: {errors[0]}" if errors else None


def parse(text: str, more: Sequence[str] = ()) -> tuple[Kernel, ...]:
    """The kernels in what `counting_command` wrote into its log, in the order of their launches.

    Args:
        text: the log.
        more: the further metrics that it was told.

    Raises:
        BadOutput: a column is missing, a unit is unknown, or a figure is none.
    """
    lines = lines_of(text, ("Kernel Name", DURATION, DRAM_READ, DRAM_WRITE), ranges=True) or ()
    return tuple(_kernel(line, more) for line in lines)


def _kernel(line: Line, more: Sequence[str]) -> Kernel:
    name = line.cells["Kernel Name"]
    duration, reads, writes = (line.figure(metric) for metric in (DURATION, DRAM_READ, DRAM_WRITE))
    if duration is None or reads is None or writes is None:
        raise BadOutput(f"ncu counted no DRAM bytes of {name}: this GPU has no such counter, or another tool holds it")
    sectors = [None if (count := line.figure(metric)) is None else round(count) * SECTOR for metric in (L2_READ, L2_WRITE)]
    further = {metric: line.figure(metric) for metric in more}
    return Kernel(name, line.ranges, duration, round(reads), round(writes), sectors[0], sectors[1], further)
