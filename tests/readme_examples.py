"""The Python examples of the README, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[1] / "README.md"


class Example(NamedTuple):
    """One block of Python."""

    line: int
    """Line of the README before the first of the code."""
    code: str

    @property
    def module(self) -> str | None:
        """The file that the example is, by its first line; None for a test."""
        named = re.match(r"# (\w+\.py)\n", self.code)
        return named[1] if named else None


def examples() -> list[Example]:
    """All blocks, in order."""
    text = README.read_text(encoding="utf-8")
    return [Example(text.count("\n", 0, m.start(1)), m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
