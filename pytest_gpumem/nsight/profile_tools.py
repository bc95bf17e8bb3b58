"""The command lines of Nsight Systems and Nsight Compute for a report of a test run, and the causes in what the tools say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pytest_gpumem.nsight import ncu
from pytest_gpumem.ranges import DOMAIN, MEASURE, phase

NSYS_REPORT, NCU_REPORT = ".nsys-rep", ".ncu-rep"
"""Endings of the tools' reports."""
COLLECTED = ".qdstrm"
"""Ending of what Nsight Systems has collected and not yet imported into a report."""


def captured(name: str) -> list[str]:
    """Options of nsys that record one test's range and nothing else."""
    # Our names are registered strings, which is all that nsys looks at unless told otherwise; other libraries' need not be.
    register = "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
    return ["--capture-range=nvtx", f"--nvtx-capture={name}@{DOMAIN}", "--capture-range-end=stop", register]


def nsys_command(nsys: Path, child: Sequence[str], report: Path, *, name: str | None, managed: bool) -> list[str]:
    """The command that traces a child: CUDA with the nodes of graphs, NVTX, no samples of the CPU.

    Args:
        nsys: the program.
        child: the command that it runs and watches.
        report: what it writes; it is overwritten.
        name: of the range that is recorded; None for the whole run.
        managed: record page faults of managed memory too, which slows them down.
    """
    command = [str(nsys), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
    if managed:
        command += ["--cuda-um-gpu-page-faults=true", "--cuda-um-cpu-page-faults=true"]
    if name is not None:
        command += captured(name)
    return [*command, f"--output={report}", "--force-overwrite=true", *child]


def included(names: Sequence[str]) -> list[str]:
    """Options of ncu that profile the measured launches of tests; of all tests for no name."""
    ranges = [f"{DOMAIN}@{phase(name, MEASURE)}/" for name in names] or [ncu.MEASURED_RANGES]
    return ["--nvtx", *(part for one in ranges for part in ("--nvtx-include", one))]


def ncu_command(
    program: Path,
    child: Sequence[str],
    report: Path,
    *,
    names: Sequence[str],
    clock_control: str = "none",
    cache_control: str = "all",
    section_set: str | None = None,
    metrics: str | None = None,
) -> list[str]:
    """The command that counts the measured launches of a child.

    Args:
        program: of ncu.
        child: the command that it runs and watches, with all its child processes.
        report: what it writes; it is overwritten.
        names: of the tests' ranges; empty for all tests.
        clock_control: "none" to leave the clocks alone, or "base" to lock them to their base value.
        cache_control: "all" to empty the caches before every pass over a kernel, or "none" to leave them as they are.
        section_set: such as "full"; None for ncu's default.
        metrics: names, separated by commas.
    """
    command = [str(program), "--clock-control", clock_control, "--cache-control", cache_control, "--target-processes", "all"]
    command += included(names)
    command += [] if section_set is None else ["--set", section_set]
    command += [] if metrics is None else ["--metrics", metrics]
    return [*command, "--export", str(report), "--force-overwrite", *child]


def filters(name: str, *, measures: bool) -> dict[str, str]:
    """By tool, the ready options that select one test: while it is recorded, and in a report of a whole run.

    Args:
        name: of the test's range.
        measures: whether the test has measured launches, which is what Nsight Compute is shown.
    """
    found = {
        "nsys": f"nsys profile --trace=cuda,nvtx {shlex.join(captured(name))}",
        "nsys stats": f"nsys stats --filter-nvtx {name}@{DOMAIN}",
    }
    if measures:
        found["ncu"] = f"ncu --clock-control none {shlex.join(included([name]))}"
    return found


def opening(program: Path, report: Path, name: str | None) -> list[str]:
    """How to look at a report of Nsight Systems or Nsight Compute, in lines."""
    tool, file = str(program), str(report)
    if report.suffix == NCU_REPORT:
        calls = {"open it": ["ncu-ui", file], "by test": ["gpumem", "read", file], "in text": [tool, "--import", file]}
    else:
        stats = [tool, "stats", "--report"]
        calls = {"open it": ["nsys-ui", file], "by test": ["gpumem", "read", file]}
        calls["in text"] = [*stats, "nvtx_kern_sum", "--report", "um_total_sum", file]
        if name is not None:
            calls["one test"] = [*stats, "cuda_gpu_kern_sum", "--filter-nvtx", f"{name}@{DOMAIN}", file]
    return [f"{how:10}{shlex.join(call)}" for how, call in calls.items()]


# What the tools say


def nsys_trouble(said: str, report: Path, name: str | None, *, collected: bool) -> str | None:
    """The cause and the remedy where nsys has written no report, in one line; None if it complained of nothing.

    Args:
        said: what nsys printed, and its child.
        report: what it was to write.
        name: of the range that was to be recorded, if it was one.
        collected: it left what it had collected, not yet imported, beside the report.
    """
    if collected or "Importer error" in said:
        return (
            f"nsys collected, but its importer could not make a report of {report.with_suffix(COLLECTED)}; mostly libdw is missing: "
            "install it (libdw1 on Debian and Ubuntu, elfutils-libs on Fedora and RHEL) and run again, or import that file elsewhere with "
            "QdstrmImporter -i"
        )
    unknown = re.search(r"unrecogni[sz]ed (?:option|argument)s?:? *['\"]?([^\s'\"]+)", said)
    if unknown is not None:
        return f"this nsys does not know {unknown[1]}: its version is not supported; GPUMEM_NSYS names another"
    unsupported = re.search(r"^.*\bunsupported\b.*\b(?:driver|version)\b.*$", said, re.IGNORECASE | re.MULTILINE)
    if unsupported is not None:
        return f"nsys: {unsupported[0].strip()}; install the Nsight Systems of the driver's CUDA, GPUMEM_NSYS names another"
    fatal = re.search(r"^(?:FATAL )?ERROR: *(.+)$", said, re.IGNORECASE | re.MULTILINE)
    if fatal is not None:
        return f"nsys: {fatal[1].strip()}"
    if name is not None and "No reports were generated" in said:
        return (
            f"nsys never saw the range {name}@{DOMAIN}: the test was not reached, or its ranges are missing because the package nvtx is "
            "not installed or NVTX_DISABLE is set"
        )
    return None


def ncu_trouble(said: str) -> str | None:
    """The same where ncu has written no report."""
    cause = ncu.trouble(said)
    if cause is not None and re.search(r"not compatible|unsupported|not supported", cause, re.IGNORECASE):
        return f"{cause.rstrip('.')}; install the Nsight Compute of the driver's CUDA, GPUMEM_NCU names another"
    unknown = re.search(r"unrecogni[sz]ed (?:option|argument)s?:? *['\"]?([^\s'\"]+)", said)
    if cause is None and unknown is not None:
        return f"this ncu does not know {unknown[1]}: its version is not supported; GPUMEM_NCU names another"
    if cause is None and "No kernels were profiled" in said:
        return (
            "ncu matched no kernel: none was launched by the tests' own thread inside a measured range, the tests were skipped, or their "
            "ranges are missing because the package nvtx is not installed or NVTX_DISABLE is set"
        )
    return cause
