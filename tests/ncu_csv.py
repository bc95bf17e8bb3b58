"""Text as `ncu --csv --page raw --nvtx --print-units base` writes it, with the columns and the shape of its cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

HEADING = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
    "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
    "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__time_duration.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
)
UNITS = (*[""] * 13, "byte", "byte", "ns", "sector", "sector")
TRIAD = "void triad<float, 2>(T1 *, const T1 *, const T1 *, T1, unsigned long long)"


def stack(*names: str) -> str:
    """The cell of a kernel's push/pop ranges, outermost first."""
    entries = [name if ":" in name else f"gpumem:{name}" for name in names]
    return "1  " + "  ".join(f'"{entry}:none:none:none:none:none:none"' for entry in entries) + " "


def measured(test: str, label: str = "") -> str:
    """The cell of a measured launch."""
    return stack(test, *([label] if label else []), f"{test}.measure", f"{test}.launch")


def line(identity: int, kernel: str, ranges: str, figures: Sequence[object]) -> tuple[object, ...]:
    where = ("1", "7", "(256, 1, 1)", "(1056, 1, 1)", "0", "9.0", ranges, "")
    return (identity, "4242", "python3.12", "127.0.0.1", kernel, *where, *figures)


def log(
    *lines: Sequence[object], heading: tuple[str, ...] = HEADING, units: tuple[str, ...] = UNITS
) -> str:
    """A whole log: what ncu says about the process, the table, what it says at the end."""
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([heading, units, *lines])
    before = '==PROF== Connected to process 4242 (/usr/bin/python3.12)\n==PROF== Profiling "triad" - 0: 0%....100% - 2 passes\n'
    return f"{before}{out.getvalue()}==PROF== Disconnected from process 4242\n"


# Figures of a triad on an H200; sectors are of whole lines read and written once.
H200 = ("1073762048", "519266304", "367264", "33554432", "16777216")
