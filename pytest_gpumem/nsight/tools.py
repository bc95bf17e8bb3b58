"""Where the Nsight tools are installed, and which version they are."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NCU_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
"""Where CUDA's installers put Nsight Compute; patterns, of several matches the newest version wins."""
NSYS_FOLDERS = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda-*/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    # Nsight Compute brings the command line of Nsight Systems along.
    "/opt/nvidia/nsight-compute/*/host/target-linux-*",
)
"""Where installers put Nsight Systems, as `NCU_FOLDERS`."""

ANSWER_LIMIT = 60.0
"""Seconds after which a tool that was asked for its version counts as broken."""


class ToolMissing(Exception):
    """A tool is not installed, too old, or not where a variable says: one line with what to do."""


@dataclass(frozen=True)
class Tool:
    """One of NVIDIA's profilers."""

    program: str
    """Name of its command line."""
    title: str
    """Name of the product."""
    variable: str
    """Environment variable that names its program."""
    source: str
    """Where it comes from."""
    folders: tuple[str, ...]
    """Patterns of the folders where installers put it."""
    least: tuple[int, int]
    """The oldest version that has what is asked of it here: year and number."""


# The oldest are those that CUDA 12.0 brings, the oldest CUDA that this package has an extra for.
NCU = Tool("ncu", "Nsight Compute", "GPUMEM_NCU", "part of the CUDA Toolkit", NCU_FOLDERS, (2022, 4))
NSYS = Tool("nsys", "Nsight Systems", "GPUMEM_NSYS", "part of the CUDA Toolkit, or the package nsight-systems-cli", NSYS_FOLDERS, (2022, 4))


def find(tool: Tool, environment: Mapping[str, str], folders: Sequence[str] | None = None) -> Path:
    """The command line of a tool: what its variable names, else on the PATH, else in one of the usual folders.

    Args:
        tool: the tool.
        environment: all environment variables.
        folders: patterns of the usual folders; default: the tool's.

    Raises:
        ToolMissing: there is none, or the variable names no program.
    """
    folders = tool.folders if folders is None else folders
    chosen = environment.get(tool.variable, "")
    if chosen:
        # A chosen tool is not replaced by another one silently.
        found = shutil.which(chosen, path=environment.get("PATH"))
        if found is None:
            raise ToolMissing(
                f"{tool.variable}={chosen!r} is no program; accepted is the path of {tool.title}'s command line, {tool.program}"
            )
        return Path(found)
    on_path = shutil.which(tool.program, path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path)
    for pattern in folders:
        for folder in sorted(glob.glob(pattern), key=_numbers, reverse=True):
            if (found := shutil.which(tool.program, path=folder)) is not None:
                return Path(found)
    raise ToolMissing(
        f"{tool.program} was not found: install {tool.title} ({tool.source}), put it on the PATH, or give its path in {tool.variable}; "
        f"looked on the PATH and in {', '.join(folders)}"
    )


def find_ncu(environment: Mapping[str, str], folders: Sequence[str] = NCU_FOLDERS) -> Path:
    """The command line of Nsight Compute; arguments and errors as `find`."""
    return find(NCU, environment, folders)


def find_nsys(environment: Mapping[str, str], folders: Sequence[str] = NSYS_FOLDERS) -> Path:
    """The command line of Nsight Systems; arguments and errors as `find`."""
    return find(NSYS, environment, folders)


def check_version(tool: Tool, program: Path, environment: Mapping[str, str]) -> str:
    """The version of a tool, as it says itself, such as "2025.3.2".

    Raises:
        ToolMissing: it cannot be started, says no version, or one that is too old.
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
    said = answer.stdout + answer.stderr
    version = version_in(said)
    if version is None:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        raise ToolMissing(f"{program} --version said {first[:120]!r}, which is no version of {tool.title}; {tool.variable} names another")
    if _numbers(version)[:2] < tool.least:
        least = ".".join(map(str, tool.least))
        raise ToolMissing(f"{program} is {tool.title} {version}; needed is {least} or newer; {tool.variable} names another")
    return version


def version_in(said: str) -> str | None:
    """The version in what `--version` printed: "NVIDIA Nsight Systems version 2025.3.2.474-..." or "Version 2025.3.0.0 (build ...)"."""
    found = re.search(r"\bversion\s+(\d{4}\.\d+(?:\.\d+)?)", said, re.IGNORECASE)
    return None if found is None else found[1]


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text, so that 2025.10 comes after 2025.3."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", text))
