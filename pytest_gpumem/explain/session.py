"""pytest as a child of this process or of a profiler: the command, its environment, and the results that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.duet.workers import environment_of
from pytest_gpumem.duet.worktree import Side as Tree
from pytest_gpumem.nsight.profile_tests import selection
from pytest_gpumem.nsight.running import Finished
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.result_file import FileError, load
from pytest_gpumem.records.schema import Document


class NotCounted(Exception):
    """A run measured nothing, or its profiler saw nothing: one line with the cause and the remedy."""


@dataclass(frozen=True)
class Run:
    """One side's tests, ready to be run."""

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
        command = [self.tree.python, "-u", "-m", "pytest", *selection(self.tests), "--gpumem", *self.arguments, *self.tests]
        command += [f"--benchmark-json={results}"]
        return [*command, f"--gpumem-baseline={results.with_name('none')}", "-p", "no:cacheprovider"]

    @property
    def own(self) -> dict[str, str]:
        """The child's environment."""
        return environment_of(self.tree, self.other, self.environment)


def results_of(results: Path, finished: Finished, *, problem: str | None = None, under: str = "") -> Document:
    """What a child measured.

    Args:
        results: the file that it wrote.
        finished: the run.
        problem: what the tool complained of that it ran under.
        under: that tool, for the message; empty where there was none.

    Raises:
        NotCounted: nothing.
    """
    try:
        found = load(results) if results.exists() else None
    except FileError as error:
        raise NotCounted(problem or f"pytest's results cannot be read: {error}") from None
    if found is None:
        where = f" under {under}" if under else ""
        raise NotCounted(problem or f"pytest measured nothing{where} ({finished.how}); what it said is above")
    return found


def by_key(profiles: Sequence[TestProfile]) -> dict[str, TestProfile]:
    """Profiles of measurements that are known by their node id."""
    return {one.key: one for one in profiles if one.nodeid is not None}
