"""DRAM bytes that ncu counts against declared traffic, for every kernel of the catalogue.

    python ci/bench/catalogue_traffic.py --json ci/records/nvidia-h200/catalogue_traffic.json

Runs `catalogue_traffic_cases.py` under Nsight Compute: five launches of each kernel on arrays of 256 MiB, caches emptied before
each. Declared are compulsory bytes, every distinct byte once. Takes about a minute; --kernel NAME counts one.

Needs ncu and the permission to read counters. Exits with 1 where a declaration is wrong, or a kernel was not counted that should be.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, write_record

from pytest_gpumem.files import load_results
from pytest_gpumem.judging.finding import no_share_of_peak
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.nsight.ncu import ProfiledKernel, count_launches
from pytest_gpumem.outcomes import NoAnswer, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import Document, device_to_json
from pytest_gpumem.runs import processes
from pytest_gpumem.units import MB

CASES = Path(__file__).resolve().parent / "catalogue_traffic_cases.py"
SHARE = 0.05  # of the declared bytes, by which a count may differ without notice; correct declarations were counted within 3.6 %
AGREES, WRONG, EXCESS, UNJUDGED = "agrees", "declared too much", "moves more", "not judged"

METRICS = {"reads": "dram__bytes_read.sum", "writes": "dram__bytes_write.sum"}

Record = dict[str, Any]


def count(options: Sequence[str], tests: Sequence[str]) -> tuple[Document, list[ProfiledKernel]]:
    """Run the cases under Nsight Compute: their results, and the measured launches."""

    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results = Path(folder, "results.json")
        command = processes.pytest_command(options, tests=tests, results=results)
        launches, _ = count_launches(
            command,
            processes.for_a_part(os.environ),
            partial(print, file=sys.stderr),
            metrics=tuple(METRICS.values()),
        )
        document = load_results(results).document
    return document, launches


def of_one_launch(launches: Sequence[ProfiledKernel]) -> Record | None:
    """The bytes that one launch of a measurement moves; None if one was not counted."""
    sums = {}
    for name, metric in METRICS.items():
        figures = [launch.metrics.get(metric) for launch in launches]
        known = [figure for figure in figures if figure is not None]
        if not known or len(known) < len(figures):
            return None
        sums[name] = round(sum(known) / len(known))
    return sums


def record_of(row: Row, launches: Sequence[ProfiledKernel], facts: DeviceFacts) -> Record:
    """The declared and the counted bytes of a row, and how they compare."""
    plain: Record = {"key": row.key, "nodeid": row.nodeid, "moved_bytes": None, "dram_bytes": None}
    measurement = row.measurement
    if measurement is None or measurement.moved_bytes is None:
        return plain
    moved = measurement.moved_bytes
    plain["moved_bytes"] = {"reads": moved.reads, "writes": moved.writes, "total": moved.total}
    # Each case launches one kernel at a time.
    counted = of_one_launch([launch for launch in launches if launch.test == row.range_name])
    if counted is None:
        return plain
    plain["dram_bytes"] = counted
    plain["difference"] = (counted["reads"] + counted["writes"]) / moved.total - 1
    # When a launch ends, up to a whole L2 of its writes has not reached DRAM.
    too_few_writes = counted["writes"] < (1 - SHARE) * moved.writes - facts.l2_bytes
    if no_share_of_peak(measurement, facts) is not None:
        plain["finding"] = UNJUDGED
    elif counted["reads"] < (1 - SHARE) * moved.reads or too_few_writes:
        plain["finding"] = WRONG
    elif plain["difference"] > SHARE:
        plain["finding"] = EXCESS
    else:
        plain["finding"] = AGREES
    return plain


def name_of(row: Record) -> str:
    """The kernel that a row is of."""
    return str(row["nodeid"]).partition("[")[2].removesuffix("]")


def table(record: Record) -> str:
    """The record as text."""
    device = record["device"]
    head = f"{device['name']}, driver {device['driver']}, {record['datetime'][:10]}; 256 MiB an array, one launch, caches emptied"
    lines = [head, "", f"{'kernel':<20}{'declared MB':>17}{'counted MB':>17}{'differ':>9}  says"]
    lines.append(f"{'':<20}{'read':>9}{'written':>8}{'read':>9}{'written':>8}")
    for row in record["rows"]:
        differ = f"{100 * row['difference']:+.1f}%" if "difference" in row else ""
        pairs = _pair(row["moved_bytes"]) + _pair(row["dram_bytes"])
        says = row.get("finding", "not counted")
        lines.append(f"{name_of(row):<20}{pairs}{differ:>9}  {says}")
    lines += ["", f"{len(record['rows'])} kernels; L2 of {device['l2_bytes'] / MB:.1f} MB"]
    if record["absent"]:
        lines.append(f"NOT COUNTED: {', '.join(record['absent'])}")
    return "\n".join(line.rstrip() for line in lines)


def _pair(figures: Record | None) -> str:
    return (
        f"{'-':>9}{'-':>8}"
        if figures is None
        else f"{figures['reads'] / MB:>9.1f}{figures['writes'] / MB:>8.1f}"
    )


def absent(rows: Sequence[Record], wanted: Sequence[str]) -> list[str]:
    """Kernels without a count, though they run on SMs."""
    counted = {name_of(row) for row in rows if row["dram_bytes"] is not None}
    return [name for name in wanted if name not in counted and CATALOGUE[name].source is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = record_parser(__doc__)
    parser.add_argument(
        "--kernel",
        action="append",
        choices=tuple(CATALOGUE),
        metavar="NAME",
        help="count this kernel only; may be repeated",
    )
    asked = parser.parse_args(arguments)
    wanted = tuple(asked.kernel or CATALOGUE)
    tests = [f"{CASES}::test_kernel[{name}]" for name in asked.kernel or ()] or [str(CASES)]
    now, begun = datetime.now(timezone.utc), time.monotonic()
    options = ["-q", "-p", "no:cacheprovider", "--gpumem-device", asked.device]
    try:
        document, launches = count(options, tests)
    except (UserError, NoAnswer) as error:
        raise SystemExit(f"catalogue_traffic: {error}") from None
    rows = [record_of(row, launches, document.device) for row in document.rows]
    record = {
        "kind": "catalogue_traffic",
        "datetime": now.isoformat(timespec="seconds"),
        "device": device_to_json(document.device),
        "rows": rows,
        "absent": absent(rows, wanted),
        "seconds": round(time.monotonic() - begun, 1),
    }
    if asked.json:
        write_record(asked.json, record, indent=1)
    print(table(record))
    wrong = [row for row in rows if row.get("finding") == WRONG]
    return 1 if wrong or record["absent"] else 0


if __name__ == "__main__":
    sys.exit(main())
