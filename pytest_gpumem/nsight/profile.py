"""A report of a test run by Nsight Systems or Nsight Compute: the tests that it would have, its command, its file."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pytest_gpumem.files import unwritable
from pytest_gpumem.nsight import tools
from pytest_gpumem.outcomes import Exit, NoAnswer, UserError
from pytest_gpumem.records.schema import Document
from pytest_gpumem.result_files import FileError, load
from pytest_gpumem.runs import child

WHOLE_RUN = "gpumem"  # default name of a report of several tests


# The tests


@dataclass(frozen=True)
class SelectedTest:
    """A test that would run."""

    nodeid: str
    name: str  # name of its range in the domain `gpumem`, unique among the tests that run
    managed: bool  # it uses a fixture that allocates managed memory


def select(
    arguments: Sequence[str],
    tests: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
) -> tuple[SelectedTest, ...]:
    """The tests that pytest would run, in its order. A process of its own collects them, without a device.
    `tests`: node ids, as on its command line; empty for all that the arguments select.
    Raises `UserError`: pytest does not accept its arguments, a module cannot be imported, or no test is selected.
    """
    for test in tests:
        if test.startswith("-"):
            raise UserError(
                f"--test takes a pytest node id such as tests/test_table.py::test_lookup, not {test!r}"
            )
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "ranges.json")
        command = child.pytest_command(
            arguments, options=["--collect-only", "-q", f"--gpumem-ranges-file={file}"], tests=tests
        )
        done = child.run(command, child.for_a_part(environment), lambda _: None)
        plain = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if done.exit_code not in (Exit.FINE, Exit.NO_TESTS):
        for line in done.output.splitlines():
            echo(line)
        raise UserError(f"pytest could not collect the tests ({done.how}); its output is above")
    found = tuple(SelectedTest(**one) for one in plain)
    if not found:
        chosen = " ".join([*arguments, *tests])
        raise UserError(
            f"no test is selected by {chosen!r}"
            if chosen
            else "no test is selected: pytest found none here"
        )
    return found


# The device


def named_device(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, str] | None:
    """The device that a call names, and its words for it; None if it names none. The last --gpumem-device wins, then GPUMEM_DEVICE. The
    device of an ini file is not named by the call."""
    for position in range(len(arguments) - 1, -1, -1):
        name, equals, value = arguments[position].partition("=")
        if name == "--gpumem-device":
            device = value if equals else next(iter(arguments[position + 1 :]), "")
            return device, f"--gpumem-device {device}"
    device = environment.get("GPUMEM_DEVICE", "")
    return (device, f"GPUMEM_DEVICE={device}") if device else None


def gpu(environment: Mapping[str, str]) -> list[str]:
    """Options of pytest that choose the GPU of GPUMEM_DEVICE, else any. They override an ini file, because only a GPU can be profiled."""
    chosen = environment.get("GPUMEM_DEVICE", "")
    return ["--gpumem-device", chosen if chosen.startswith("cuda") else "cuda"]


def under_tool(
    command: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    folder: Path | None = None,
) -> child.CommandResult:
    """Run pytest under a tool. Raises `NoAnswer`: it cannot be started."""
    try:
        return child.run(command, environment, echo, folder=folder)
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be started: {error}") from None


def results_of(
    results: Path, finished: child.CommandResult, *, problem: str | None = None, under: str = ""
) -> Document:
    """The results of a child, whose file is `results`. Raises `NoAnswer`: there are none.
    `problem`: the cause in the tool's output, if there is one.
    `under`: the tool, for the message; empty without one.
    """
    try:
        found = load(results) if results.exists() else None
    except FileError as error:
        raise NoAnswer(problem or f"pytest's results cannot be read: {error}") from None
    if found is None:
        where = f" under {under}" if under else ""
        raise NoAnswer(
            problem or f"pytest measured nothing{where} ({finished.how}); its output is above"
        )
    return found


# The report


@dataclass(frozen=True)
class ProfileRequest:
    """One call of `gpumem profile`."""

    tool: tools.Tool
    arguments: Sequence[str]  # pytest's
    tests: Sequence[str] = ()  # node ids; empty for all tests that the arguments select
    file: Path | None = None
    """The report, with or without its ending, which is replaced; None: a new one, named after its one test, else "gpumem", in the working
    directory."""
    options: Sequence[str] = ()  # the user's own, of the tool


@dataclass(frozen=True)
class ProfileReport:
    """A report that was written."""

    file: Path
    program: Path  # the tool that wrote it
    version: str
    tests: tuple[SelectedTest, ...]
    exit_code: int  # pytest's. A report with failed tests is complete too.


def profiled(
    request: ProfileRequest, environment: Mapping[str, str], echo: Callable[[str], object]
) -> ProfileReport:
    """Trace a test run with Nsight Systems: the range of a single selected test, else the whole run. Or profile its measured launches
    with Nsight Compute.
    Raises `UserError`: the run cannot be profiled, or the report cannot be written.
    Raises `ToolMissing`: the tool is not installed or too old.
    Raises `NoAnswer`: it ran and wrote no report.
    """
    tool = request.tool
    _check(request, environment)
    if request.file is not None:
        _check_file(_with_ending(request.file, tool.report))
    program = tools.find(tool, environment)
    version = tools.check_version(tool, program, environment)
    tests = select(request.arguments, request.tests, environment, echo)
    only = tests[0].name if len(tests) == 1 else None
    file = _with_ending(
        request.file or _new(only or WHOLE_RUN, tool.report), tool.report
    ).absolute()
    _check_file(file)
    pytest_command = child.pytest_command(
        request.arguments, options=gpu(environment), tests=request.tests
    )
    if tool is tools.NSYS:
        managed = any(one.managed for one in tests)
        command = tools.nsys_command(
            program, pytest_command, file, name=only, managed=managed, own=request.options
        )
    else:
        names = [one.name for one in tests] if request.tests else []
        command = tools.ncu_command(program, pytest_command, file, names=names, own=request.options)
    written, collected = _OldFile(file), _OldFile(file.with_suffix(tools.COLLECTED))
    echo(f"gpumem: {child.shown(command)}")
    finished = under_tool(command, child.for_a_part(environment), echo)
    if finished.exit_code == Exit.USAGE:
        raise UserError("pytest did not accept its arguments or the device; its output is above")
    if written.anew and not file.stat().st_size:
        file.unlink()  # so that the next call need not replace it
    if not written.anew:
        output = finished.output
        if tool is tools.NSYS:
            cause = tools.nsys_trouble(output, file, only, collected=collected.anew)
        else:
            cause = tools.ncu_trouble(output) or (
                tools.NO_KERNEL if "No kernels were profiled" in output else None
            )
        raise NoAnswer(
            cause or f"{tool.program} wrote no report ({finished.how}); its output is above"
        )
    return ProfileReport(file, program, version, tests, finished.exit_code)


def _with_ending(file: Path, ending: str) -> Path:
    return file if file.suffix == ending else file.with_name(file.name + ending)


def _new(name: str, ending: str) -> Path:
    """A report that does not exist: NAME.nsys-rep, else NAME-2.nsys-rep, and so on."""
    names = (
        Path(f"{name}-{number}{ending}" if number > 1 else f"{name}{ending}") for number in count(1)
    )
    return next(file for file in names if not file.exists())


def _check_file(file: Path) -> None:
    if (why := unwritable(file)) is not None:
        raise UserError(f"-o: {file}: {why}")


class _OldFile:
    """A file that may exist before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = self._stamp()

    @property
    def anew(self) -> bool:
        """True if it exists and was written since."""
        return self._stamp() not in (None, self._before)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _check(request: ProfileRequest, environment: Mapping[str, str]) -> None:
    """Refuse calls that cannot give a report, before anything runs."""
    for word in request.options:
        if word.partition("=")[0] in ("-o", "--output", "--export", "--log-file"):
            raise UserError(f"--tool-options: {word}: gpumem names the report itself; -o FILE does")
    for argument in request.arguments:
        if argument in ("--collect-only", "--co"):
            raise UserError(f"{argument} among pytest's arguments: no test would run")
    # A device in an ini file gives way to a GPU; one that the call names does not.
    device, written = named_device(request.arguments, environment) or ("cuda", "")
    if device.startswith("sim"):
        raise UserError(f"{written}: Nsight sees nothing of the simulated device; use a GPU")
    if written.startswith("--") and not device.startswith("cuda"):
        raise UserError(f"{written}: Nsight needs a GPU; accepted are cuda and cuda:N")
    if importlib.util.find_spec("nvtx") is None:
        raise UserError(
            f"the package nvtx is not installed for {sys.executable}: the tests would have no ranges; pip install nvtx"
        )
    if environment.get("NVTX_DISABLE"):
        raise UserError(
            f"NVTX_DISABLE={environment['NVTX_DISABLE']!r} is set: the tests would have no ranges; unset it"
        )
