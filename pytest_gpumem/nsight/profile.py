"""A report of a test run by Nsight Systems or Nsight Compute: its tests, its file, its figures."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.files import unwritable
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.nsight import ncu, tools
from pytest_gpumem.outcomes import Exit, FileError, NoAnswer, UserError
from pytest_gpumem.runs import processes

WHOLE_RUN = "gpumem"  # default name of a report of several tests
# With METRICS alone, ncu-ui would have no pages of details.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")


@dataclass(frozen=True)
class SelectedTest:
    nodeid: str
    name: str  # name of its range in the domain `gpumem`, unique among the tests that run
    managed: bool  # it uses a fixture that allocates managed memory


@dataclass(frozen=True)
class ProfileReport:
    file: Path
    program: Path  # the tool that wrote it
    tests: tuple[SelectedTest, ...]
    exit_code: int  # pytest's. A report with failed tests is complete too.


def write_report(
    tool: tools.Tool,
    arguments: Sequence[str],
    nodeids: Sequence[str],
    file: Path | None,
    chosen: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
) -> ProfileReport:
    """Trace a test run with Nsight Systems, or count its measured launches with Nsight Compute.

    `nodeids`: of tests; empty for all that pytest's arguments select.
    `file`: the report, with or without its ending; None: a new one in the working directory.
    `chosen`: the user's options of the tool.
    Raises `UserError`; `NoAnswer`: the tool is missing, or wrote no report.
    """
    for word in chosen:
        if word.partition("=")[0] in ("-o", "--output", "--export", "--log-file"):
            raise UserError(f"--tool-options: {word}: gpumem names the report; -o FILE does")
    device = tools.check(arguments, environment)
    if file is not None:
        _check_file(file)
    program = tools.find(tool, environment)
    tests = select(arguments, nodeids, environment, echo)
    only = tests[0].name if len(tests) == 1 else None
    file = file or _new(only or WHOLE_RUN, tool.report)
    if file.suffix != tool.report:
        file = file.with_name(file.name + tool.report)
    file = file.absolute()
    _check_file(file)
    pytest_command = processes.pytest_command(
        arguments, options=["--gpumem-device", device], tests=nodeids
    )
    if tool is tools.NSYS:
        managed = any(test.managed for test in tests)
        command = tools.nsys_command(
            program, pytest_command, file, test=only, managed=managed, chosen=chosen
        )
    else:
        output = ["--export", str(file), "--force-overwrite"]
        for section in SECTIONS:
            output += ["--section", section]
        command = tools.ncu_command(
            program, pytest_command, output, metrics=ncu.METRICS, chosen=chosen
        )
    before = _written_at(file)
    echo(f"gpumem: {shlex.join(command)}")
    finished = processes.run(command, processes.for_a_part(environment), echo)
    if finished.returncode == Exit.USAGE:
        raise UserError("pytest did not accept its arguments or the device; its output is above")
    if _written_at(file) in (None, before):
        if file.exists() and not file.stat().st_size:
            file.unlink()  # so that the next call need not replace it
        how = processes.ending(finished.returncode)
        why = f"{tool.program} wrote no report ({how}); its output is above"
        if tool is tools.NSYS:
            raise NoAnswer(tools.nsys_cause(finished.stdout, file) or why)
        raise NoAnswer(tools.ncu_cause(finished.stdout) or why)
    return ProfileReport(file, program, tests, finished.returncode)


def select(
    arguments: Sequence[str],
    tests: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
) -> tuple[SelectedTest, ...]:
    """The tests that pytest would run, without a device. Raises `UserError`."""
    for test in tests:
        if test.startswith("-"):
            raise UserError(
                f"--test takes a node id such as tests/test_table.py::test_lookup, not {test!r}"
            )
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "ranges.json")
        options = ["--collect-only", "-q", f"--gpumem-ranges-file={file}"]
        command = processes.pytest_command(arguments, options=options, tests=tests)
        # It is off, and refuses limits.
        variables = processes.switch_off(processes.for_a_part(environment), LIMITS)
        done = processes.run(command, variables)
        plain = []
        if file.exists():
            plain = json.loads(file.read_text(encoding="utf-8"))
    if done.returncode not in (Exit.FINE, Exit.NO_TESTS):
        for line in done.stdout.splitlines():
            echo(line)
        how = processes.ending(done.returncode)
        raise UserError(f"pytest could not collect the tests ({how}); its output is above")
    if not plain:
        words = " ".join([*arguments, *tests])
        raise UserError(f"no test is selected by {words!r}")
    return tuple(SelectedTest(**test) for test in plain)


def figures(report: ProfileReport, environment: Mapping[str, str]) -> list[str]:
    program = str(report.program)
    if report.file.suffix == tools.NCU.report:
        command = [program, "--import", str(report.file), *ncu.RAW_CSV]
        printed = processes.run(command, environment)
        try:
            launches = ncu.read_launches(printed.stdout)
        except FileError as error:
            return [f"no table: {tools.ncu_cause(printed.stdout) or error}"]
        return ncu.table(ncu.kernels_of(launches))
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        # By default the database lies beside the report.
        database = f"--sqlite={folder}/report.sqlite"
        reports = ["--report", "nvtx_kern_sum"]
        if any(test.managed for test in report.tests):
            reports += ["--report", "um_total_sum"]
        command = [program, "stats", *reports, database, str(report.file)]
        return processes.run(command, environment).stdout.splitlines()


def _new(name: str, ending: str) -> Path:
    """A new report: NAME.nsys-rep, else NAME-2.nsys-rep, and so on."""
    file, number = Path(name + ending), 1
    while file.exists():
        number += 1
        file = Path(f"{name}-{number}{ending}")
    return file


def _check_file(file: Path) -> None:
    why = unwritable(file)
    if why is not None:
        raise UserError(f"-o: {file}: {why}")


def _written_at(file: Path) -> int | None:
    """When a file was written; None for a missing or an empty one."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns if status.st_size else None
