"""The driver's answers about GPUs on disk: a later process has them at once, where asking the driver takes half a second.

An answer is kept under all that decides it, as far as NVML, the environment and the system tell. Under MIG and MPS that is not enough, and
nothing is kept. Opening the device asks the driver for its UUID all the same, and forgets all answers if it is another one.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from pytest_gpumem.devices.cuda import nvml
from pytest_gpumem.files import write_whole
from pytest_gpumem.records.device import DeviceFacts

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MPS = Path("/tmp/nvidia-mps")
"""Where the control daemon of MPS has its pipes, unless a variable names another folder (NVIDIA, Multi-Process Service)."""
_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
)  # of variables that may decide which GPUs CUDA sees, and in which order


def place(index: int) -> Path | None:
    """The file of the answer about a device; None where an answer may not be kept."""
    if (
        "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        or _MPS.exists()
        or (cards := nvml.identities()) is None
    ):
        return None
    try:
        boot = _BOOT.read_text()
    except OSError:  # another system than Linux
        return None
    variables = sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(_PREFIXES)
    )
    parts = [str(index), *DeviceFacts.__struct_fields__, boot, *variables, *cards]
    path = (
        folder()
        / f"{hashlib.sha256(chr(0).join(parts).encode(errors='surrogatepass')).hexdigest()}.json"
    )
    return path if path.is_absolute() else None  # relative without a home folder


def folder() -> Path:
    """The folder of all answers."""
    return user_cache_path("pytest-gpumem") / "devices"


def kept(path: Path | None) -> bytes | None:
    """The answer in a file; None if there is none."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def keep(path: Path, answer: bytes) -> None:
    """Write an answer, if it can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, answer)


def forget() -> None:
    """Delete all answers."""
    with suppress(OSError):
        for path in folder().glob("*.json"):
            path.unlink(missing_ok=True)
