"""Where a user's mistake was made."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

_PACKAGE = Path(__file__).resolve().parent.parent


def where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's own line that led to an error; empty if there is none."""
    found = ""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        theirs = file.is_relative_to(root) and "site-packages" not in file.parts and not file.is_relative_to(_PACKAGE)
        if file == test_file or theirs:
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            found = f"{shown}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return found
