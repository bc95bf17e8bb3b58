"""Counts of Nsight Compute: pytest under it, the counts of each measurement, and the file of counts of `gpumem profile ncu --traffic`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pytest_gpumem.judging.traffic import account
from pytest_gpumem.nsight.ncu import L2_HIT_RATE, SECTORS_PER_LOAD, read_csv
from pytest_gpumem.nsight.profile import gpu, named_device, results_of, under_tool
from pytest_gpumem.nsight.reading import by_row
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import (
    NCU,
    NO_KERNEL,
    counting_command,
    find,
    lacks_metric,
    ncu_trouble,
)
from pytest_gpumem.outcomes import Exit, NoAnswer, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import DramBytes
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.runs import child

SCHEMA = 1  # version of the file's layout


@dataclass(frozen=True)
class CountedRun:
    """The counts of one run."""

    facts: DeviceFacts  # the device
    rows: tuple[Row, ...]  # the run's rows
    profiles: Mapping[str, TestProfile]  # by `Row.key`, the counters of the measured launches
    command: tuple[str, ...]


def under_ncu(
    pytest_command: Callable[[Path], Sequence[str]],
    environment: Mapping[str, str],
    run: Callable[[Sequence[str]], child.CommandResult],
    *,
    metrics: Sequence[str],
    optional: Sequence[str] = (),
    hot: bool = False,
) -> CountedRun:
    """Run pytest under Nsight Compute and count the launches of each measurement.
    `pytest_command`: gives the command that writes its results into a file.
    `environment`: finds Nsight Compute.
    `run`: runs a command.
    `metrics`: beside `tools.TRAFFIC_METRICS`.
    `optional`: further metrics, which are left out if ncu refuses one because this GPU does not have it.
    `hot`: leave the caches alone. Otherwise ncu empties them before every kernel.
    Raises `ToolMissing`: Nsight Compute is not installed.
    Raises `NoAnswer`: it ran and counted nothing.
    """
    program = find(NCU, environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, log = Path(folder, "results.json"), Path(folder, "ncu.log")

        def attempt(more: Sequence[str]) -> tuple[tuple[str, ...], child.CommandResult, str]:
            command = counting_command(program, pytest_command(results), log, hot=hot, more=more)
            finished = run(command)
            return tuple(command), finished, log.read_text(errors="replace") if log.exists() else ""

        command, finished, page = attempt((*metrics, *optional))
        if optional and (lacks_metric(page) or lacks_metric(finished.output)):
            command, finished, page = attempt(metrics)
        problem = ncu_trouble(page) or ncu_trouble(finished.output)
        document = results_of(results, finished, problem=problem, under=NCU.program)
    if document.device.simulated:
        raise NoAnswer(
            f"{document.device.name} is a simulated device: it has no counters, so there is nothing to count; use a GPU"
        )
    if not any(row.measurement is not None for row in document.rows):
        raise NoAnswer(problem or "pytest measured nothing; its output is above")
    try:
        profiles = by_row(read_csv(page), document.rows) if '"ID"' in page else {}
    except BadReport as error:
        raise NoAnswer(problem or str(error)) from None
    if not profiles:
        raise NoAnswer(problem or NO_KERNEL)
    return CountedRun(document.device, document.rows, profiles, command)


def count(
    arguments: Sequence[str],
    tests: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object],
    *,
    day: str,
) -> CountedRun:
    """Run pytest under Nsight Compute; the rows of measurements with kernels have their `counted`.
    `tests`: node ids; empty for all tests that the arguments select.
    Raises `UserError`: --benchmark-json, the simulated device, or arguments that pytest does not accept.
    Raises `ToolMissing`: Nsight Compute is not installed.
    Raises `NoAnswer`: it ran and counted nothing, or no DRAM bytes of a kernel.
    """
    _check(arguments, environment)

    def pytest_command(results: Path) -> list[str]:
        return child.pytest_command(
            arguments, options=gpu(environment), tests=tests, results=results
        )

    def run(command: Sequence[str]) -> child.CommandResult:
        echo(f"gpumem: {child.shown(command)}")
        finished = under_tool(command, child.for_a_part(environment), echo)
        if finished.exit_code == Exit.USAGE:
            raise UserError(
                "pytest did not accept its arguments or the device; its output is above"
            )
        return finished

    found = under_ncu(pytest_command, environment, run, metrics=(L2_HIT_RATE, SECTORS_PER_LOAD))
    source = f"ncu on {day}"
    return dataclasses.replace(
        found,
        rows=tuple(_with_count(row, found.profiles.get(row.key), source) for row in found.rows),
    )


def _check(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse calls that cannot give a count, before anything runs."""
    # A device in an ini file gives way to a GPU; one that the call names does not.
    device, written = named_device(arguments, environment) or ("cuda", "")
    if device.startswith("sim"):
        raise UserError(
            f"{written}: the simulated device has no counters, so there is nothing to count; use a GPU"
        )
    if any(argument.partition("=")[0] == "--benchmark-json" for argument in arguments):
        raise UserError(
            "--benchmark-json among pytest's arguments: gpumem needs this option itself; --json FILE writes the counts"
        )


def _with_count(row: Row, profile: TestProfile | None, source: str) -> Row:
    measurement = row.measurement
    if measurement is None:
        return row
    return replace(
        row,
        measurement=replace(
            measurement, dram_bytes=None if profile is None else counted(profile, source)
        ),
    )


def counted(profile: TestProfile, source: str) -> DramBytes:
    """The traffic of one launch: the mean over several, of any kernels each.
    `source`: the tool and the day.
    Raises `NoAnswer`: a kernel's DRAM bytes are missing.
    """
    kernels, launches = profile.kernels, profile.launches or 1

    def mean(name: str) -> int | None:
        figures = [getattr(kernel, name) for kernel in kernels]
        return None if None in figures else round(sum(figures) / launches)

    def known(name: str) -> list[float]:
        return [figure for kernel in kernels if (figure := getattr(kernel, name)) is not None]

    for kernel in kernels:
        if kernel.dram_read is None or kernel.dram_written is None:
            raise NoAnswer(
                f"ncu counted no DRAM bytes of {kernel.name}: this GPU has no such counter, or another tool holds it"
            )
    return DramBytes(
        reads=mean("dram_read") or 0,
        writes=mean("dram_written") or 0,
        l2_reads=mean("l2_read"),
        l2_writes=mean("l2_written"),
        launches=launches,
        source=source,
        sectors_per_request=max(known("sectors_per_request"), default=None),
        l2_hit_rate=min(known("l2_hit_rate"), default=None),
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
    measurement = row.measurement
    plain: dict[str, Any] = {
        "key": row.key,
        "nodeid": row.nodeid,
        "label": row.label,
        "moved_bytes": None,
        "dram_bytes": None,
    }
    if measurement is None:
        return plain
    if measurement.moved_bytes is not None:
        plain["moved_bytes"] = {
            **msgspec.to_builtins(measurement.moved_bytes),
            "total": measurement.moved_bytes.total,
        }
    plain |= {
        "target": measurement.target,
        "mode": measurement.mode,
        "footprint": measurement.footprint,
    }
    if (
        measurement.dram_bytes is not None
        and (found := account(measurement, run.facts)) is not None
    ):
        kernels, launches = run.profiles[row.key].kernels, measurement.dram_bytes.launches
        plain |= {
            "dram_bytes": msgspec.to_builtins(measurement.dram_bytes),
            "finding": found.finding.value,
            "difference": found.difference,
            "sentence": found.sentence,
            "kernels": sorted({kernel.name for kernel in kernels}),
            "kernels_per_launch": sum(kernel.launches for kernel in kernels) / launches,
            "seconds_per_launch": sum(kernel.nanoseconds for kernel in kernels) / 1e9 / launches,
        }
    return plain
