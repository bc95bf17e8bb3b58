"""Counted traffic of a test run: pytest under Nsight Compute, the counts of each measurement, and the file of counts."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pytest_gpumem.judging.traffic import account
from pytest_gpumem.nsight.ncu import L2_HIT_RATE, SECTORS_PER_LOAD, CountedKernel, kernels_in
from pytest_gpumem.nsight.profile import CallError as CallError
from pytest_gpumem.nsight.profile import gpu, named_device, results_of, under_tool
from pytest_gpumem.nsight.recording import BadReport, RangePlace, place_of, place_of_row
from pytest_gpumem.nsight.tools import MEASURED_RANGES, NCU, counting_command, find, ncu_error
from pytest_gpumem.nsight.tools import NothingRecorded as NothingRecorded
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Counted
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, device_to_json, from_plain
from pytest_gpumem.result_files import FileError, content, parsed
from pytest_gpumem.runs import child

SCHEMA = 1  # version of the file's layout. A reader refuses any other.


class BadFile(ValueError):
    """A file that `gpumem traffic` has not written, or of another version: one line with the file and the place."""


@dataclass(frozen=True)
class CountedRun:
    """The counts of one run."""

    facts: DeviceFacts  # the device
    rows: tuple[Row, ...]  # the run's rows. Each measurement with kernels has its `counted`.
    kernels: Mapping[str, tuple[CountedKernel, ...]]  # by `Row.key`, the kernels of all launches of a measurement, in their order
    command: tuple[str, ...]


def count(
    arguments: Sequence[str], tests: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], object], *, day: str
) -> CountedRun:
    """Run pytest under Nsight Compute and count the bytes of each measurement's launches.
    `tests`: node ids; empty for all tests that the arguments select.
    Raises `CallError`: --benchmark-json, the simulated device, or arguments that pytest does not accept.
    Raises `ToolMissing`: Nsight Compute is not installed.
    Raises `NothingRecorded`: it ran and counted nothing.
    """
    _check(arguments, environment)
    program = find(NCU, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
        pytest_command = child.pytest_command(arguments, options=gpu(environment), tests=tests, results=results)
        command = counting_command(program, pytest_command, log, more=(L2_HIT_RATE, SECTORS_PER_LOAD))
        echo(f"gpumem: {child.shown(command)}")
        finished = under_tool(command, child.for_a_part(environment), echo)
        page = log.read_text(errors="replace") if log.exists() else ""
        problem = ncu_error(page) or ncu_error(finished.output)
        facts, rows = _results(results, finished, problem)
    kernels, rows = _joined(rows, page, problem, f"ncu on {day}")
    return CountedRun(facts, rows, kernels, tuple(command))


def _check(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse calls that cannot give a count, before anything runs."""
    # A device in an ini file gives way to a GPU; one that the call names does not.
    device, written = named_device(arguments, environment) or ("cuda", "")
    if device.startswith("sim"):
        raise CallError(f"{written}: the simulated device has no counters, so there is nothing to count; use a GPU")
    if any(argument.partition("=")[0] == "--benchmark-json" for argument in arguments):
        raise CallError("--benchmark-json among pytest's arguments: gpumem traffic needs this option itself; --json FILE writes the counts")


def _results(results: Path, finished: child.Finished, problem: str | None) -> tuple[DeviceFacts, tuple[Row, ...]]:
    """The device and the rows of the child's session."""
    try:
        document = results_of(results, finished, problem=problem)
    except NothingRecorded:
        if problem is None and finished.exit_code == Exit.USAGE:
            raise CallError("pytest did not accept its arguments or the device; its output is above") from None
        raise
    if document.device.simulated:
        raise NothingRecorded(f"{document.device.name} is a simulated device: it has no counters, so there is nothing to count; use a GPU")
    if not any(row.measurement is not None for row in document.rows):
        raise NothingRecorded(problem or "pytest measured nothing; its output is above")
    return document.device, document.rows


def _joined(
    rows: Iterable[Row], page: str, problem: str | None, source: str
) -> tuple[Mapping[str, tuple[CountedKernel, ...]], tuple[Row, ...]]:
    """The kernels of each measurement, and the rows with their counts."""
    measured = [row for row in rows if row.measurement is not None]
    if not any(row.measurement.profiled for row in measured if row.measurement is not None):
        raise NothingRecorded(
            "the tests saw no profiler, so their ranges are missing: the package nvtx is not installed, or NVTX_DISABLE is set"
        )
    try:
        kernels = kernels_of(rows, kernels_in(page))
    except BadReport as error:
        raise NothingRecorded(problem or str(error)) from None
    if not any(kernels.values()):
        raise NothingRecorded(
            problem or f"ncu matched no kernel: none was launched by the tests' own thread inside a measured range ({MEASURED_RANGES})"
        )
    return kernels, tuple(_with_count(row, kernels.get(row.key, ()), source) for row in rows)


def kernels_of(rows: Iterable[Row], kernels: Iterable[CountedKernel]) -> dict[str, tuple[CountedKernel, ...]]:
    """By `Row.key`, the kernels inside the measured ranges of a measurement, in their order."""
    by_place: dict[RangePlace | None, list[CountedKernel]] = defaultdict(list)
    for kernel in kernels:
        # The filter may match more than measured launches, so the stack of ranges decides.
        by_place[place_of(kernel.ranges)].append(kernel)
    return {row.key: tuple(by_place.get(place_of_row(row), ())) for row in rows}


def _with_count(row: Row, kernels: Sequence[CountedKernel], source: str) -> Row:
    measurement = row.measurement
    if measurement is None:
        return row
    found = counted(kernels, len(measurement.samples), source) if kernels else None
    return replace(row, measurement=replace(measurement, counted=found))


def counted(kernels: Sequence[CountedKernel], launches: int, source: str) -> Counted:
    """The traffic of one launch: the mean over several, of any kernels each. `source`: the tool and the day."""

    def mean(figures: Iterable[int | None]) -> int | None:
        known = [figure for figure in figures if figure is not None]
        return round(sum(known) / launches) if len(known) == len(kernels) else None

    reads, writes = mean(k.use.dram_read for k in kernels), mean(k.use.dram_written for k in kernels)
    assert reads is not None
    assert writes is not None
    return Counted(
        reads,
        writes,
        mean(k.use.l2_read for k in kernels),
        mean(k.use.l2_written for k in kernels),
        launches,
        source,
        max((k.use.sectors_per_request for k in kernels if k.use.sectors_per_request is not None), default=None),
        min((k.use.l2_hit_rate for k in kernels if k.use.l2_hit_rate is not None), default=None),
    )


# The file


def to_json(run: CountedRun, *, utc: str) -> dict[str, Any]:
    """The counts of one run as plain values; `utc` is its time as ISO 8601."""
    return {
        "schema": SCHEMA,
        "datetime": utc,
        "command": child.recorded(run.command),
        "device": device_to_json(run.facts),
        "rows": [_row_to_json(row, run) for row in run.rows],
    }


def _row_to_json(row: Row, run: CountedRun) -> dict[str, Any]:
    measurement, kernels = row.measurement, run.kernels.get(row.key, ())
    plain: dict[str, Any] = {"key": row.key, "nodeid": row.nodeid, "label": row.label, "declared": None, "counted": None}
    if measurement is None:
        return plain
    if measurement.traffic is not None:
        plain["declared"] = {**msgspec.to_builtins(measurement.traffic), "total": measurement.traffic.total}
    plain |= {"target": measurement.target, "mode": measurement.mode, "footprint": measurement.footprint}
    if measurement.counted is not None and (found := account(measurement, run.facts)) is not None:
        plain |= {
            "counted": msgspec.to_builtins(measurement.counted),
            "finding": found.finding.value,
            "difference": found.difference,
            "sentence": found.sentence,
            "kernels": sorted({kernel.use.name for kernel in kernels}),
            "kernels_per_launch": len(kernels) / measurement.counted.launches,
            "seconds_per_launch": sum(kernel.use.nanoseconds for kernel in kernels) / 1e9 / measurement.counted.launches,
        }
    return plain


class _Device(msgspec.Struct):
    key: str


class _Row(msgspec.Struct):
    key: str
    counted: Counted | None


class _File(msgspec.Struct):
    device: _Device
    rows: list[_Row]


@dataclass(frozen=True)
class StoredCounts:
    """The counts in a file of `gpumem traffic`."""

    device: str  # key of the device
    counts: Mapping[str, Counted]  # by `Row.key`


def load(path: Path) -> StoredCounts:
    """Read a file that `gpumem traffic --json` wrote. Raises `BadFile`: it cannot be read, or is another kind of file."""
    try:
        plain = parsed(content(path))
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            raise FileError(f"no file of counts of schema {SCHEMA}")
        file = from_plain(plain, _File)
    except (FileError, SchemaError) as error:
        raise BadFile(f"{path}: {error}; accepted is a file that `gpumem traffic --json` wrote") from None
    return StoredCounts(file.device.key, {row.key: row.counted for row in file.rows if row.counted is not None})
