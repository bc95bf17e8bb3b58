"""The session of a gate: pytest with the change's tests, while those of BASE are collected."""

from __future__ import annotations

import json
import os
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.outcomes import Exit, NoAnswer, UserError
from pytest_gpumem.records.schema import Document, SchemaError, from_plain, to_plain
from pytest_gpumem.reporting.conclusion import Place
from pytest_gpumem.reporting.github import place_of
from pytest_gpumem.result_files import FileError, load
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.child import for_a_run, pytest_command, running
from pytest_gpumem.runs.processes import BASE, Processes, Turn
from pytest_gpumem.runs.worktree import Side, working_tree
from pytest_gpumem.settings import ACCEPTS, BASE_SELECTION, BASELINE_OF, SELECTION

_OF_PYTEST = re.compile(r'^(?:failed on (?:setup|teardown) with ")?(?:Failed: )?(.*?)"?$')
"""What pytest adds to the message of a failure."""


@dataclass
class SessionResult:
    """What the session of a gate leaves behind."""

    code: int  # pytest's exit code
    failures: Mapping[str, str] = field(default_factory=dict)
    """The first line of what failed, by the node id of a test or a file."""
    document: Document | None = None  # its results; None if it wrote none
    selection: Selection | None = None  # its tests; None if it did not come to its end
    places: Mapping[str, Place] = field(default_factory=dict)  # of its tests, by node id
    base: Selection = field(default_factory=lambda: Selection({}))  # the tests that BASE selects


class Files(NamedTuple):
    """Where the session writes."""

    results: Path
    junit: Path
    report: Path


def run_session(
    files: Files,
    base: str,
    arguments: Sequence[str],
    base_side: Side | None,
    *,
    accepts: bool,
) -> SessionResult:
    """Run the tests of the change, held to the limits of BASE.

    `base`: BASE as written; the history that HEAD shares with it is compared with.
    `arguments`: pytest's.
    `base_side`: BASE, which selects nothing if it is None. No test runs before its are known.
    `accepts`: what the change accepts counts.
    Raises `UserError`: its results cannot be read. Raises `NoAnswer`: BASE cannot be collected.
    """
    # pytest looks for its root folder among all words that are paths: an option is one word.
    # In this family, JUnit's file says where each test is defined.
    options = [f"--junitxml={files.junit}", "--override-ini=junit_family=xunit1"]
    # Tests after the first failure are judged too: the duet may clear that failure.
    options += [f"--gpumem-report={files.report}", "--maxfail=0"]
    command = pytest_command([*arguments, *options], options=["--no-header"], results=files.results)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        of_base, of_head = Path(folder, "base.json"), Path(folder, "head.json")
        variables = {BASELINE_OF: base, BASE_SELECTION: str(of_base), SELECTION: str(of_head)}
        if accepts:
            variables[ACCEPTS] = "1"
        with running(command, for_a_run(os.environ) | variables) as process:
            selected, not_collected = Selection({}), None
            try:
                if base_side is not None:
                    selected = _collect(base_side, arguments, of_base)
            except NoAnswer as error:
                not_collected = error
            known = None if not_collected else to_plain(selected)
            write_whole(of_base, json.dumps(known))
            result = SessionResult(process.wait(), base=selected)
        if not_collected is not None and result.code != Exit.USAGE:
            raise not_collected  # the change's mistake comes first
        if of_head.exists():
            result.selection = _selection(of_head)
    if files.results.exists() and files.junit.exists():
        try:
            result.document = load(files.results)
            result.failures, result.places = _read_junit(files.junit, result.selection)
        except (FileError, OSError, ValueError, ElementTree.ParseError) as error:
            folder = str(files.results.parent)
            raise UserError(f"the session's results in {folder} cannot be read: {error}") from None
    return result


def _selection(file: Path) -> Selection:
    return from_plain(json.loads(file.read_text(encoding="utf-8")), Selection)


def _collect(side: Side, arguments: Sequence[str], of_base: Path) -> Selection:
    """Collect the tests that BASE selects on this machine, without a GPU.

    It selects by the gate's arguments and its files.
    """
    file = of_base.with_name("collected.json")
    processes = Processes(
        {BASE: side},
        [*arguments, "--collect-only", "--gpumem-device=sim"],
        {**os.environ, SELECTION: str(file)},
        tree=working_tree(Path.cwd()),
    )
    try:
        with closing(processes):
            process = processes.run(Turn(1, BASE), None)
        if process.error is not None:
            raise RunError(f"{process.name} {process.error}")
        return _selection(file)
    except RunError as error:
        raise NoAnswer(f"BASE: its tests cannot be collected: {error}") from None
    except (OSError, ValueError, SchemaError):
        raise NoAnswer(
            f"BASE: {side.title} has another version of pytest-gpumem, which does not say what it "
            "selects"
        ) from None


def _name_in_junit(nodeid: str) -> tuple[str, str]:
    """The class and the name by which pytest's JUnit file knows a test."""
    path, bracket, parameters = nodeid.partition("[")
    file, *names = path.split("::")
    words = [file.replace("/", ".").removesuffix(".py"), *names]
    return ".".join(words[:-1]), f"{words[-1]}{bracket}{parameters}"


def _read_junit(
    junit: Path, selection: Selection | None
) -> tuple[dict[str, str], dict[str, Place]]:
    """The failures of a JUnit file, and where its tests are defined, by node id."""
    nodeids = {}
    if selection is not None:
        for nodeid in (*selection.tests, *selection.others):
            nodeids[_name_in_junit(nodeid)] = nodeid
    failures: dict[str, str] = {}
    places = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = case.get("classname", ""), case.get("name", "")
        nodeid = nodeids.get(name, "::".join(part for part in name if part))
        file, line = case.get("file"), case.get("line")
        if name in nodeids and file is not None and line is not None:
            places[nodeid] = place_of(_root_of(file), file, int(line) + 1)
        for failed in (*case.findall("failure"), *case.findall("error")):
            lines = (failed.get("message") or failed.text or "").strip().splitlines()
            message = _OF_PYTEST.sub(r"\1", lines[0]) if lines else "failed"
            failures.setdefault(nodeid, message)
    return failures, places


def _root_of(file: str) -> Path:
    """pytest's root folder, which paths are relative to: this folder or one above."""
    folder = Path.cwd()
    for root in (folder, *folder.parents):
        if (root / file).exists():
            return root
    return folder
