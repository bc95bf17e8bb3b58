"""The journal: one line for each finished process, so that an interrupted duet resumes.

A text file of JSON lines. The first names the arguments that everything after it was measured under; a line counts once it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpumem.runs import RunError

KIND, SCHEMA = "gpumem duet journal", 2
_BEGIN = f'{{"kind":"{KIND}",'.replace(
    " ", ""
).encode()  # of every journal: a file that begins otherwise is not ours to touch
_ACCEPTED = "accepted is a file that gpumem duet began, or one that does not exist"


class Journal:
    """An open journal; no other duet can open it meanwhile."""

    def __init__(self, path: Path, arguments: Mapping[str, Any]) -> None:
        """Open it, or begin it. Raises `RunError`: it belongs to another user, a running duet or other arguments, or is no journal."""
        self.path = path  # of the file
        self.lines: list[dict[str, Any]] = []  # the results of finished processes, in their order
        # Plain values as they come back from JSON, so that tuples equal lists.
        self._arguments: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
        try:
            self._file = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise RunError(f"journal {path} cannot be opened: {error.strerror or error}") from None
        try:
            # Ends with the process, however that ends.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise RunError(f"journal {path}: another duet is writing it") from None
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device read without end
            raise RunError(f"journal {self.path} is no file")
        if found.st_uid != os.getuid():
            raise RunError(f"journal {self.path} belongs to another user")
        with open(self._file, "rb", closefd=False) as file:
            content = file.read()
        whole, _, torn = content.rpartition(b"\n")
        begun = (whole or torn).partition(b"\n")[0].replace(b" ", b"")
        if not begun.startswith(_BEGIN) and (whole or not _BEGIN.startswith(begun)):
            raise RunError(f"{self.path} is no journal of a duet; {_ACCEPTED}")
        if torn:  # the process ended within its last line
            os.ftruncate(self._file, len(content) - len(torn))
        if not whole:
            self._append({"kind": KIND, "schema": SCHEMA, "arguments": self._arguments})
            return
        for number, line in enumerate(whole.split(b"\n"), 1):
            try:
                plain = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunError(f"journal {self.path}: line {number} is no JSON: {error}") from None
            if number == 1:
                self._check(plain)
            elif not isinstance(plain, dict):
                raise RunError(f"journal {self.path}: line {number} is no JSON object")
            else:
                self.lines.append(plain)

    def _check(self, first: Any) -> None:
        if (
            not isinstance(first, dict)
            or first.get("kind") != KIND
            or not isinstance(first.get("arguments"), dict)
        ):
            raise RunError(f"{self.path} is no journal of a duet; {_ACCEPTED}")
        if first.get("schema") != SCHEMA:
            raise RunError(
                f"journal {self.path} is of schema {first.get('schema')!r}; this version reads {SCHEMA}"
            )
        theirs = first["arguments"]
        for name in {**self._arguments, **theirs}:
            if theirs.get(name) != self._arguments.get(name):
                raise RunError(
                    f"journal {self.path} is of other arguments: {name} was {_shown(theirs.get(name))} and is now "
                    f"{_shown(self._arguments.get(name))}; remove it to measure anew, or name another file"
                )

    def append(self, line: Mapping[str, Any]) -> None:
        """Add the result of one process; it is on disk when this returns."""
        plain = json.loads(json.dumps(dict(line), allow_nan=False))
        self._append(plain)
        self.lines.append(plain)

    def _append(self, plain: Mapping[str, Any]) -> None:
        text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            while text:  # a disk that is nearly full takes a part
                text = text[os.write(self._file, text) :]
            os.fsync(self._file)
        except OSError as error:
            raise RunError(
                f"journal {self.path} cannot be written: {error.strerror or error}"
            ) from None

    def count(self) -> int:
        """Number of processes in the file; after a signal `lines` may lack the last one."""
        return max(0, self.path.read_bytes().count(b"\n") - 1)

    def remove(self) -> None:
        """Delete the file; nothing is left to resume."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others open it; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _shown(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
