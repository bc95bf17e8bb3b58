"""Lines of the user's code: that of a wait, and those that `allow_kept` names."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

Line = tuple[str, int, str]  # file, line and function

PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def line_of(frame: FrameType | None) -> Line:
    """The user's line that `innermost` finds from a frame on. In a thread of C code, such as
    PyTorch's autograd, it has no file, and the thread's name."""
    # Inline: a test may wait thousands of times, ten frames below its line.
    of_user: FrameType | None = None
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "user" or (owner == "library" and of_user is None):
            of_user = frame
        if owner in ("user", "pytest"):
            break
        frame = frame.f_back
    if of_user is None:
        return "", 0, _name_of_thread()
    return of_user.f_code.co_filename, of_user.f_lineno, of_user.f_code.co_name


def innermost(lines: Iterable[Line]) -> Line:
    """The first line of the user's code before pytest's, else a library's. `lines`: the innermost
    first."""
    of_user: Line = ("", 0, "")
    for line in lines:
        owner = owner_of(line[0])
        if owner == "user" or (owner == "library" and not of_user[0]):
            of_user = line
        if owner in ("user", "pytest"):
            break
    return of_user


@cache
def owner_of(file: str) -> Literal["user", "library", "pytest"] | None:
    """Whose code a file has; None for this package's, and for code without a file."""
    parts = Path(file).parts
    if "_pytest" in parts:
        return "pytest"
    if file.startswith(("<", PACKAGE)):
        return None
    if file.startswith(_STANDARD) or any(part in _INSTALLED for part in parts):
        return "library"
    return "user"


def _name_of_thread() -> str:
    """The system's name of a thread, such as "pt_autograd_0"."""
    try:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        return comm.read_text(encoding="utf-8").strip()
    except OSError:
        return threading.current_thread().name


def is_named(line: Line, patterns: Sequence[str], root: Path) -> bool:
    """True if a pattern such as "conftest.py:*" names a line of a known file."""
    file, number, _function = line
    place = f"{shown_path(file, root)}:{number}"
    for pattern in patterns:
        if file and (fnmatchcase(place, pattern) or fnmatchcase(place, f"*/{pattern}")):
            return True
    return False


@cache
def shown_path(file: str, root: Path) -> str:
    """A path that is the same on every machine: relative to the folder of installed packages or to
    `root`, if it lies in either."""
    path = Path(file)
    for place in range(len(path.parts) - 1, 0, -1):
        if path.is_absolute() and path.parts[place] in _INSTALLED:
            return Path(*path.parts[place + 1 :]).as_posix()
    return path.relative_to(root).as_posix() if file and path.is_relative_to(root) else file
