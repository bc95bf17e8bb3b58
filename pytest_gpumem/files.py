"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` under a temporary name beside `path` that ends in `.tmp`, then rename it: nobody sees half a file.

    What a link leads to is replaced, and not the link. What is no file, such as a pipe, `/dev/stdout` or `/dev/null`, is written to.

    Raises:
        OSError: the folder is missing or cannot be written; `path` is as it was.
    """
    if _is_special(path):
        with open(path, "w", encoding="utf-8") as special:
            special.write(text)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Opened anew and by the umask: results are shared like any other file of a project.
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_whole(path: Path, text: str) -> None:
    """Append `text` to a file that others append to as well, in one write: what they write does not end up within it.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "ab", buffering=0) as file:
        file.write(text.encode())


def unwritable(path: Path) -> str | None:
    """Why a file cannot be written, for a look before long work; None if nothing speaks against it."""
    if _is_special(path):
        return None if os.access(path, os.W_OK) else "no permission to write to it"
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "it is a folder"
    # A new file takes the place of what is there, so the folder counts.
    return None if os.access(folder, os.W_OK) else f"no permission to write in {folder}"


def _is_special(path: Path) -> bool:
    """Whether it is there, and neither a file nor a folder: a device that took the place of a file would be gone."""
    return path.exists() and not path.is_file() and not path.is_dir()
