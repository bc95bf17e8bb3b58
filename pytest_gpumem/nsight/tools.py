"""NVIDIA's profilers: where they are, their command lines, and the causes in their output."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.outcomes import NoAnswer, UserError
from pytest_gpumem.ranges import DOMAIN, MEASURE


@dataclass(frozen=True)
class Tool:
    program: str  # name of its command line
    title: str  # name of the product
    variable: str  # environment variable that names its program
    source: str  # where to get it
    folders: tuple[str, ...]  # patterns of the folders where installers put it
    report: str  # ending of its reports


NCU = Tool(
    "ncu",
    "Nsight Compute",
    "GPUMEM_NCU",
    "part of the CUDA Toolkit",
    ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*"),
    ".ncu-rep",
)
NSYS = Tool(
    "nsys",
    "Nsight Systems",
    "GPUMEM_NSYS",
    "part of the CUDA Toolkit, or the package nsight-systems-cli",
    (
        "/usr/local/cuda/bin",
        "/usr/local/cuda-*/bin",
        "/opt/nvidia/nsight-systems/*/bin",
        "/opt/nvidia/nsight-systems-cli/*/bin",
        # Nsight Compute includes the command line of Nsight Systems.
        "/opt/nvidia/nsight-compute/*/host/target-linux-*",
    ),
    ".nsys-rep",
)


def find(tool: Tool, environment: Mapping[str, str]) -> Path:
    """Return the program that the tool's variable names, else that on the PATH, else the newest in
    the usual folders. Raises `NoAnswer`."""
    chosen = environment.get(tool.variable, "")
    if chosen:
        program = shutil.which(chosen, path=environment.get("PATH"))
        if program is None:
            raise NoAnswer(
                f"{tool.variable}={chosen!r} is no program; "
                f"accepted is the path of {tool.title}'s command line, {tool.program}"
            )
        return Path(program)
    folders = [environment.get("PATH") or os.defpath]
    for pattern in tool.folders:
        folders += sorted(glob.glob(pattern), key=_numbers, reverse=True)
    program = shutil.which(tool.program, path=os.pathsep.join(folders))
    if program is not None:
        return Path(program)
    raise NoAnswer(
        f"{tool.program} was not found: install {tool.title} ({tool.source}), put it on the PATH, "
        f"or give its path in {tool.variable}; "
        f"looked on the PATH and in {', '.join(tool.folders)}"
    )


def _numbers(path: str) -> list[int]:
    """So that 2025.10 comes after 2025.3."""
    return [int(number) for number in re.findall(r"[0-9]+", path)]


# What runs under a tool


def check(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the value of `--gpumem-device` in pytest's arguments, else of GPUMEM_DEVICE, else
    "cuda". The device of an ini file gives way.
    Raises `UserError`: Nsight would see no work or no ranges.
    """
    if {"--collect-only", "--co"} & {*arguments}:
        raise UserError("--collect-only among pytest's arguments: no test would run")
    device = environment.get("GPUMEM_DEVICE", "").lower()
    origin = f"GPUMEM_DEVICE={device}"
    if device in ("", "auto"):
        device = "cuda"
    for value in re.findall(r"--gpumem-device[= ]+(\S+)", " ".join(arguments)):
        device, origin = value.lower(), f"--gpumem-device {value}"
    if not re.fullmatch(r"cuda(:[0-9]+)?", device):
        raise UserError(
            f"{origin}: Nsight sees nothing of it; use a GPU, such as --gpumem-device cuda"
        )
    if importlib.util.find_spec("nvtx") is None:
        raise UserError(
            f"the package nvtx is not installed for {sys.executable}: "
            "the tests would have no ranges; pip install nvtx"
        )
    if environment.get("NVTX_DISABLE"):
        raise UserError(
            f"NVTX_DISABLE={environment['NVTX_DISABLE']!r} is set: "
            "the tests would have no ranges; unset it"
        )
    return device


# Command lines

MEASURED_RANGES = f"regex:{DOMAIN}@.+.{MEASURE}/"
"""Filter of `--nvtx-include` for measured launches. ncu reads a backslash as an escape, so the
point before `measure` matches any character."""


def _defaults(options: Sequence[str], chosen: Sequence[str]) -> list[str]:
    names = {word.partition("=")[0] for word in chosen if word.startswith("-")}
    words = []
    for option in options:
        if re.split("[= ]", option)[0] not in names:
            words += option.split()
    return words


def nsys_command(
    program: Path,
    command: Sequence[str],
    report: Path,
    *,
    test: str | None,
    managed: bool,
    chosen: Sequence[str] = (),
) -> list[str]:
    """The command that traces CUDA, with the nodes of graphs, and NVTX, without samples of the CPU.
    `test`: name of the range to record; None for the whole run.
    `managed`: record page faults too, which slows them down.
    `chosen`: the user's options, which replace those of the same name.
    """
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
    if managed:
        options += ["--cuda-um-gpu-page-faults=true", "--cuda-um-cpu-page-faults=true"]
    if test is not None:
        options += [
            "--capture-range=nvtx",
            f"--nvtx-capture={test}@{DOMAIN}",
            "--capture-range-end=stop",
            # Ranges of other libraries need not be registered strings.
            "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
        ]
    words = [*_defaults(options, chosen), *chosen, f"--output={report}", "--force-overwrite=true"]
    return [str(program), "profile", *words, *command]


def ncu_command(
    program: Path,
    command: Sequence[str],
    output: Sequence[str],
    *,
    metrics: Sequence[str],
    chosen: Sequence[str] = (),
) -> list[str]:
    """The command that counts the measured launches of all tests, with empty caches before each
    pass over a kernel. `output`: options that say where the counts go.
    """
    options = ["--clock-control none", "--cache-control all", "--target-processes all"]
    options.append(f"--metrics {','.join(metrics)}")
    words = [*_defaults(options, chosen), *chosen, "--nvtx", "--nvtx-include", MEASURED_RANGES]
    return [str(program), *words, *output, *command]


def opening(program: Path, report: Path) -> list[str]:
    if report.suffix == NCU.report:
        viewer, text = "ncu-ui", [str(program), "--import", str(report)]
    else:
        viewer, text = "nsys-ui", [str(program), "stats", str(report)]
    return [f"open it:  {shlex.join([viewer, str(report)])}", f"in text:  {shlex.join(text)}"]


# Causes in the tools' output

COUNTERS_DOCUMENT = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
FORBIDDEN = "ERR_NVGPUCTRPERM"  # in ncu's output: this user may not read counters
_UNKNOWN_OPTION = r"unrecogni[sz]ed (?:option|argument)s?:? *['\"]?([^\s'\"]+)"


def nsys_cause(output: str, report: Path) -> str | None:
    """Why nsys has written no report, and the remedy; None if its output has no reason."""
    if "Importer error" in output:
        return (
            f"nsys collected, but its importer could not make a report of "
            f"{report.with_suffix('.qdstrm')}; mostly libdw is missing: install it (libdw1 on "
            "Debian and Ubuntu, elfutils-libs on Fedora and RHEL) and run again"
        )
    unknown = re.search(_UNKNOWN_OPTION, output)
    if unknown is not None:
        return f"this nsys does not know {unknown[1]}; GPUMEM_NSYS names another version"
    fatal = re.search(r"(?im)^(?:fatal )?error: *(.+)$", output)
    if fatal is not None:
        return f"nsys: {fatal[1].strip()}"
    if "No reports were generated" in output:
        return (
            "nsys never saw the range of the test: it was not reached, or pytest runs without nvtx"
        )
    return None


def ncu_cause(output: str) -> str | None:
    """Why ncu has counted nothing, and the remedy; None if its output has no reason."""
    if FORBIDDEN in output:
        return (
            f"this user may not read the GPU's counters ({FORBIDDEN}): load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0, or run as administrator, in a container with "
            f"--cap-add=SYS_ADMIN; see {COUNTERS_DOCUMENT}"
        )
    for line in output.splitlines():
        error = line.removeprefix("==ERROR==").strip().rstrip(".")
        # ncu calls every exit code but 0 an error; pytest reports failed tests itself.
        if not line.startswith("==ERROR==") or not error or "returned an error code" in error:
            continue
        if re.search(r"(?i)not compatible|unsupported|not supported", error):
            return (
                f"ncu: {error}; install the Nsight Compute of the driver's CUDA, "
                "GPUMEM_NCU names another"
            )
        if re.search(r"metrics? dram__", error):
            return f"ncu: {error}: this GPU has no counters of DRAM, so nothing can be counted"
        return f"ncu: {error}"
    unknown = re.search(_UNKNOWN_OPTION, output)
    if unknown is not None:
        return f"this ncu does not know {unknown[1]}; GPUMEM_NCU names another version"
    if "No kernels were profiled" in output:
        return (
            "ncu matched no kernel: no test ran, the tests were skipped, or none launched a kernel "
            "by its own thread inside a measured range"
        )
    return None
