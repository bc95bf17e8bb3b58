"""Shared by bench scripts: arguments, the requested device, and the writing of a record with the revision of the code."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest_gpumem
from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.devices.opening import DeviceChoice, choose
from pytest_gpumem.files import write_whole
from pytest_gpumem.options import device_choice
from pytest_gpumem.records.device import DeviceFacts

ROOT = Path(__file__).parents[2]
PACKAGE = Path(str(pytest_gpumem.__file__)).parent


def record_parser(doc: str | None, *, device: str | None = "cuda") -> argparse.ArgumentParser:
    """The arguments of a script: its docstring as help, `--json FILE` for the record, and `--device`, unless its default is None."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    if device is not None:
        parser.add_argument(
            "--device",
            type=device_choice,
            default=device,
            help="as --gpumem-device (default: %(default)s)",
        )
    return parser


def utc_now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def installed(*names: str) -> dict[str, str]:
    """Versions of these distributions, without those that are missing."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_record(path: Path, record: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write `record` as JSON, with `taken_at` in addition; one line, or indented by `indent` spaces.

    Raises:
        OSError: the file cannot be written. A file of that name stays as it was.
    """
    separators = (",", ":") if indent is None else None
    write_whole(
        path,
        json.dumps({**record, "taken_at": taken_at()}, indent=indent, separators=separators) + "\n",
    )


@lru_cache(maxsize=1)
def taken_at() -> dict[str, str | None]:
    """The code that measures.

    `revision` is the commit of the checkout, with "-dirty" where files differ from it; None outside a checkout. `package` is the installed
    version. `sources` is the SHA-256 of the installed modules, in the order of their paths: it tells code apart where a commit cannot.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(
            path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    sources = digest.hexdigest()
    package = installed("pytest-gpumem").get("pytest-gpumem")
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        git = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {"revision": None, "package": package, "sources": sources}
    return {
        "revision": git.stdout.strip() or None if git.returncode == 0 else None,
        "package": package,
        "sources": sources,
    }


def chosen_device(parser: argparse.ArgumentParser, name: str) -> DeviceChoice:
    """The device that --device names; ends the script with a usage error where there is none."""
    try:
        return choose(name)
    except (NoDevice, ValueError) as reason:
        parser.error(f"--device {name}: {reason}")


def device_of(facts: DeviceFacts) -> dict[str, Any]:
    """The device as a record has it."""
    return {
        "name": facts.name,
        "simulated": facts.simulated,
        "driver": facts.driver,
        "cuda": facts.cuda,
        "uuid": facts.uuid,
    }


def head(record: Mapping[str, Any]) -> str:
    """The first line of a record's table: device, driver and day."""
    device = record["device"]
    return f"{'SIMULATED ' if device['simulated'] else ''}{device['name']}, driver {device['driver']}, {record['ended'][:10]}"
