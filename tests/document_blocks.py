"""The code in the README and in the documentation, as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]*?) -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block of code."""

    page: Path
    line: int
    """Line of the page before the first of the code."""
    language: str
    code: str
    marker: str
    """What the comment right above says, such as "step: red"; empty without one."""

    @property
    def where(self) -> str:
        """The page below the repository, and the line."""
        return f"{self.page.relative_to(ROOT)}:{self.line + 1}"

    @property
    def is_test(self) -> bool:
        """Python that pytest would collect."""
        return self.language == "python" and "def test_" in self.code

    @property
    def module(self) -> str:
        """A name for a test module of this code alone."""
        return (
            "test_"
            + re.sub(r"\W", "_", str(self.page.relative_to(ROOT).with_suffix("")))
            + f"_{self.line}"
        )


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks of these languages, page by page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if found["language"] in languages:
                yield Block(
                    page,
                    text.count("\n", 0, found.start("code")),
                    found["language"],
                    found["code"],
                    found["marker"] or "",
                )


def command_lines() -> Iterator[tuple[str, str]]:
    """Where it stands, and the line, of everything that is to be typed into a shell, but for the README's two long lines, which
    continuous integration runs."""
    for block in (
        block for block in blocks("sh", "console") if not block.marker.startswith("command: ")
    ):
        for number, line in enumerate(block.code.splitlines(), block.line + 1):
            if block.language == "sh" or line.startswith("$ "):
                for command in re.sub(r"^\$ ", "", line).split(" && "):
                    yield f"{block.page.relative_to(ROOT)}:{number}", command
