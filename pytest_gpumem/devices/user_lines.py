"""Lines of the user's code: that of a wait, and those that `allow_kept` names."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Literal, TypeVar

T = TypeVar("T")
Line = tuple[str, int, str]  # file, line and function

PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def line_of(frame: FrameType | None) -> Line:
    """The user's innermost line from a frame on. In a thread of C code, such as PyTorch's
    autograd, it has no file, and the thread's name."""
    of_user = innermost(_stack(frame), attrgetter("f_code.co_filename"))
    if of_user is None:
        return "", 0, _name_of_thread()
    return of_user.f_code.co_filename, of_user.f_lineno, of_user.f_code.co_name


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def innermost(frames: Iterable[T], file_of: Callable[[T], str]) -> T | None:
    """The first frame of the user's code before pytest's, else a library's. `frames`: the innermost
    first."""
    of_library: T | None = None
    for frame in frames:
        owner = owner_of(file_of(frame))
        if owner == "pytest":
            break
        if owner == "user":
            return frame
        if owner == "library" and of_library is None:
            of_library = frame
    return of_library


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
