"""Counters of one side: its tests under Nsight Compute, few launches of each, joined with the rows of the same run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_gpumem.duet.workers import TAKEN_AWAY
from pytest_gpumem.duet.worktree import Side as Tree
from pytest_gpumem.duet.worktree import moved_path
from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.ncu_report import PROFILE_METRICS, USED_OF_LOAD, USED_OF_STORE, read_csv
from pytest_gpumem.nsight.reading import with_results
from pytest_gpumem.nsight.tools import ToolMissing, find_ncu
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.schema import document_from_json

INSTRUMENTED = (USED_OF_LOAD, USED_OF_STORE)
"""Metrics that need instrumented code; where ncu refuses them, sectors per request alone tell the access pattern."""


class NotCounted(Exception):
    """No counters: one line with the cause and the remedy."""


def count(
    tree: Tree, other: Tree, arguments: Sequence[str], tests: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], object]
) -> dict[str, TestProfile]:
    """What one side's launches did, by row key.

    Caches are emptied before every kernel, as ncu does by default, whatever a test's mode: the counters of both sides are of cold caches.

    Args:
        tree: the side.
        other: the other side, of which it may see nothing.
        arguments: pytest's.
        tests: node ids; empty for all that the arguments select.
        environment: all environment variables.
        echo: takes each line that pytest and ncu print.

    Raises:
        NotCounted: ncu is missing, may not count, or saw no kernel.
    """
    try:
        program = find_ncu(environment)
    except ToolMissing as error:
        raise NotCounted(str(error)) from None
    own = {name: value for name, value in environment.items() if name not in TAKEN_AWAY and not name.startswith("GIT_")}
    path = moved_path(environment, tree, other.root)
    if path is not None:
        own["PYTHONPATH"] = path
    for further in (INSTRUMENTED, ()):
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            results, log = Path(folder, "results.json"), Path(folder, "ncu.log")
            child = [tree.python, "-u", "-m", "pytest", "--gpumem", *arguments, *tests, f"--benchmark-json={results}"]
            child += [f"--gpumem-baseline={Path(folder, 'none')}", "-o", "gpumem_report=", "-p", "no:cacheprovider"]
            more = [metric for metric in (*PROFILE_METRICS, *further) if metric not in ncu.METRICS]
            command = ncu.counting_command(program, child, log, more=more)
            try:
                finished = ncu.run(command, own, echo, folder=tree.folder)
            except OSError as error:
                raise NotCounted(f"{program} cannot be started: {error}") from None
            said = log.read_text(errors="replace") if log.exists() else ""
            problem = ncu.trouble(said) or ncu.trouble(finished.output)
            if further and problem is not None and "metric" in problem:
                continue
            return _joined(said, results, problem, finished)
    raise AssertionError("unreachable")  # the second pass returns or raises


def _joined(said: str, results: Path, problem: str | None, finished: ncu.Finished) -> dict[str, TestProfile]:
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    if not text.strip():
        raise NotCounted(problem or f"pytest measured nothing under ncu (exit code {finished.exit_code}); what it said is above")
    try:
        rows = document_from_json(json.loads(text).get("gpumem")).rows
        profiles = read_csv(said).profiles
    except (ValueError, AttributeError) as error:  # SchemaError, JSONDecodeError and BadOutput are ValueErrors
        raise NotCounted(problem or str(error)) from None
    return {one.key: one for one in with_results(profiles, rows) if one.kernels and one.nodeid is not None}
