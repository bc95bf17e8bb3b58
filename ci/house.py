"""Measure the house: its size, its surface, and how far its features reach. Several checkouts of this repository stand side by side.

    python ci/house.py ../before .                    # one column for each checkout; by default this one

Only files that git tracks count. The package's size is that of `ruff format --line-length 100`, so that long lines do not make it smaller.
One simulated test runs by the Python of the checkout's `.venv`, or by this Python; it enters a module when it calls one of the module's
functions, imports do not count. The files that an addition touches are those of past commits: the median over the latest commits that
added such a thing, files of the package and of `kernels` only. A function makes a verdict if it calls `Verdict`, or replaces the verdict,
the outcome or the code of something.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGE = "pytest_gpumem"
TEST = """
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 16, "f4"), device_buffer(1 << 16, "f4"))
"""
SESSION_NAMES = (
    "session",
    "gpu",
    "_session",
    "_gpu",
)  # how the package's modules call the session's state
VERDICT_FIELDS = {"verdict", "outcome", "code"}
LATEST = 5  # commits of each kind of addition that are looked at
ADDITIONS = {
    "kernel": ("kernels/*.cu", None),
    "limit": (
        f"{PACKAGE}/limits.py",
        re.compile(r'^\+\s+"\w+": Limit\(|^\+\s+Limit\($|^\+\s+Limit\("', re.MULTILINE),
    ),
    "output": (
        f"{PACKAGE}/reporting/outputs.py",
        re.compile(r"^\+\s+Output\(|^\+\s+\"\w+\": ", re.MULTILINE),
    ),
    "command": (f"{PACKAGE}/commands/*.py", None),
    "cause": (f"{PACKAGE}/explain/rules_*.py", re.compile(r"^\+\s+Rule\(", re.MULTILINE)),
}
"""By what is added: the files that show it, and the added line; None: a new file."""
NOT_PROSE = re.compile(
    r"^<!-- generated: .*?^<!-- end of generated -->$|^```.*?^```$", re.DOTALL | re.MULTILINE
)
"""Of a page: tables that code writes, and blocks of code and output."""
SURFACE = """
import json, click
from pytest_gpumem.cli import main
from pytest_gpumem.settings import OPTIONS
def leaves(command):
    return [one for sub in command.commands.values() for one in leaves(sub)] if isinstance(command, click.Group) else [command]
every = leaves(main)
given = [one for leaf in every for one in leaf.params if isinstance(one, click.Option)]
options = sum(not getattr(one, "ini_only", False) for one in OPTIONS)
print(json.dumps([len(main.commands), len(every), len(given), options, len(OPTIONS) - options]))
"""


def git(root: Path, *arguments: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        errors="replace",
    ).stdout


def tracked(root: Path, pattern: str) -> list[Path]:
    """The files that git tracks and that exist, by pathspec."""
    listed = git(root, "ls-files", "-z", pattern)
    return [root / name for name in sorted(listed.split("\0")) if name and (root / name).is_file()]


def python_of(root: Path) -> str:
    """The Python of a checkout's virtual environment, else this one."""
    own = root / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def modules(root: Path) -> dict[str, str]:
    """The text of each module of the package by dotted name."""
    found = {}
    for path in tracked(root, f"{PACKAGE}/**.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def has_code(tree: ast.Module) -> bool:
    """True if there is more in a module than a docstring and `from __future__` imports."""
    documented = ast.get_docstring(tree) is not None
    return any(
        not (isinstance(one, ast.ImportFrom) and one.module == "__future__")
        for one in tree.body[documented:]
    )


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of a module, with those inside of functions."""
    for one in ast.walk(node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield one


def makes_a_verdict(function: ast.AST) -> bool:
    """True if a function constructs a verdict, or replaces one or a part of one."""
    for one in ast.walk(function):
        if isinstance(one, ast.Call):
            name = (
                one.func.attr
                if isinstance(one.func, ast.Attribute)
                else getattr(one.func, "id", "")
            )
            if name == "Verdict" or (
                name == "replace" and VERDICT_FIELDS & {keyword.arg for keyword in one.keywords}
            ):
                return True
    return False


def flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """The targets of an assignment, with those inside of tuples."""
    for one in targets:
        yield from flat(one.elts) if isinstance(one, (ast.Tuple, ast.List)) else [one]


def session_fields(trees: dict[str, ast.Module]) -> tuple[set[str], set[str]]:
    """The attributes of the session's state, and those of them that modules other than its own assign."""
    home, fields = next(
        (
            (name, one)
            for name, tree in trees.items()
            for one in tree.body
            if isinstance(one, ast.ClassDef) and one.name == "GpuSession"
        ),
        ("", None),
    )
    targets = defaultdict[str, set[str]](set)
    for name, tree in trees.items():
        if name.rpartition(".")[0] != home.rpartition(".")[0]:
            continue  # what other rooms call a session is another one
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                for target in flat(node.targets if isinstance(node, ast.Assign) else [node.target]):
                    if isinstance(target, ast.Attribute):
                        owner = (
                            target.value.attr
                            if isinstance(target.value, ast.Attribute)
                            else getattr(target.value, "id", "")
                        )
                        targets[
                            "own"
                            if owner == "self" and name == home
                            else name
                            if owner in SESSION_NAMES
                            else ""
                        ].add(target.attr)
    if fields is None:
        return set(), set()
    own = {
        target.attr
        for node in ast.walk(fields)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
    }
    return own, {
        attribute
        for name, found in targets.items()
        if name not in ("", "own", home)
        for attribute in found & own
    }


def counted(root: Path) -> dict[str, int | float]:
    """Figures of the files as they are."""
    texts = modules(root)
    trees = {name: tree for name, text in texts.items() if has_code(tree := ast.parse(text))}
    classes = Counter(
        one.name
        for tree in trees.values()
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef)
    )
    own, foreign = session_fields(trees)
    return {
        "package, MB at 100 columns": round(formatted_bytes(root) / 1e6, 2),
        "modules": len(trees),
        "hooks": sum(
            one.name.startswith("pytest_")
            for name, tree in trees.items()
            if ".plugin." in name
            for one in functions(tree)
        ),
        "hooks with tryfirst or trylast": sum(
            len(re.findall(r"try(?:first|last)=True", text)) for text in texts.values()
        ),
        "implementations of pytest_sessionfinish": sum(
            one.name == "pytest_sessionfinish" for tree in trees.values() for one in functions(tree)
        ),
        "attributes of the session's state": len(own),
        "of these assigned from outside": len(foreign),
        "functions that make or replace a verdict": sum(
            makes_a_verdict(one) for tree in trees.values() for one in functions(tree)
        ),
        "modules that know of xdist": mentioning(
            texts, r"xdist|is_worker|is_controller|workerinput|workeroutput"
        ),
        "modules that know of simulated": mentioning(texts, "simulated"),
        "functions of complexity above 20": sum(
            complexity(one) > 20 for tree in trees.values() for one in functions(tree)
        ),
        "class names used for different things": sum(count > 1 for count in classes.values()),
        "modules outside its own that know of l2-sweep": mentioning(
            {name: text for name, text in texts.items() if "l2_sweep" not in name},
            r"(?i)l2[_-]?sweep",
        ),
        "tests, MB": round(
            sum(path.stat().st_size for path in tracked(root, "tests/**.py")) / 1e6, 2
        ),
        "scripts in ci/bench": sum(
            "__main__" in path.read_text() for path in tracked(root, "ci/bench/*.py")
        ),
        "words of the README": sum(
            len(path.read_text().split()) for path in tracked(root, "README.md")
        ),
        "words of docs": sum(len(path.read_text().split()) for path in tracked(root, "docs/**.md")),
        "of these written by hand, without code": sum(
            words_by_hand(path.read_text()) for path in tracked(root, "docs/**.md")
        ),
    }


def words_by_hand(page: str) -> int:
    """Number of words of a page that somebody wrote, blocks of code left out."""
    return len(NOT_PROSE.sub("", page).split())


def mentioning(texts: dict[str, str], pattern: str) -> int:
    """Number of modules whose text has a pattern."""
    return sum(re.search(pattern, text) is not None for text in texts.values())


def ruff(*arguments: str, folder: Path) -> str:
    """What ruff prints, by this Python's own."""
    own = Path(sysconfig.get_path("scripts")) / "ruff"
    command = str(own) if own.exists() else shutil.which("ruff") or "ruff"
    return subprocess.run(
        [command, *arguments], cwd=folder, capture_output=True, text=True, check=False
    ).stdout


def formatted_bytes(root: Path) -> int:
    """Bytes of the package as ruff formats it with lines of 100 columns."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, PACKAGE)
        for path in tracked(root, f"{PACKAGE}/**.py"):
            target = copy / path.relative_to(root / PACKAGE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        ruff(
            "format",
            "--isolated",
            "--no-cache",
            "--target-version=py310",
            "--line-length=100",
            ".",
            folder=copy,
        )
        return sum(path.stat().st_size for path in copy.rglob("*.py"))


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity of a function: one, and one for each branch, loop, handler, assertion, further operand of `and` and `or`,
    comprehension and condition in it (as radon counts it)."""
    count = 1
    for one in ast.walk(function):
        if isinstance(
            one,
            (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert),
        ):
            count += 1
        elif isinstance(one, ast.BoolOp):
            count += len(one.values) - 1
        elif isinstance(one, ast.comprehension):
            count += 1 + len(one.ifs)
        elif isinstance(one, ast.Match):
            count += len(one.cases)
    return count


def additions(root: Path) -> dict[str, str]:
    """The files of the package that past commits touched to add a kernel, a limit, an output, a command or a cause, as a median."""
    found = {}
    for kind, (pathspec, line) in ADDITIONS.items():
        touched = list[int]()
        options = ["--diff-filter=A"] if line is None else ["-p", "--diff-filter=M"]
        for entry in git(
            root, "log", "--no-merges", "-n200", *options, "--format=%x01%H", "--", pathspec
        ).split("\x01")[1:]:
            revision, _, diff = entry.partition("\n")
            if line is None or line.search(diff):
                names = git(
                    root, "show", "--name-only", "--format=", revision, "--", PACKAGE, "kernels"
                ).split()
                touched.append(len(names))
            if len(touched) == LATEST:
                break
        found[f"files touched to add a {kind} (median of {LATEST})"] = (
            f"{statistics.median(touched):g}" if touched else "-"
        )
    return found


class Entered:
    """A pytest plugin that notes which modules of the package are entered in the call phase of a test."""

    def __init__(self, root: Path) -> None:
        self._folder = f"{root / PACKAGE}{os.sep}"
        self._importing = 0
        self.found: set[str] = set()

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code, step = frame.f_code, {"call": 1, "return": -1}.get(event, 0)
        if code.co_name == "<module>":
            self._importing += step
        elif (
            step
            and not self._importing
            and code.co_flags & inspect.CO_OPTIMIZED
            and code.co_filename.startswith(self._folder)
        ):
            self.found.add(code.co_filename)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[Any]:
        with self._watching():
            return (yield)


def trace(root: Path) -> int:
    """Run one simulated test in this process and this folder; print how many modules its call phase entered."""
    entered = Entered(root)
    Path("test_one.py").write_text(TEST)
    options = f"-c {os.devnull} --rootdir=. -p no:cacheprovider --gpumem --gpumem-device=sim --gpumem-save --gpumem-baseline=baseline"
    code = pytest.main([*options.split(), "test_one.py"], plugins=[entered])
    print(f"\n{len(entered.found)}")
    return int(code)


def run(root: Path) -> dict[str, int]:
    """Figures of what runs: the surface, and one measurement."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "GPUMEM_", "CI"))
    }
    environment["PYTHONPATH"] = str(root)

    def printed(*words: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [python_of(root), *words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            sys.exit(f"{root}: {words[-1]} failed:\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    names = (
        "commands",
        "leaves of commands",
        "sub-options of commands",
        "options of pytest",
        "settings of the ini file alone",
    )
    surface = dict(zip(names, printed("-c", SURFACE), strict=True))
    entered = printed(str(Path(__file__).resolve()), "--trace", str(root))
    return surface | {"modules entered by one measurement (call phase)": entered}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkouts",
        nargs="*",
        type=Path,
        default=[Path(__file__).parents[1]],
        help="default: that of this script",
    )
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trace:
        return trace(given.checkouts[0])
    roots = [path.resolve() for path in given.checkouts]
    columns = [
        {name: f"{value:,}" for name, value in (counted(root) | run(root)).items()}
        | additions(root)
        for root in roots
    ]
    for figure in dict.fromkeys(figure for column in reversed(columns) for figure in column):
        print(f"{figure:<56}", *(f"{column.get(figure, '-'):>9}" for column in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
