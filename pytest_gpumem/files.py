"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside `path`, then rename it: no reader sees half a file.

    The target of a link is replaced, a pipe or a device is written to.
    """
    if _is_special(path):
        path.write_bytes(text.encode())
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Created with the permissions of the umask, as other files of a project are.
        with open(temporary, "xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_whole(path: Path, text: str) -> None:
    """Append `text` in a single write, so that no other process writes into it."""
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())


def unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, to check before long work, or None."""
    if _is_special(path):
        return None if os.access(path, os.W_OK) else "no permission to write to it"
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "it is a folder"
    # A new file replaces the old file, so the permission of the folder decides.
    if os.access(folder, os.W_OK):
        return None
    return f"no permission to write in {folder}"


def _is_special(path: Path) -> bool:
    """True for a device or a pipe, which a rename would destroy."""
    return path.exists() and not path.is_file() and not path.is_dir()
