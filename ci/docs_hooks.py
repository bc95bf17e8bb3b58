"""Hooks of MkDocs: links that leave the documentation lead into the repository, or become text where its address is unknown."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]*)\)")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# What is logged below this name as a warning ends a strict build.
log = logging.getLogger("mkdocs.hooks.gpumem")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """One page before it is rendered."""
    folder = Path(page.file.abs_src_path).parent
    return inside(markdown, folder, Path(config["docs_dir"]), config["repo_url"])


def inside(markdown: str, folder: Path, docs: Path, repository: str | None) -> str:
    """The page with links that leave the documentation led to the repository, or, where its address is unknown, left as their text.

    A link to a file that is not there is a warning.
    """

    def led(link: re.Match[str]) -> str:
        text, (path, _, place) = link[1], link[2].partition("#")
        target = (folder / path).resolve()
        if target.is_relative_to(docs.resolve()):
            return link[0]
        if not target.exists():
            log.warning("link to %s in %s: there is no such file", link[2], folder)
        address = f"{(repository or '').rstrip('/')}/blob/main/{target.relative_to(ROOT)}{place and f'#{place}'}"
        return f"[{text}]({address})" if repository else text

    parts, at = [], 0
    for block in CODE.finditer(markdown):
        parts += [OUTSIDE.sub(led, markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, OUTSIDE.sub(led, markdown[at:])])
