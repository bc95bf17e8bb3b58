"""The files that a run writes, whether a session or `gpumem gate` writes them.

What makes their text is imported when it is needed: most runs write none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.reporting.concerns import code_quality

if TYPE_CHECKING:
    from pytest_gpumem.reporting.run import Run


def _report(run: Run) -> str | None:
    from pytest_gpumem.reporting import html

    return html.page(run) if run.rows else None


def _markdown(run: Run) -> str:
    from pytest_gpumem.reporting import markdown

    return markdown.page(run)


OUTPUTS: Mapping[str, Callable[[Run], str | None]] = MappingProxyType(
    {
        "report": _report,
        "markdown": _markdown,
        "code_quality": lambda run: code_quality(run.rows, run.places, new=run.duet_follows),
    }
)
"""By the setting that names the file: the file's text, or None if a run without rows writes no such file."""
