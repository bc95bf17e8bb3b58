"""pytest as a profiler's child: the command, its environment, and the rows that it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.duet.workers import TAKEN_AWAY
from pytest_gpumem.duet.worktree import Side as Tree
from pytest_gpumem.duet.worktree import moved_path
from pytest_gpumem.nsight.ncu import Finished
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import document_from_json


class NotCounted(Exception):
    """A profiler saw nothing: one line with the cause and the remedy."""


@dataclass(frozen=True)
class Run:
    """One side's tests, ready to be run under a profiler."""

    tree: Tree
    other: Tree
    """The other side, of which it may see nothing."""
    arguments: tuple[str, ...]
    """pytest's."""
    tests: tuple[str, ...]
    """Node ids; empty for all that the arguments select."""
    environment: Mapping[str, str]
    """All environment variables."""

    def child(self, results: Path) -> list[str]:
        """The command that measures and writes its results."""
        command = [self.tree.python, "-u", "-m", "pytest", "--gpumem", *self.arguments, *self.tests, f"--benchmark-json={results}"]
        return [*command, f"--gpumem-baseline={results.with_name('none')}", "-o", "gpumem_report=", "-p", "no:cacheprovider"]

    @property
    def own(self) -> dict[str, str]:
        """The child's environment."""
        own = {name: value for name, value in self.environment.items() if name not in TAKEN_AWAY and not name.startswith("GIT_")}
        path = moved_path(self.environment, self.tree, self.other.root)
        return own if path is None else own | {"PYTHONPATH": path}


def rows_of(results: Path, problem: str | None, finished: Finished, tool: str) -> tuple[Row, ...]:
    """The rows that a child wrote.

    Args:
        results: its file.
        problem: what the tool complained of.
        finished: the run.
        tool: for the message.

    Raises:
        NotCounted: it wrote none.
    """
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    if not text.strip():
        raise NotCounted(problem or f"pytest measured nothing under {tool} (exit code {finished.exit_code}); what it said is above")
    try:
        return document_from_json(json.loads(text).get("gpumem")).rows
    except (ValueError, AttributeError) as error:  # SchemaError and JSONDecodeError are ValueErrors
        raise NotCounted(problem or str(error)) from None


def by_key(profiles: Sequence[TestProfile]) -> dict[str, TestProfile]:
    """Profiles of measurements that are known by their node id."""
    return {one.key: one for one in profiles if one.nodeid is not None}
