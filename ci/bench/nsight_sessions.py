"""Profile tests with `gpumem profile` and see in the tools' own reports that every test is where its range says.

    python ci/bench/nsight_sessions.py --json ci/records/nvidia-h200/nsight_sessions.json [TESTS ...]

Three looks, each written to the record as soon as it is taken:

whole  `gpumem profile nsys -- TESTS`: `nsys stats` reads the report; every test has its range (nvtx_pushpop_sum), every test that measured
       has the work of its launches under it (nvtx_gpu_proj_sum), kernels with their times (nvtx_kern_sum), and what managed pages
       did is there (um_total_sum) where the test is among them in which both sides fault: nsys prints nothing of it before
one    `gpumem profile nsys --test TEST`: the ranges of no other test are in the report
ncu    `gpumem profile ncu --test TEST`: the kernels in the report are those, and as many, that nsys saw in the test's launches

TESTS are arguments of pytest; default: two modules of the memory suite, tests/memory is all of it. Needs a GPU, both tools, and the
permission to read counters. Exits with 1 where a look fails.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import device_of, record_parser, utc_now, write_record

from pytest_gpumem.devices.opening import NoDevice, choose
from pytest_gpumem.nsight.profile import SelectedTest, select
from pytest_gpumem.nsight.tools import NCU, NSYS, ToolMissing, check_version, find
from pytest_gpumem.ranges import LAUNCH, phase

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/memory/test_stream.py", "tests/memory/test_managed.py")
TEST = "tests/memory/test_stream.py::test_triad"
BOTH_FAULT = "tests/memory/test_managed.py::test_a_host_that_reads_results_in_place_gets_them"
"""The device faults on pages that nobody has touched, and the host on what the device wrote to them."""
STEPS = ("whole", "one", "ncu")
GPUMEM = (sys.executable, "-c", "from pytest_gpumem.cli import main; main()")
METRICS = "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum"
REPORTS = ("nvtx_pushpop_sum", "nvtx_gpu_proj_sum", "nvtx_kern_sum", "um_total_sum")

KERNELS, COPIES, ANYTHING = MADE_OF = ("kernels", "copies", "anything")
"""The kinds of work of a launch: kernels where bytes of the device are declared, maybe copies where they cross the link, else unknown."""

Record = dict[str, Any]
Run = Callable[[Sequence[str]], str]
Select = Callable[[Sequence[str]], Sequence[SelectedTest]]


class Failed(Exception):
    """A look that cannot be taken, or shows something else: one line."""


# What the tools' reports say


def rows(text: str, column: str) -> list[dict[str, str]]:
    """The rows of a table in CSV below whatever else was printed.

    Args:
        text: what a tool printed.
        column: a column that the table has; its heading ends with it.
    """
    lines = text.splitlines()
    for begin, line in enumerate(lines):
        heading = next(csv.reader([line]), [])
        if len(heading) > 1 and any(name.endswith(column) for name in heading):
            table = []
            for cells in csv.reader(lines[begin + 1 :]):
                if len(cells) != len(heading):
                    break
                table.append(dict(zip(heading, cells, strict=True)))
            return table
    return []


def range_of(row: Mapping[str, str]) -> str:
    """The name of a row's range without its domain."""
    shown = next(value for name, value in row.items() if name.endswith("Range"))
    return shown.rsplit(":", 1)[-1]


def plain(kernel: str) -> str:
    """A kernel's name without its return, template and parameter types, which the tools write in their own ways."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].strip().rsplit("::", 1)[-1]


def number(text: str) -> float:
    return float(text.replace(",", "") or 0)


def kernels_by_range(table: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """By range, the kernels within it: their names without types, how many ran, and their nanoseconds in all."""
    found: dict[str, dict[str, Any]] = {}
    for row in table:
        entry = found.setdefault(range_of(row), {})
        kernel = entry.setdefault(plain(row["Kernel Name"]), {"count": 0, "ns": 0})
        kernel["count"] += round(number(row["Kern Inst"]))
        kernel["ns"] += round(
            number(next(value for name, value in row.items() if name.startswith("Total Time")))
        )
    return found


def judge_whole(
    tests: Sequence[SelectedTest], measured: Mapping[str, str], reports: Mapping[str, str]
) -> Record:
    """Faults of the reports of a whole run.

    Args:
        tests: those that ran.
        measured: by range, what the launches of each test that measured are made of, one of `MADE_OF`.
        reports: by name, what `nsys stats` printed.

    Gives the record, with what is wrong as sentences under "wrong".
    """
    pushed = {range_of(row) for row in rows(reports["nvtx_pushpop_sum"], "Range")}
    projected = {range_of(row) for row in rows(reports["nvtx_gpu_proj_sum"], "Range")}
    kernels = kernels_by_range(rows(reports["nvtx_kern_sum"], "Kernel Name"))
    wrong = [
        f"{test.name} has no range in nvtx_pushpop_sum" for test in tests if test.name not in pushed
    ]
    shown = {}
    for name, made_of in measured.items():
        launch = phase(name, LAUNCH)
        shown[name] = kernels.get(launch, {})
        if launch not in pushed:
            wrong.append(f"{launch} has no range in nvtx_pushpop_sum")
        elif launch not in projected and made_of != ANYTHING:
            wrong.append(f"no work is under {launch} in nvtx_gpu_proj_sum")
        elif launch not in kernels and made_of == KERNELS:
            wrong.append(f"no kernel is under {launch} in nvtx_kern_sum")
    moved = rows(reports["um_total_sum"], "Migration Size (MB)")
    return {
        "tests": len(tests),
        "measured": len(measured),
        "launches": shown,
        "managed": moved,
        "wrong": wrong,
    }


def judge_one(name: str, report: str) -> Record:
    """Faults of the report of one test's range."""
    pushed = sorted({range_of(row) for row in rows(report, "Range")})
    wrong = [] if name in pushed else [f"{name} is not in its own report"]
    wrong += [
        f"{other} is in the report of {name}" for other in pushed if other.partition(".")[0] != name
    ]
    return {"ranges": pushed, "wrong": wrong}


def judge_ncu(seen: Mapping[str, Mapping[str, Any]] | None, name: str, page: str) -> Record:
    """Check that ncu profiled the kernels of one test's launches and no others.

    Args:
        seen: by kernel, what nsys saw in those launches; None where it did not look.
        name: of the test's range.
        page: what `ncu --import ... --page raw` printed.
    """
    table = [row for row in rows(page, "Kernel Name") if row["ID"].strip()]
    kernels = dict(Counter(plain(row["Kernel Name"]) for row in table))
    wrong = [] if table else ["ncu profiled no kernel"]
    stacks = [
        next((value for column, value in row.items() if "Push/Pop" in column), None)
        for row in table
    ]
    wrong += [
        f"a kernel has the ranges {stack}"
        for stack in stacks
        if stack is not None and f"{name}.measure" not in stack
    ]
    expected = None if seen is None else {kernel: entry["count"] for kernel, entry in seen.items()}
    if expected is not None and expected != kernels:
        wrong.append(f"ncu profiled {kernels}, nsys saw {expected}")
    return {
        "kernels": kernels,
        "ranges_shown": any(stack is not None for stack in stacks),
        "wrong": wrong,
    }


# Looking


def run(command: Sequence[str]) -> str:
    """Run a command at the repository's root; gives its standard output. Raises `Failed` where it fails."""
    print("$", " ".join(map(str, command)), file=sys.stderr)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        # 1 of gpumem profile: tests failed, whose report is whole; which ones is on standard error.
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        print(tail, file=sys.stderr)
        if command[: len(GPUMEM)] != list(GPUMEM) or done.returncode != 1:
            raise Failed(
                f"{Path(command[0]).name} ended with {done.returncode}: {tail.splitlines()[-1] if tail else 'it said nothing'}"
            )
    return done.stdout


def measured_in(results: Path) -> dict[str, str]:
    """By range, what the launches of each test that measured are made of, one of `MADE_OF`; from a file of `--benchmark-json`."""
    measured: dict[str, str] = {}
    for row in json.loads(results.read_text())["gpumem"]["rows"]:
        if (measurement := row["measurement"]) is None:
            continue
        traffic = measurement.get("moved_bytes")
        made_of = ANYTHING if traffic is None else COPIES if traffic["link"] else KERNELS
        measured[row["range_name"]] = min(
            measured.get(row["range_name"], made_of), made_of, key=MADE_OF.index
        )
    return measured


def selected(arguments: Sequence[str]) -> Sequence[SelectedTest]:
    """The tests that pytest would run, with the names of their ranges."""
    return select(arguments, (), os.environ, lambda line: print(line, file=sys.stderr))


class Looks:
    """The three looks; reports lie in one folder, which goes with it."""

    def __init__(
        self,
        tests: Sequence[str],
        test: str,
        folder: Path,
        nsys: Path,
        ncu: Path,
        run: Run,
        select: Select,
    ) -> None:
        self._tests, self._test, self._folder, self._nsys, self._ncu, self._run = (
            tests,
            test,
            folder,
            nsys,
            ncu,
            run,
        )
        self._select = select
        self.seen: dict[str, dict[str, Any]] | None = None
        """By range, the kernels that nsys saw in measured launches."""
        self.ranges: dict[str, str] = {}
        """By node id, the ranges of the whole run: a name can depend on which tests run."""

    def _profile(self, tool: str, report: Path, *options: str) -> Record:
        begun = time.monotonic()
        self._run([*GPUMEM, "profile", tool, "-o", str(report), *options])
        return {"seconds": time.monotonic() - begun, "bytes": report.stat().st_size}

    def _stats(self, names: Sequence[str], report: Path) -> dict[str, str]:
        """By name, what `nsys stats` prints; the first exports the report, the others read what it exported."""
        command = [str(self._nsys), "stats", "--format", "csv"]
        export = {True: ["--force-export=true"], False: []}
        return {
            name: self._run([*command, "--report", name, *export[name == names[0]], str(report)])
            for name in names
        }

    def whole(self) -> Record:
        report, results = self._folder / "whole.nsys-rep", self._folder / "results.json"
        quiet = ["-p", "no:cacheprovider", f"--benchmark-json={results}"]
        took = self._profile("nsys", report, "--", *self._tests, *quiet)
        tests = self._select(self._tests)
        begun = time.monotonic()
        judged = judge_whole(tests, measured_in(results), self._stats(REPORTS, report))
        self.seen, self.ranges = judged["launches"], {test.nodeid: test.name for test in tests}
        if BOTH_FAULT in self.ranges and not judged["managed"]:
            judged["wrong"].append(
                f"um_total_sum has nothing, though both sides fault in {BOTH_FAULT}"
            )
        return {**took, "stats_seconds": time.monotonic() - begun, **judged}

    def one(self) -> Record:
        report = self._folder / "one.nsys-rep"
        took = self._profile("nsys", report, "--test", self._test, "--", "-p", "no:cacheprovider")
        return {
            **took,
            "test": self._test,
            **judge_one(self._name(), self._stats(REPORTS[:1], report)[REPORTS[0]]),
        }

    def ncu(self) -> Record:
        report, file = self._folder / "one.ncu-rep", self._test.partition("::")[0]
        # The whole module is among pytest's arguments, so that other tests could be profiled by mistake.
        chosen = ("--test", self._test, "--tool-options", f"--metrics {METRICS}")
        took = self._profile("ncu", report, *chosen, "--", file, "-p", "no:cacheprovider")
        read = [
            str(self._ncu),
            "--import",
            str(report),
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
        ]
        try:
            page = self._run([*read, "--nvtx"])
        except Failed:  # a version that shows ranges unasked, or not at all
            page = self._run(read)
        seen = None if self.seen is None else self.seen.get(self.ranges.get(self._test, ""))
        return {
            **took,
            "test": self._test,
            "held_to_nsys": seen is not None,
            **judge_ncu(seen, self._name(), page),
        }

    def _name(self) -> str:
        (found,) = self._select([self._test])
        return found.name


def table(record: Record) -> str:
    """The record as text."""
    device, versions = record["device"], record["versions"]
    lines = [
        f"{device['name']}, driver {device['driver']}, Nsight Systems {versions['nsys']}, Nsight Compute {versions['ncu']}, "
        f"{record['ended'][:10]}",
        "",
    ]
    if (whole := record.get("whole")) and "tests" in whole:
        kernels = sum(
            entry["count"] for kernels in whole["launches"].values() for entry in kernels.values()
        )
        lines.append(
            f"nsys, {whole['tests']} tests in {whole['seconds']:.0f} s, {whole['bytes'] / 1e6:.1f} MB: {_said(whole)};"
        )
        lines.append(
            f"  {whole['measured']} of them measured, {kernels} kernels are under their launches"
        )
        for row in whole["managed"]:
            figures = [
                f"{value} {name.removeprefix('Total ')}"
                for name, value in row.items()
                if name.startswith("Total ")
            ]
            lines.append(f"  managed memory: {', '.join(figures)}")
    if (one := record.get("one")) and "ranges" in one:
        lines.append(
            f"nsys, {one['test'].partition('::')[2]} in {one['seconds']:.0f} s, {one['bytes'] / 1e6:.1f} MB: {_said(one)}"
        )
    if (ncu := record.get("ncu")) and "kernels" in ncu:
        counted = ", ".join(f"{count} x {kernel}" for kernel, count in ncu["kernels"].items())
        lines.append(
            f"ncu, {ncu['test'].partition('::')[2]} in {ncu['seconds']:.0f} s: {counted}; {_said(ncu)}"
        )
    return "\n".join(lines)


def _said(look: Record) -> str:
    return "; ".join(look["wrong"]) or "everything is under its test's range"


def main() -> int:
    parser = record_parser(__doc__, device=None)
    parser.add_argument(
        "--test", default=TEST, metavar="NODEID", help=f"the one test (default {TEST})"
    )
    parser.add_argument(
        "--looks", default=",".join(STEPS), help=f"which looks, of {','.join(STEPS)} (default all)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the reports there")
    parser.add_argument(
        "tests",
        nargs="*",
        default=TESTS,
        metavar="TESTS",
        help=f"arguments of pytest (default {' '.join(TESTS)})",
    )
    asked = parser.parse_args()
    looks = asked.looks.split(",")
    if unknown := [look for look in looks if look not in STEPS]:
        parser.error(f"--looks {unknown[0]}: accepted are {', '.join(STEPS)}")
    if asked.json is not None and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.absolute().parent}")
    if asked.keep is not None and not asked.keep.is_dir():
        parser.error(f"--keep {asked.keep}: there is no such folder")
    try:
        facts = choose("cuda").facts
        nsys, ncu = find(NSYS, os.environ), find(NCU, os.environ)
        versions = {
            "nsys": check_version(NSYS, nsys, os.environ),
            "ncu": check_version(NCU, ncu, os.environ),
        }
    except (NoDevice, ToolMissing) as reason:
        parser.error(str(reason))
    record: Record = {
        "kind": "nsight_sessions",
        "device": device_of(facts),
        "versions": versions,
        "asked": list(asked.tests),
    }
    with tempfile.TemporaryDirectory(prefix="gpumem-") as temporary:
        every = Looks(
            asked.tests, asked.test, asked.keep or Path(temporary), nsys, ncu, run, selected
        )
        for look in looks:
            try:
                record[look] = getattr(every, look)()
            except (Failed, OSError, ValueError, KeyError, StopIteration) as reason:
                record[look] = {"wrong": [f"{type(reason).__name__}: {reason}"]}
            record["ended"] = utc_now()
            if asked.json is not None:
                write_record(asked.json, record, indent=1)
    print(table(record))
    wrong = [f"{look}: {sentence}" for look in looks for sentence in record[look]["wrong"]]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
