"""Count the code and print the figures side by side for several checkouts of this repository.

    python ci/house.py ../before .                    # one column for each checkout; by default this one
    python ci/house.py --functions 10 --seed 17       # besides, functions drawn at random: the room that each name suggests, and its room
    python ci/house.py --importers                    # besides, the modules with exactly one importer

Only files that git tracks count. One simulated test runs by the Python of the checkout's `.venv`, or by this Python. It enters a module
when it calls one of the module's functions; imports do not count. The files that an addition touches are those that
docs/architecture.md lists. The room that a name suggests is the one whose other names have its words most often (naive Bayes).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
PHASES = {
    "call": "modules entered by one measurement (call phase)",
    "save": "modules entered by a save (below `save`)",
    "summary": "modules entered by the table (terminal summary)",
}


def tracked(root: Path, pattern: str) -> list[Path]:
    """The files that git tracks and that exist, by pathspec."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z", pattern], capture_output=True, text=True, check=True).stdout
    return [root / name for name in sorted(listed.split("\0")) if name and (root / name).is_file()]


def total(split: Callable[[str], list[str]], root: Path, pattern: str) -> int:
    """The lines (`str.splitlines`) or words (`str.split`) of files."""
    return sum(len(split(path.read_text())) for path in tracked(root, pattern))


def modules(root: Path) -> dict[str, ast.Module]:
    """The parsed modules of the package by dotted name."""
    found = {}
    for path in tracked(root, f"{PACKAGE}/**.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def has_code(tree: ast.Module) -> bool:
    """True if there is more in a module than a docstring and `from __future__` imports."""
    documented = ast.get_docstring(tree) is not None
    return any(not (isinstance(one, ast.ImportFrom) and one.module == "__future__") for one in tree.body[documented:])


def imported(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return {one for one in found if one in known} - {name}


def functions(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """The qualified names of a module's functions and methods, without special methods and functions inside of functions."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.ClassDef):
            yield from functions(one, f"{prefix}{one.name}.")
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and not one.name.startswith("__"):
            yield f"{prefix}{one.name}"


def room(module: str) -> str:
    """The folder of the package that a module is in, or the module itself."""
    return module.split(".")[1] if "." in module else PACKAGE


def counted(root: Path) -> dict[str, int]:
    """Figures of the files as they are."""
    trees = modules(root)
    code = {name: tree for name, tree in trees.items() if has_code(tree)}
    return {
        "modules with code": len(code),
        "rooms": len({room(name) for name in code if name.count(".") > 1}),
        "lines of the package": total(str.splitlines, root, f"{PACKAGE}/**.py"),
        "lines of tests": total(str.splitlines, root, "tests/**.py"),
        "lines of ci": total(str.splitlines, root, "ci/**.py"),
        "scripts in ci/bench": sum("__main__" in path.read_text() for path in tracked(root, "ci/bench/*.py")),
        "words of the README": total(str.split, root, "README.md"),
        "words of docs": total(str.split, root, "docs/**.md"),
        "modules with exactly one importer": len(single_importers(root)),
    }


def single_importers(root: Path) -> dict[str, str]:
    """The modules that exactly one module imports, with that one."""
    trees = modules(root)
    importers = defaultdict[str, list[str]](list)
    for name, tree in trees.items():
        for target in imported(name, tree, trees) if has_code(tree) else ():
            importers[target].append(name)
    return {name: importers[name][0] for name, tree in trees.items() if has_code(tree) and len(importers[name]) == 1}


def additions(root: Path) -> dict[str, str]:
    """By the headings "Add a ..." of docs/architecture.md, the files that their steps name; those that are needed in some cases apart."""
    page = root / "docs" / "architecture.md"
    found = {}
    for heading, steps in re.findall(r"^## (Add [^\n]+)\n+((?:\d+\. .*\n)+)", page.read_text() if page.exists() else "", re.MULTILINE):
        always, sometimes = 0, 0
        for step in steps.splitlines():
            files = max(1, len(re.findall(r"`[\w./]+\.(?:py|cu)`", step)) - step.count("` or `"))
            always, sometimes = (always, sometimes + files) if ", if " in step else (always + files, sometimes)
        found[f"files touched to {heading[0].lower()}{heading[1:]}"] = f"{always}" + (f" to {always + sometimes}" if sometimes else "")
    return found


def words(name: str) -> list[str]:
    """The words of a qualified name: "CudaL2.set_window" has cuda, l2, set and window."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*", name)]


def suggestions(every: Sequence[tuple[str, str]]) -> list[str]:
    """For each function, given with its module, the room whose other modules most likely have a name of these words."""
    of_modules, of_rooms = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for name, module in every:
        of_modules[module].update(words(name))
        of_rooms[room(module)].update(words(name))

    vocabulary = len({word for known in of_rooms.values() for word in known})

    def likelihood(one: str, name: str, module: str) -> float:
        known, own = of_rooms[one], of_modules[module] if room(module) == one else Counter[str]()
        total = known.total() - own.total() + vocabulary
        return sum(math.log((known[word] - own[word] + 1) / total) for word in words(name))

    return [max(sorted(of_rooms), key=lambda one: likelihood(one, name, module)) for name, module in every]


class Entered:
    """A pytest plugin that notes which modules are entered in a phase of the session."""

    def __init__(self, root: Path) -> None:
        self._folder = f"{root / PACKAGE}{os.sep}"
        self._phase = ""
        self._importing = self._saving = 0
        self.found: dict[str, set[str]] = defaultdict(set)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code, step = frame.f_code, {"call": 1, "return": -1}.get(event, 0)
        if code.co_name == "<module>":
            self._importing += step
        elif step and not self._importing and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(self._folder):
            if code.co_name.strip("_") == "save":
                self._saving += step
            self.found["save" if self._saving else self._phase].add(code.co_filename)

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before, self._phase = self._phase, phase
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            self._phase = before
            if not before:
                sys.setprofile(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[Any]:
        with self._during("call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[Any]:
        with self._during("finish"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Iterator[Any]:
        with self._during("summary"):
            return (yield)


def trace(root: Path) -> int:
    """Run one simulated test in this process and this folder; print as JSON how many modules each phase entered."""
    entered = Entered(root)
    Path("test_one.py").write_text(TEST)
    options = f"-c {os.devnull} --rootdir=. -p no:cacheprovider --gpumem --gpumem-device=sim --gpumem-save --gpumem-baseline=baseline"
    code = pytest.main([*options.split(), "test_one.py"], plugins=[entered])
    print("", json.dumps({phase: len(entered.found[phase]) for phase in PHASES}), sep="\n")
    return int(code)


def traced(root: Path) -> dict[str, int]:
    """Figures of a run."""
    python = root / ".venv" / "bin" / "python"
    command = [str(python) if python.exists() else sys.executable, str(Path(__file__).resolve()), "--trace", str(root)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GPUMEM_", "CI"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{root}: the simulated test failed:\n{done.stdout}{done.stderr}")
    return {PHASES[phase]: count for phase, count in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]], help="default: that of this script")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="draw N functions of each checkout")
    parser.add_argument("--seed", type=int, default=17, help="of the drawn functions (default 17)")
    parser.add_argument("--importers", action="store_true", help="list the modules with exactly one importer")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.trace:
        return trace(asked.checkouts[0])
    roots = [path.resolve() for path in asked.checkouts]
    columns = [{name: f"{value:,}" for name, value in (counted(root) | traced(root)).items()} | additions(root) for root in roots]
    for figure in dict.fromkeys(figure for column in reversed(columns) for figure in column):
        print(f"{figure:<48}", *(f"{column.get(figure, '-'):>9}" for column in columns))
    for root in roots if asked.importers else ():
        print(f"\n{root.name}\n{'module':<40}imported by")
        for name, importer in single_importers(root).items():
            print(f"{name.removeprefix(f'{PACKAGE}.'):<40}{importer.removeprefix(f'{PACKAGE}.')}")
    for root in roots if asked.functions else ():
        every = sorted((name, module) for module, tree in modules(root).items() if module.count(".") > 1 for name in functions(tree))
        found = [(name, suggests, module) for (name, module), suggests in zip(every, suggestions(every), strict=True)]
        print(f"\n{root.name}: {asked.functions} of {len(every)} functions, seed {asked.seed}")
        print(f"{'function':<44}{'suggests':<14}{'room':<14}module")
        for name, suggests, module in random.Random(asked.seed).sample(found, asked.functions):
            print(f"{name:<44}{suggests:<14}{room(module):<14}{module.removeprefix(f'{PACKAGE}.')}")
        right = sum(suggests == room(module) for _, suggests, module in found)
        print(f"{right / len(every):.0%} of all names suggest the room that they are in")
    return 0


if __name__ == "__main__":
    sys.exit(main())
