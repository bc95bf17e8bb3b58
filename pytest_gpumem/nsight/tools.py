"""NVIDIA's profilers: where they are installed, their versions, their command lines, and the causes in their output."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.ranges import DOMAIN, MEASURE, phase

NCU_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
"""Where CUDA's installers put Nsight Compute; patterns, the newest version of several matches wins."""
NSYS_FOLDERS = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda-*/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    # Nsight Compute includes the command line of Nsight Systems.
    "/opt/nvidia/nsight-compute/*/host/target-linux-*",
)
"""Where installers put Nsight Systems, as `NCU_FOLDERS`."""

ANSWER_LIMIT = 60.0  # seconds that a tool has to print its version


class ToolMissing(NoAnswer):
    """A tool is not installed, too old, or not where a variable says: one line with the remedy."""


@dataclass(frozen=True)
class Tool:
    """One of NVIDIA's profilers."""

    program: str  # name of its command line
    title: str  # name of the product
    variable: str  # environment variable that names its program
    source: str  # where to get it
    folders: tuple[str, ...]  # patterns of the folders where installers put it
    least: tuple[int, int]  # the oldest supported version: year and number
    report: str  # ending of its reports


# The oldest versions are those of CUDA 12.0, the oldest CUDA that this package has an extra for.
NCU = Tool(
    "ncu",
    "Nsight Compute",
    "GPUMEM_NCU",
    "part of the CUDA Toolkit",
    NCU_FOLDERS,
    (2022, 4),
    ".ncu-rep",
)
_NSYS_SOURCE = "part of the CUDA Toolkit, or the package nsight-systems-cli"
NSYS = Tool(
    "nsys", "Nsight Systems", "GPUMEM_NSYS", _NSYS_SOURCE, NSYS_FOLDERS, (2022, 4), ".nsys-rep"
)


def find(tool: Tool, environment: Mapping[str, str]) -> Path:
    """The command line of a tool: the program that its variable names, else on the PATH, else in one of the usual folders.
    Raises `ToolMissing`: there is none, or the variable names no program.
    """
    chosen = environment.get(tool.variable, "")
    if chosen:
        # No other program replaces a chosen one.
        found = shutil.which(chosen, path=environment.get("PATH"))
        if found is None:
            raise ToolMissing(
                f"{tool.variable}={chosen!r} is no program; accepted is the path of {tool.title}'s command line, {tool.program}"
            )
        return Path(found)
    on_path = shutil.which(tool.program, path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path)
    for pattern in tool.folders:
        for folder in sorted(glob.glob(pattern), key=numbers_in, reverse=True):
            if (found := shutil.which(tool.program, path=folder)) is not None:
                return Path(found)
    raise ToolMissing(
        f"{tool.program} was not found: install {tool.title} ({tool.source}), put it on the PATH, or give its path in {tool.variable}; "
        f"looked on the PATH and in {', '.join(tool.folders)}"
    )


def check_version(tool: Tool, program: Path, environment: Mapping[str, str]) -> str:
    """The version that a tool prints, such as "2025.3.2".
    Raises `ToolMissing`: it cannot be started, prints no version, or one that is too old.
    """
    try:
        answer = subprocess.run(
            [program, "--version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_LIMIT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolMissing(f"{program} cannot be started: {error}") from None
    output = answer.stdout + answer.stderr
    version = version_in(output)
    if version is None:
        first = next((line.strip() for line in output.splitlines() if line.strip()), "nothing")
        raise ToolMissing(
            f"{program} --version printed {first[:120]!r}, which is no version of {tool.title}; {tool.variable} names another"
        )
    if numbers_in(version)[:2] < tool.least:
        least = ".".join(map(str, tool.least))
        raise ToolMissing(
            f"{program} is {tool.title} {version}; needed is {least} or newer; {tool.variable} names another"
        )
    return version


def version_in(output: str) -> str | None:
    """The version in the output of `--version`: "NVIDIA Nsight Systems version 2025.3.2.474-..." or "Version 2025.3.0.0 (build ...)"."""
    found = re.search(r"\bversion\s+(\d{4}\.\d+(?:\.\d+)?)", output, re.IGNORECASE)
    return None if found is None else found[1]


def numbers_in(text: str) -> tuple[int, ...]:
    """The numbers in a text, so that 2025.10 comes after 2025.3."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", text))


# Command lines

COLLECTED = ".qdstrm"
"""Ending of a recording of Nsight Systems that is not yet imported into a report."""

MEASURED_RANGES = f"regex:{DOMAIN}@.+.{MEASURE}/"
"""Filter of `--nvtx-include` for every test's measured launches. ncu reads a backslash as an escape, so its third point matches any
character; the ranges of each kernel decide afterwards."""

DURATION, DRAM_READ, DRAM_WRITE = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
# Requests by the SMs. The sum over all units (lts__t_sectors_op_read) counts a sector twice that crosses between the two halves of L2 of an
# A100 or H100.
L2_READ, L2_WRITE = (
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
)
TRAFFIC_METRICS = (DURATION, DRAM_READ, DRAM_WRITE, L2_READ, L2_WRITE)


def captured(name: str) -> list[str]:
    """Options of nsys that record one test's range and nothing else."""
    # By default nsys looks at registered strings only. Ours are registered, those of other libraries need not be.
    register = "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
    return [
        "--capture-range=nvtx",
        f"--nvtx-capture={name}@{DOMAIN}",
        "--capture-range-end=stop",
        register,
    ]


def _with_own(defaults: Sequence[str], own: Sequence[str]) -> list[str]:
    """Options of a tool, such as "--trace=cuda" or "--clock-control none", without those that the user's own options give, and these."""
    names = {word.partition("=")[0] for word in own if word.startswith("-")}
    return [
        *(
            word
            for one in defaults
            if re.split("[= ]", one)[0] not in names
            for word in one.split()
        ),
        *own,
    ]


def nsys_command(
    nsys: Path,
    child: Sequence[str],
    report: Path,
    *,
    name: str | None,
    managed: bool,
    own: Sequence[str] = (),
) -> list[str]:
    """The command that traces a child: CUDA with the nodes of graphs, NVTX, no samples of the CPU. The report is overwritten.
    `name`: of the range to record; None for the whole run.
    `managed`: record page faults of managed memory too, which slows them down.
    `own`: the user's options, which replace those of the same name.
    """
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
    if managed:
        options += ["--cuda-um-gpu-page-faults=true", "--cuda-um-cpu-page-faults=true"]
    if name is not None:
        options += captured(name)
    return [
        str(nsys),
        "profile",
        *_with_own(options, own),
        f"--output={report}",
        "--force-overwrite=true",
        *child,
    ]


def included(names: Sequence[str]) -> list[str]:
    """Options of ncu that profile the measured launches of tests; of all tests without a name."""
    ranges = [f"{DOMAIN}@{phase(name, MEASURE)}/" for name in names] or [MEASURED_RANGES]
    return ["--nvtx", *(part for one in ranges for part in ("--nvtx-include", one))]


def ncu_command(
    program: Path,
    child: Sequence[str],
    report: Path,
    *,
    names: Sequence[str],
    own: Sequence[str] = (),
) -> list[str]:
    """The command that profiles the measured launches of a child, and of all its child processes, into a report, which is overwritten.
    Clocks are left alone, and the caches are emptied before every pass over a kernel.
    `names`: of the tests' ranges; empty for all tests.
    `own`: the user's options, which replace those of the same name.
    """
    options = _with_own(
        ["--clock-control none", "--cache-control all", "--target-processes all"], own
    )
    return [
        str(program),
        *options,
        *included(names),
        "--export",
        str(report),
        "--force-overwrite",
        *child,
    ]


def opening(program: Path, report: Path, name: str | None) -> list[str]:
    """How to open a report of Nsight Systems or Nsight Compute, in lines."""
    tool, file = str(program), str(report)
    if report.suffix == NCU.report:
        calls = {"open it": ["ncu-ui", file], "in text": [tool, "--import", file]}
    else:
        stats = [tool, "stats", "--report"]
        calls = {
            "open it": ["nsys-ui", file],
            "by range": [*stats, "nvtx_kern_sum", "--report", "um_total_sum", file],
        }
        if name is not None:
            calls["one test"] = [
                *stats,
                "cuda_gpu_kern_sum",
                "--filter-nvtx",
                f"{name}@{DOMAIN}",
                file,
            ]
    return [f"{how:10}{shlex.join(call)}" for how, call in calls.items()]


# Causes in the tools' output

COUNTERS_DOCUMENT = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
NO_KERNEL = (
    "ncu matched no kernel: none was launched by the tests' own thread inside a measured range, the tests were skipped, or their ranges "
    "are missing because the package nvtx is not installed or NVTX_DISABLE is set"
)
_UNKNOWN_OPTION = r"unrecogni[sz]ed (?:option|argument)s?:? *['\"]?([^\s'\"]+)"


def nsys_trouble(output: str, report: Path, name: str | None, *, collected: bool) -> str | None:
    """Why nsys has written no report, and the remedy, in one line; None if its output has no cause.
    `name`: of the range to record; None for the whole run. `collected`: it left a recording that is not yet imported.
    """
    if collected or "Importer error" in output:
        return (
            f"nsys collected, but its importer could not make a report of {report.with_suffix(COLLECTED)}; mostly libdw is missing: "
            "install it (libdw1 on Debian and Ubuntu, elfutils-libs on Fedora and RHEL) and run again, or import that file elsewhere with "
            "QdstrmImporter -i"
        )
    unknown = re.search(_UNKNOWN_OPTION, output)
    if unknown is not None:
        return f"this nsys does not know {unknown[1]}: its version is not supported; GPUMEM_NSYS names another"
    unsupported = re.search(
        r"^.*\bunsupported\b.*\b(?:driver|version)\b.*$", output, re.IGNORECASE | re.MULTILINE
    )
    if unsupported is not None:
        return f"nsys: {unsupported[0].strip()}; install the Nsight Systems of the driver's CUDA, GPUMEM_NSYS names another"
    fatal = re.search(r"^(?:FATAL )?ERROR: *(.+)$", output, re.IGNORECASE | re.MULTILINE)
    if fatal is not None:
        return f"nsys: {fatal[1].strip()}"
    if name is not None and "No reports were generated" in output:
        return (
            f"nsys never saw the range {name}@{DOMAIN}: the test was not reached, or its ranges are missing because the package nvtx is "
            "not installed or NVTX_DISABLE is set"
        )
    return None


def ncu_error(output: str) -> str | None:
    """The first error that ncu printed, with the remedy if it is known, in one line; None without one."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): load the driver with NVreg_RestrictProfilingToAdminUsers=0, "
            f"or run as administrator, in a container with --cap-add=SYS_ADMIN; see {COUNTERS_DOCUMENT}"
        )
    errors = [
        line.removeprefix("==ERROR==").strip()
        for line in output.splitlines()
        if line.startswith("==ERROR==")
    ]
    # ncu calls every exit code but 0 an error; pytest reports failed tests itself.
    errors = [error for error in errors if error and "returned an error code" not in error]
    return f"ncu: {errors[0]}" if errors else None


def ncu_trouble(output: str) -> str | None:
    """Why ncu has counted nothing, and the remedy, in one line; None if its output has no cause."""
    cause = ncu_error(output)
    if cause is not None and re.search(
        r"not compatible|unsupported|not supported", cause, re.IGNORECASE
    ):
        return f"{cause.rstrip('.')}; install the Nsight Compute of the driver's CUDA, GPUMEM_NCU names another"
    if cause is not None and re.search(r"metrics? dram__", cause):
        return f"{cause.rstrip('.')}: this GPU has no counters of DRAM, so nothing can be counted"
    unknown = re.search(_UNKNOWN_OPTION, output)
    if cause is None and unknown is not None:
        return f"this ncu does not know {unknown[1]}: its version is not supported; GPUMEM_NCU names another"
    return cause
