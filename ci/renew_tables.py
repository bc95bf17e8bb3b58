"""Draw the tables in Markdown files anew, from recorded runs and from scripts.

    python ci/renew_tables.py README.md docs/*.md

A marker stands on a line of its own before a ```text block, which is replaced:

    <!-- record: FILE -->               the device, the day and the table of a run, from pytest-benchmark JSON below the repository, or
                                        from the record of a script of ci/bench; a line that says so where there is none yet
    <!-- record: FILE of NODEID -->     only the rows of a run whose node id begins so, or
    <!-- record: FILE without NODEID -->    all others
    <!-- summary: FILE -->              the end of that session: the rows with a limit or a doubt, and the counts
    <!-- texts: FILE -->                its figures that belong to the experiments of CUDA's guides and other texts; of a record of
                                        l2_persistence.py those of two windows at once
    <!-- output: FILE -->               what a script of this repository prints
    <!-- session: NAME -->              a session of ci/docs_sessions.py

What stands between two others is a table of the reference (ci/docs_reference.py):

    <!-- generated: NAME -->
    <!-- end of generated -->
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from docs_reference import TABLES
from msgspec.structs import replace
from texts_table import lines, of_two_windows

from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import document_from_json
from pytest_gpumem.reporting.conclusion import counts_text
from pytest_gpumem.reporting.table import table
from pytest_gpumem.reporting.terminal import wrapped

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
KINDS = "record|summary|texts|output|session"
BLOCK = re.compile(
    rf"(<!-- ({KINDS}): (\S+)(?: (of|without) (\S+))? -->\n```text\n).*?^```$",
    re.DOTALL | re.MULTILINE,
)
END = "<!-- end of generated -->"
GENERATED = re.compile(rf"^(<!-- generated: (\S+) -->)$.*?^{END}$", re.DOTALL | re.MULTILINE)


def record(name: str, which: str | None = None, nodeid: str = "", *, short: bool = False) -> str:
    """The device, the day and the table of a recorded run; of the rows whose node id begins with `nodeid`, or ("without") of the others.

    `short`: the summary of these rows in place of their table.
    """
    if not (ROOT / name).exists():
        return f"not recorded yet: {name}"
    run = json.loads((ROOT / name).read_text())
    if "kind" in run:
        first, _, rest = bench_table(run, short=short).partition("\n")
        return "\n".join([first, *flawed(flaws(run)), rest])
    document = document_from_json(of_today(run["gpumem"]))
    device = document.device
    head = f"{device.name}, driver {device.driver}, {run['datetime'][:10]}"
    rows = [
        _without_limits(row)
        for row in document.rows
        if which is None or row.nodeid.startswith(nodeid) == (which == "of")
    ]
    shown = rows
    if short:
        shown = [row for row in rows if row.verdict.outcome is not Outcome.MEASURED]
    lines = table(shown, device, width=WIDTH, colour=False).splitlines()
    drawn = "\n".join([*lines, *wrapped(counts_text(rows), WIDTH)])
    return "\n".join(
        [head, *flawed(flaws(run, {row.nodeid: row.failed for row in rows})), "", drawn]
    )


def texts(name: str, *_: str | None) -> str:
    """The device, the day and the revision of a recorded run, and its figures that belong to the texts' experiments."""
    run = json.loads((ROOT / name).read_text())
    if "kind" in run:
        head = f"{run['device']['name']}, driver {run['device']['driver']}, {run['ended'][:10]}"
        return "\n".join(
            [
                head,
                *flawed(flaws(run)),
                "",
                *of_two_windows(run["streams"], run["device"]["l2_bytes"]),
            ]
        )
    document = document_from_json(of_today(run["gpumem"]))
    head = f"{document.device.name}, driver {document.device.driver}, {run['datetime'][:10]}, revision {run['commit_info']['id'][:12]}"
    found = flaws(run, {row.nodeid: row.failed for row in document.rows})
    return "\n".join([head, *flawed(found), "", *lines(document.rows, document.device)])


def flawed(found: Sequence[str]) -> list[str]:
    """The line below the head of a table that says what its record lacks; none for a sound one."""
    return wrapped(f"provisional: {'; '.join(found)}", WIDTH) if found else []


def flaws(run: Mapping[str, Any], tests: Mapping[str, bool] = MappingProxyType({})) -> list[str]:
    """What keeps a record from being evidence for today's code, in words: no clean revision of this repository, a failed test, or a test
    that has changed since, or a fixture, a function or a constant that it reaches.
    `tests`: node ids of the tests that are drawn, and whether each failed.
    """
    commit = run.get("commit_info", {})
    revision = commit.get("id") or run.get("taken_at", {}).get("revision")
    if not revision:
        return ["of no recorded revision"]
    name, _, dirty = revision.partition("-")
    found = [f"of {name[:12]} with uncommitted changes"] if dirty or commit.get("dirty") else []
    if (
        _git("merge-base", "--is-ancestor", name, "HEAD") is None
    ):  # a clone may hold commits that no branch has
        return [*found, f"{name[:12]} is not in this repository's history"]
    if failed := sum(tests.values()):
        found.append(f"{failed} of {len(tests)} tests failed")
    if any(_source(nodeid, name) != _source(nodeid) for nodeid in tests):
        found.append("tests have changed since")
    return found


def _git(*words: str) -> str | None:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


@cache
def _definitions(path: str, revision: str | None) -> dict[str, ast.stmt]:
    """What a module defines, by name, without docstrings; of a commit, or of the working tree."""
    file = ROOT / path
    text = (
        _git("show", f"{revision}:{path}")
        if revision
        else file.read_text()
        if file.exists()
        else None
    )
    found: dict[str, ast.stmt] = {}
    for one in ast.parse(text or "").body:
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            one.body = one.body[1:] if ast.get_docstring(one) is not None else one.body
            found[one.name] = one
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {
                part.id: one
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
    return found


@cache
def _source(nodeid: str, revision: str | None = None) -> dict[str, str]:
    """The function of a test, and the fixtures, functions and constants of its module and of the `conftest.py` beside it that it reaches.
    Without layout, comments and docstrings."""
    path, _, test = nodeid.partition("::")
    defined = _definitions(f"{path.rpartition('/')[0]}/conftest.py", revision) | _definitions(
        path, revision
    )
    found: dict[str, str] = {}
    names = [test.partition("[")[0], "pytestmark"]
    while names:
        if (name := names.pop()) not in found and name in defined:
            found[name] = ast.dump(defined[name])
            for part in ast.walk(defined[name]):
                # Fixtures are arguments, or strings of `usefixtures`.
                names += [
                    str(getattr(part, key))
                    for key in ("id", "arg", "value")
                    if isinstance(getattr(part, key, None), str)
                ]
    return found


NAMES = {
    "traffic": "moved_bytes",
    "max_syncs": "max_waits",
    "syncs": "waits",
}
FIELDS = {
    "limits": Limits.__struct_encode_fields__,
    "measurement": Measurement.__struct_encode_fields__,
}
"""By key of a record, the fields of today; older records have others too."""
OF_A_COMPARISON = {"delta": "change", "low": "change_low", "high": "change_high"}
"""Keys of older records, and what they are called now."""


ENDED = (
    "activity",
    "why",
    "allocated",
    "sizes",
)  # keys of older records that no record has any more


def of_today(
    value: Any, names: Mapping[str, str] = NAMES, fields: Sequence[str] | None = None
) -> Any:
    """Return the values of a record with the keys of today. `fields`: those that a record of today has; None: any."""
    if isinstance(value, list):
        return [of_today(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, one in value.items():
        name = names.get(key, key)
        if key not in ENDED and (fields is None or name in fields):
            found[name] = of_today(
                one, OF_A_COMPARISON if key == "comparison" else NAMES, FIELDS.get(name)
            )
    return found


def _without_limits(row: Row) -> Row:
    """The row without notes; MEASURED if it has no limit, which older records call PASS."""
    if row.measurement is not None:
        row = replace(row, measurement=replace(row.measurement, notes=()))
    judged = row.verdict.outcome is not Outcome.PASS or any(
        getattr(row.limits, name) is not None for name in LIMITS
    )
    return row if judged else replace(row, verdict=replace(row.verdict, outcome=Outcome.MEASURED))


def bench_table(run: dict[str, Any], *, short: bool = False) -> str:
    """The table of a record that a script of ci/bench wrote; or its summary, if the script has one."""
    # These scripts are no package; the folder goes on the path only where one of their records is drawn.
    sys.path.insert(0, str(ROOT / "ci" / "bench"))
    module = importlib.import_module(run["kind"])
    draw = getattr(module, "summary", module.table) if short else module.table
    return str(draw(run))


def output(name: str, *_: str | None) -> str:
    """The output of a script."""
    return subprocess.run(
        [sys.executable, ROOT / name], capture_output=True, text=True, check=True
    ).stdout.rstrip()


def session(name: str, *_: str | None) -> str:
    """A session on the simulated device."""
    return subprocess.run(
        [sys.executable, ROOT / "ci" / "docs_sessions.py", name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip()


def renewed(text: str) -> str:
    """Markdown with every marked block drawn anew."""
    draw: dict[str, Callable[..., str]] = {
        "record": record,
        "summary": partial(record, short=True),
        "texts": texts,
        "output": output,
        "session": session,
    }
    text = BLOCK.sub(
        lambda block: f"{block[1]}{draw[block[2]](block[3], block[4], block[5])}\n```", text
    )
    return generated(text)


def generated(text: str) -> str:
    """Markdown with the tables of the reference.

    Raises:
        KeyError: a marker names no table.
    """
    return GENERATED.sub(lambda found: f"{found[1]}\n\n{TABLES[found[2]]()}\n\n{END}", text)


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
