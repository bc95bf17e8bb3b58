"""A report of a test run by Nsight Systems or Nsight Compute: from the call to the file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.files import unwritable
from pytest_gpumem.nsight.profile_tests import BadCall, Selected, gpu, named_device, select
from pytest_gpumem.nsight.tools import (
    COLLECTED,
    NCU,
    NCU_REPORT,
    NSYS,
    NSYS_REPORT,
    Tool,
    check_version,
    find,
    ncu_command,
    ncu_trouble,
    nsys_command,
    nsys_trouble,
)
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.runs import child

WHOLE_RUN = "gpumem"
"""Name of a report of several tests, where nobody says otherwise."""


class NothingProfiled(Exception):
    """No report was written: one line with the cause and the remedy."""


@dataclass(frozen=True)
class Wanted:
    """What `gpumem profile` is asked for, whatever the tool."""

    arguments: Sequence[str]
    """pytest's."""
    tests: Sequence[str] = ()
    """Node ids; empty for all tests that the arguments select."""
    file: Path | None = None
    """The report, with or without its ending; None: named after its one test, else "gpumem", in the working directory."""
    overwrite: bool = False
    """Replace a report that is there."""


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    file: Path
    program: Path
    """The tool that wrote it."""
    version: str
    command: tuple[str, ...]
    """What was run."""
    tests: tuple[Selected, ...]
    """In it."""
    exit_code: int
    """pytest's; not 0 where tests failed, whose report is whole all the same."""


def systems(wanted: Wanted, environment: Mapping[str, str], echo: Callable[[str], object], *, managed: bool | None = None) -> Report:
    """Trace a test run with Nsight Systems: one test's range where one is selected, else the whole run.

    Args:
        wanted: the run and the report.
        environment: all environment variables; the child gets them.
        echo: takes each line that pytest and nsys print.
        managed: record page faults of managed memory; None: where a selected test uses `managed_buffer` or `prefetched_buffer`.

    Raises:
        BadCall: the run is none that can be profiled, or the report is there already.
        ToolMissing: Nsight Systems is not installed or too old.
        NothingProfiled: it ran and wrote no report.
    """

    def command(program: Path, child: Sequence[str], file: Path, tests: Sequence[Selected]) -> list[str]:
        faults = any(one.managed for one in tests) if managed is None else managed
        return nsys_command(program, child, file, name=_only_name(tests), managed=faults)

    def trouble(said: str, file: Path, collected: bool, tests: Sequence[Selected]) -> str | None:
        return nsys_trouble(said, file, _only_name(tests), collected=collected)

    return _profile(NSYS, NSYS_REPORT, wanted, environment, echo, command, trouble)


def compute(
    wanted: Wanted,
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    *,
    clock_control: str = "none",
    cache_control: str = "all",
    section_set: str | None = None,
    metrics: str | None = None,
) -> Report:
    """Profile the measured launches of a test run with Nsight Compute; further arguments as `tools.ncu_command`, else as `systems`.

    Raises:
        BadCall: as for `systems`.
        ToolMissing: Nsight Compute is not installed or too old.
        NothingProfiled: it ran and wrote no report.
    """

    def command(program: Path, child: Sequence[str], file: Path, tests: Sequence[Selected]) -> list[str]:
        names = [one.name for one in tests] if wanted.tests else []
        return ncu_command(
            program,
            child,
            file,
            names=names,
            clock_control=clock_control,
            cache_control=cache_control,
            section_set=section_set,
            metrics=metrics,
        )

    def trouble(said: str, file: Path, collected: bool, tests: Sequence[Selected]) -> str | None:
        return ncu_trouble(said)

    return _profile(NCU, NCU_REPORT, wanted, environment, echo, command, trouble)


def _profile(
    tool: Tool,
    ending: str,
    wanted: Wanted,
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    command_of: Callable[[Path, Sequence[str], Path, Sequence[Selected]], list[str]],
    trouble_of: Callable[[str, Path, bool, Sequence[Selected]], str | None],
) -> Report:
    _check(wanted, environment)
    if wanted.file is not None:
        _check_file(_with_ending(wanted.file, ending), wanted.overwrite)
    program = find(tool, environment)
    version = check_version(tool, program, environment)
    tests = select(wanted.arguments, wanted.tests, environment, echo)
    file = _with_ending(wanted.file or Path(_only_name(tests) or WHOLE_RUN), ending).absolute()
    _check_file(file, wanted.overwrite)
    command = command_of(program, child.pytest_command(wanted.arguments, options=gpu(environment), tests=wanted.tests), file, tests)
    written, collected = _Watched(file), _Watched(file.with_suffix(COLLECTED))
    echo(f"gpumem: {child.shown(command)}")
    try:
        finished = child.run(command, child.for_a_part(environment), echo)
    except OSError as error:
        raise NothingProfiled(f"{program} cannot be started: {error}") from None
    if finished.exit_code == Exit.USAGE:
        raise BadCall("pytest did not accept its arguments or the device; what it said is above")
    if written.anew and not file.stat().st_size:
        file.unlink()  # as if it had written none: the next call need not replace it
    if not written.anew:
        cause = trouble_of(finished.output, file, collected.anew, tests)
        raise NothingProfiled(cause or f"{tool.program} wrote no report ({finished.how}); what it said is above")
    return Report(file, program, version, tuple(command), tests, finished.exit_code)


def _only_name(tests: Sequence[Selected]) -> str | None:
    return tests[0].name if len(tests) == 1 else None


def _with_ending(file: Path, ending: str) -> Path:
    return file if file.suffix == ending else file.with_name(file.name + ending)


def _check_file(file: Path, overwrite: bool) -> None:
    if (why := unwritable(file)) is not None:
        raise BadCall(f"-o: {file}: {why}")
    if file.exists() and not overwrite:
        raise BadCall(f"{file} is there already; --force-overwrite replaces it, -o FILE writes another")


class _Watched:
    """A file that may have been there before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = self._stamp()

    @property
    def anew(self) -> bool:
        """Whether it is there and is not what it was at first."""
        return self._stamp() not in (None, self._before)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _check(wanted: Wanted, environment: Mapping[str, str]) -> None:
    """Refuse what cannot lead to a report before anything is run."""
    for argument in wanted.arguments:
        if argument in ("--collect-only", "--co"):
            raise BadCall(f"{argument} among pytest's arguments: no test would run; `gpumem ranges` only collects")
    # An ini file's device gives way to a GPU; somebody who names it for this call means it.
    device, written = named_device(wanted.arguments, environment) or ("cuda", "")
    if device.startswith("sim"):
        raise BadCall(f"{written}: Nsight sees nothing of the simulated device; use a GPU")
    if written.startswith("--") and not device.startswith("cuda"):
        raise BadCall(f"{written}: Nsight needs a GPU; accepted are cuda and cuda:N")
    if importlib.util.find_spec("nvtx") is None:
        raise BadCall(f"the package nvtx is not installed for {sys.executable}: the tests would have no ranges; pip install nvtx")
    if environment.get("NVTX_DISABLE"):
        raise BadCall(f"NVTX_DISABLE={environment['NVTX_DISABLE']!r} is set: the tests would have no ranges; unset it")
