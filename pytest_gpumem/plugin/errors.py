"""Errors that are made for the user, and tracebacks without the frames of this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from pytest_gpumem.devices.protocol import DeviceError, Unsupported
from pytest_gpumem.measuring.bound import BadCall, NoSuchKernel
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.l2 import LeftoverWarning
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.window_request import BadWindow
from pytest_gpumem.plugin.result import NoTraffic
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import UnknownPeak
from pytest_gpumem.settings import SettingsError
from pytest_gpumem.units import QuantityError

_PACKAGE = Path(__file__).resolve().parent.parent

MISTAKES = (
    BadCall,
    NoSuchKernel,
    BadBuffer,
    BadWindow,
    LeftoverWarning,
    NoTraffic,
    SettingsError,
    QuantityError,
    DeviceError,
    UnknownPeak,
    WrongResult,
)
"""Errors that are shown with the user's line that led to them, without a traceback."""


def replaced(error: BaseException, item: pytest.Item) -> BaseException:
    """A skip, or a failure of one line with the place; or the error without frames of ours."""
    root = item.config.rootpath
    shown: BaseException
    if isinstance(error, Unsupported):
        shown = pytest.skip.Exception(str(error), _use_item_location=True)
    elif isinstance(error, MISTAKES):
        place = printable(_where(error.__traceback__, item.path, root))
        shown = pytest.fail.Exception(f"{place}{type(error).__name__}: {error}", pytrace=False)
    else:
        if not item.config.getoption("fulltrace"):
            error.__traceback__ = _without_ours(error.__traceback__, item.path, root)
        return error
    shown.__context__, shown.__suppress_context__ = error, True  # as `raise shown from None` does
    return shown


def _frames(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> Iterator[tuple[TracebackType, Path, bool]]:
    """The frames from the outermost one, with their files, and whether the code is the user's."""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        elsewhere = "site-packages" in file.parts or file.is_relative_to(_PACKAGE)
        of_the_user = file.is_relative_to(root) and not elsewhere
        yield traceback, file, of_the_user or file == test_file
        traceback = traceback.tb_next


def _where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's innermost line; empty if there is none."""
    place = ""
    for frame, file, of_the_user in _frames(traceback, test_file, root):
        if of_the_user:
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            place = f"{shown}:{frame.tb_lineno}: "
    return place


def _without_ours(
    traceback: TracebackType | None, test_file: Path, root: Path
) -> TracebackType | None:
    """A traceback without the frames of this package outside of the user's innermost frame."""
    kept: TracebackType | None = None
    outside = False
    for frame, file, of_the_user in reversed([*_frames(traceback, test_file, root)]):
        outside = outside or of_the_user
        if not outside or not file.is_relative_to(_PACKAGE):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept
