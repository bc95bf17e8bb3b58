"""Where the Nsight tools are installed."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

NCU_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
"""Where CUDA's installers put Nsight Compute; patterns, of several matches the newest version wins."""


class ToolMissing(Exception):
    """A tool is not installed, or not where a variable says: one line with what to do."""


def find_ncu(environment: Mapping[str, str], folders: Sequence[str] = NCU_FOLDERS) -> Path:
    """The command line of Nsight Compute: `GPUMEM_NCU`, else on the PATH, else in one of the usual folders.

    Args:
        environment: all environment variables.
        folders: patterns of the usual folders.

    Raises:
        ToolMissing: there is none, or `GPUMEM_NCU` names no program.
    """
    chosen = environment.get("GPUMEM_NCU", "")
    if chosen:
        # A chosen tool is not replaced by another one silently.
        found = shutil.which(chosen, path=environment.get("PATH"))
        if found is None:
            raise ToolMissing(f"GPUMEM_NCU={chosen!r} is no program; accepted is the path of Nsight Compute's command line, ncu")
        return Path(found)
    on_path = shutil.which("ncu", path=environment.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path)
    for pattern in folders:
        for folder in sorted(glob.glob(pattern), key=_version, reverse=True):
            if (found := shutil.which("ncu", path=folder)) is not None:
                return Path(found)
    raise ToolMissing(
        "ncu was not found: install Nsight Compute (part of the CUDA Toolkit), put it on the PATH, or give its path in GPUMEM_NCU; "
        f"looked on the PATH and in {', '.join(folders)}"
    )


def _version(folder: str) -> tuple[int, ...]:
    """Numbers of a folder's name, so that 2025.10 comes after 2025.3."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", folder))
