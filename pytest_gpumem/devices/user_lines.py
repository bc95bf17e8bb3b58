"""Lines of the user's code: that of a wait, and those that `allow_kept` names."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import FrameType

Line = tuple[str, int, str]  # file, line and function

PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def line_of(frame: FrameType | None) -> Line:
    """The user's innermost line from a frame on. In a thread of C code, such as PyTorch's
    autograd, it has no file, and the thread's name."""
    return innermost(_lines(frame)) or ("", 0, _name_of_thread())


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def innermost(lines: Iterable[Line]) -> Line | None:
    """The first line of the user's code before pytest's, else a library's. `lines`: of a stack, the
    innermost first."""
    of_library: Line | None = None
    for line in lines:
        file = line[0]
        if is_pytests(file):
            break
        if is_users(file):
            return line
        if of_library is None and not file.startswith(("<", PACKAGE)):
            of_library = line
    return of_library


def _name_of_thread() -> str:
    """The system's name of a thread, such as "pt_autograd_0"."""
    try:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        return comm.read_text(encoding="utf-8").strip()
    except OSError:
        return threading.current_thread().name


@cache
def is_users(file: str) -> bool:
    """True for a file that belongs to no installed package, nor to Python or this package."""
    if file.startswith(("<", PACKAGE, *_STANDARD)):
        return False
    return not any(part in _INSTALLED for part in Path(file).parts)


@cache
def is_pytests(file: str) -> bool:
    return "_pytest" in Path(file).parts


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
