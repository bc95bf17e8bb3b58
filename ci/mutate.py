"""Mutants of the package find code that only the tests of features that end guard.

    python ci/mutate.py --leaving patterns.txt --executed executed --json mutants.json
    python ci/mutate.py --again mutants.json --json mutants.json     # after tests were written

Each line of `patterns.txt` is a regular expression for the beginning of node ids: the tests that leave. A first run notes which test
executes which line; `--executed` keeps the notes. A module gets up to `--number` mutants, on lines that leaving tests execute inside the
process of pytest. A mutant runs against the tests of its own room that execute its line, and one that survives against the leaving tests.
If one of these kills it, a test is missing, and the other tests that stay run too. The package is imported once; each mutant is a forked
process in which functions have changed code. Constants of modules and code that runs in other interpreters stay as they are. Needs
`coverage` and Python 3.11.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import re
import select
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pytest_gpumem"
ROOMS = ("judging", "baselines", "runs", "memory", "records", "plugin")
SKIPPED = re.compile(
    r"tests/unit/(ci|docs|kernels|packaging|units)/|tests/plugin/test_(suite_can_fail|five_minutes)\.py"
)
"""Tests that guard none of these rooms: they run only if they leave."""
SWAPPED = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
]
SWAPPED += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd)]
CHANGED: dict[type[ast.AST], type[Any]] = {
    one: other for pair in SWAPPED for one, other in (pair, pair[::-1])
}
CHANGED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
Live = dict[tuple[str, str, int], list[FunctionType]]
"""The functions of this process by file, qualified name and first line."""
Executed = tuple[dict[str, dict[int, list[str]]], dict[str, float]]
"""By module, the passing tests that execute a line; and the seconds of each test."""


@dataclass
class Mutant:
    function: str
    line: int
    was: str
    becomes: str
    patches: list[tuple[FunctionType, str, object]]
    """Functions, with an attribute and its value in the mutant."""


def constant(node: ast.AST | None) -> ast.Constant | None:
    """Another number or truth value."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return ast.Constant(not value)
    return (
        ast.Constant(value + 1)
        if isinstance(value, int)
        else ast.Constant(value * 1.5 + 1)
        if isinstance(value, float)
        else None
    )


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    if isinstance(node, ast.Compare):
        for place, one in enumerate(node.ops):
            yield ast.Compare(
                node.left,
                [*node.ops[:place], CHANGED[type(one)](), *node.ops[place + 1 :]],
                node.comparators,
            )
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(CHANGED[type(node.op)](), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in CHANGED:
        yield ast.BinOp(node.left, CHANGED[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif number := constant(node):
        yield number
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        other = copy.copy(node)
        other.test = ast.UnaryOp(ast.Not(), node.test)
        yield other
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stored = isinstance(node, ast.Assign) and all(
        isinstance(one, (ast.Attribute, ast.Subscript)) for one in node.targets
    )
    if called or stored or isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)):
        yield ast.Pass()


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, without functions inside of functions."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.ClassDef):
            yield from functions(one, f"{prefix}{one.name}.")
        elif isinstance(one, ast.FunctionDef):
            yield prefix + one.name, one


def shown(node: ast.AST) -> str:
    """The code of a node, or its first line."""
    if isinstance(node, ast.comprehension):
        return " ".join(f"if {ast.unparse(one)}" for one in node.ifs)
    return ast.unparse(node).split("\n")[0]


def codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """The code of each function below, by its qualified name and first line."""
    found = {} if code.co_name.startswith("<") else {(code.co_qualname, code.co_firstlineno): code}
    return {
        key: one
        for inner in code.co_consts
        if isinstance(inner, CodeType)
        for key, one in codes(inner).items()
    } | found


def slots(node: ast.AST) -> Iterator[tuple[Any, Any]]:
    """A container and the key of each node below, annotations left out."""
    for field, value in ast.iter_fields(node):
        here: list[tuple[Any, Any]] = (
            [(value, place) for place in range(len(value))]
            if isinstance(value, list)
            else [(vars(node), field)]
        )
        for container, key in here:
            if isinstance(child := container[key], ast.AST) and field not in (
                "annotation",
                "returns",
            ):
                yield container, key
                yield from slots(child)


def mutants(path: Path, live: Live) -> Iterator[Mutant]:
    """All mutants of the functions of a module."""
    tree = ast.parse(path.read_text())
    before = codes(compile(tree, str(path), "exec"))
    for name, function in functions(tree):
        present = [
            one for key, found in live.items() if key[:2] == (str(path), name) for one in found
        ]
        first = function.body[1 if ast.get_docstring(function) and function.body[1:] else 0].lineno
        for place, value in enumerate(function.args.defaults):
            if other := constant(value):
                tuples = [
                    (
                        one,
                        (*(old := one.__defaults__ or ())[:place], other.value, *old[place + 1 :]),
                    )
                    for one in present
                ]
                yield Mutant(
                    name,
                    first,
                    f"default {shown(value)}",
                    shown(other),
                    [(one, "__defaults__", new) for one, new in tuples],
                )
        for argument, given in zip(
            function.args.kwonlyargs, function.args.kw_defaults, strict=True
        ):
            if given and (other := constant(given)):
                patches = [
                    (
                        one,
                        "__kwdefaults__",
                        {**(one.__kwdefaults__ or {}), argument.arg: other.value},
                    )
                    for one in present
                ]
                yield Mutant(
                    name, first, f"{argument.arg}={shown(given)}", shown(other), [*patches]
                )
        for container, key in slots(ast.Module(function.body, [])):
            for new in replacements(node := container[key]):
                container[key] = ast.fix_missing_locations(ast.copy_location(new, node))
                with suppress(SyntaxError, ValueError, TypeError):
                    after = {
                        key: code
                        for key, code in codes(compile(tree, str(path), "exec")).items()
                        if code != before.get(key)
                    }
                    found = [
                        (one, code)
                        for key, code in after.items()
                        for one in live.get((str(path), *key), ())
                    ]
                    if found and all(
                        one.__code__.co_freevars == code.co_freevars for one, code in found
                    ):
                        line = (node.target if isinstance(node, ast.comprehension) else node).lineno
                        yield Mutant(
                            name,
                            line,
                            shown(node),
                            shown(new),
                            [(one, "__code__", code) for one, code in found],
                        )
                container[key] = node


class Tracing:
    """A plugin that notes which test executes which line."""

    def __init__(self, paths: Sequence[Path], leaving: re.Pattern[str]) -> None:
        from coverage import Coverage

        self.coverage = Coverage(data_file=None, include=[*map(str, paths)], config_file=False)
        self.paths, self.leaving = paths, leaving
        self.seconds = Counter[str]()
        self.bad = set[str]()
        self.coverage.start()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            one for one in items if self.leaving.match(one.nodeid) or not SKIPPED.match(one.nodeid)
        ]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]
        if not report.passed:
            self.bad.add(report.nodeid)

    def executed(self) -> Executed:
        self.coverage.stop()
        good, data = {*self.seconds} - self.bad, self.coverage.get_data()
        found = {
            module(path): {
                line: [*good & {*by}] for line, by in data.contexts_by_lineno(str(path)).items()
            }
            for path in self.paths
        }
        return found, dict(self.seconds)


class Forking:
    """A plugin that runs `work` in place of the tests once they are collected, which may run some of them with a mutant."""

    def __init__(self, work: Callable[[Forking], None]) -> None:
        self.work = work
        self.items: dict[str, pytest.Item] = {}
        self.live: Live = defaultdict(list)
        self.sound: dict[str, bool] = {}  # tests that pass without a mutant
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {one.nodeid: one for one in session.items}
        gc.unfreeze()
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                self.live[
                    one.__code__.co_filename, one.__code__.co_qualname, one.__code__.co_firstlineno
                ].append(one)
        gc.freeze()
        self.work(self)
        return True

    def run(self, tests: Sequence[str], mutant: Mutant | None, seconds: float) -> str | None:
        """The first of these tests that fails, or what became of the process; None if all pass."""
        items = [self.items[one] for one in tests]
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.setsid()
                for descriptor in range(3):
                    os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
                for function, attribute, value in mutant.patches if mutant else ():
                    setattr(function, attribute, value)
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self.failed:
                        os.write(writes, item.nodeid.encode())
                        break
                os.write(writes, b"\n")
            finally:
                os._exit(0)
        os.close(writes)
        ended = select.select([process := os.pidfd_open(child)], [], [], seconds)[0]
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what it started
        os.waitpid(child, 0)
        os.close(process)
        os.set_blocking(reads, False)
        with open(reads, "rb") as pipe:
            answer = (pipe.read() or b"").decode()
        return (
            answer.strip() or None
            if answer.endswith("\n")
            else "ended early"
            if ended
            else "time-out"
        )

    def killer(self, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float]) -> str | None:
        """The test that kills a mutant, or how its process ended. A test that fails without it too does not count."""
        while tests := [one for one in tests if self.sound.get(one, True)]:
            by = self.run(tests, mutant, 20 + 8 * sum(map(seconds.__getitem__, tests)))
            if by not in self.items or self.sound.get(by):
                return by
            self.sound[by] = self.run([by], None, 20 + 8 * seconds[by]) is None
        return None


def module(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def some(
    tests: Sequence[str],
    seconds: dict[str, float],
    most: int,
    left: float,
    name: str,
    draw: random.Random,
) -> list[str]:
    """At most so many tests, and `left` seconds of them: those of files that share a word with the module first, else at random."""
    chosen: list[str] = []
    for one in sorted(
        draw.sample(sorted(tests), len(tests)),
        key=lambda test: not {*name.split("_")} & {*re.findall("[a-z0-9]+", test.split("::")[0])},
    ):
        if len(chosen) < most and seconds[one] <= left:
            chosen.append(one)
            left -= seconds[one]
    return sorted(chosen, key=seconds.__getitem__)


def tried(
    forking: Forking,
    path: Path,
    mutant: Mutant,
    tests: Sequence[str],
    seconds: dict[str, float],
    leaving: re.Pattern[str],
    scale: int = 1,
) -> dict[str, Any]:
    """A mutant as the record has it, with what kills it."""
    room = path.parent.name
    own = (
        ("tests/unit/plugin_parts/", "tests/plugin/") if room == "plugin" else f"tests/unit/{room}/"
    )
    staying = [one for one in tests if not leaving.match(one)]
    draw = random.Random(f"{module(path)} {mutant.was}")
    entry: dict[str, Any] = {
        "function": mutant.function,
        "line": mutant.line,
        "was": mutant.was,
        "becomes": mutant.becomes,
    }
    for kind, chosen, most in (
        ("own", [one for one in staying if one.startswith(own)], 12 if room == "plugin" else 60),
        ("leaving", [one for one in tests if leaving.match(one)], 20),
        ("others", [one for one in staying if not one.startswith(own)], 40),
    ):
        entry[kind] = forking.killer(
            mutant, some(chosen, seconds, most * scale, 6.0 * scale, path.stem, draw), seconds
        )
        if (kind == "own") == (entry[kind] is not None):
            break
    return entry


COLUMNS: dict[str, Callable[[dict[str, Any]], int]] = {
    "mutants": lambda one: one["mutants"],
    "own tests": lambda one: one["own"],
    "leaving tests": lambda one: len(one["unguarded"]),
    "these alone": lambda one: sum(mutant["others"] is None for mutant in one["unguarded"]),
    "own now": lambda one: sum(mutant.get("now") is not None for mutant in one["unguarded"]),
    "code gone": lambda one: sum(mutant.get("ended", False) for mutant in one["unguarded"]),
    "neither": lambda one: one["mutants"] - one["own"] - len(one["unguarded"]),
}


def table(record: dict[str, Any]) -> str:
    """By what the mutants of each module are killed; of those that leaving tests kill, how many own tests kill now."""
    figures = {
        name: [of(one) for of in COLUMNS.values()]
        for name, one in record["modules"].items()
        if one["mutants"]
    }
    figures["all"] = [sum(column) for column in zip(*figures.values(), strict=True)]
    heads = [f"{'module':<24}" + "".join(f"{name:>15}" for name in COLUMNS)]
    return "\n".join(
        heads
        + [
            f"{name:<24}" + "".join(f"{number:>15}" for number in numbers)
            for name, numbers in figures.items()
        ]
    )


def session(plugin: object, tests: Sequence[str]) -> None:
    os.chdir(ROOT)
    pytest.main(["-q", "-s", "-p", "no:cacheprovider", "--hypothesis-seed=1", *tests], [plugin])


def traced(paths: Sequence[Path], leaving: re.Pattern[str], tests: Sequence[str]) -> Executed:
    session(plugin := Tracing(paths, leaving), tests)
    return plugin.executed()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="such as judging/screen.py (default: all of six rooms)",
    )
    parser.add_argument(
        "--leaving",
        type=Path,
        metavar="FILE",
        help="the patterns; modules that end stand behind a minus sign",
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="RECORD",
        help="try those mutants again that leaving tests killed",
    )
    parser.add_argument(
        "--executed",
        type=Path,
        metavar="FILE",
        help="which test executes which line: read if it is there, else written",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=["tests/unit", "tests/plugin"],
        metavar="PATH",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--number", type=int, default=24, help="mutants of a module (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    from record_file import write_record  # which imports the package

    asked = parser.parse_args()
    again = asked.again and json.loads(asked.again.read_text())
    record: dict[str, Any] = again or {
        "kind": "mutate",
        "leaving": asked.leaving.read_text().splitlines(),
        "modules": {},
    }
    patterns = [one for one in record["leaving"] if not one.startswith("-")]
    leaving = re.compile("(?!)" if again else "|".join(patterns))  # later code has none that leave
    known = [
        module(one)
        for room in ROOMS
        for one in sorted((PACKAGE / room).glob("*.py"))
        if one.name != "__init__.py"
    ]
    paths = [PACKAGE / one for one in asked.modules or known if f"-{one}" not in record["leaving"]]
    if again:
        record["before"] = again.get("before", again["taken_at"])
        for name, found in again["modules"].items():
            for entry in found["unguarded"] if not (PACKAGE / name).exists() else ():
                entry["ended"] = True
        paths = [
            path
            for path in paths
            if path.exists() and again["modules"].get(module(path), {}).get("unguarded")
        ]
    if asked.executed and asked.executed.exists():
        lines, seconds = pickle.loads(asked.executed.read_bytes())
    else:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            lines, seconds = pool.submit(traced, paths, leaving, asked.tests).result()
        if asked.executed:
            asked.executed.write_bytes(pickle.dumps((lines, seconds)))

    def work(forking: Forking) -> None:
        for path in paths:
            executed, name = lines[module(path)], module(path)
            found = [*mutants(path, forking.live)]
            if again:
                for entry in again["modules"][name]["unguarded"]:
                    same = [
                        one
                        for one in found
                        if (one.function, one.was, one.becomes)
                        == (entry["function"], entry["was"], entry["becomes"])
                    ]
                    entry["ended"] = not same
                    if same:
                        one = min(same, key=lambda one: abs(one.line - entry["line"]))
                        entry["now"] = tried(
                            forking,
                            path,
                            one,
                            executed.get(one.line, ()),
                            seconds,
                            leaving,
                            scale=10,
                        )["own"]
            else:
                random.Random(name).shuffle(found)
                by_line = defaultdict[int, list[Mutant]](list)
                for one in found:
                    if any(map(leaving.match, executed.get(one.line, ()))):
                        by_line[one.line].append(one)
                turns = itertools.zip_longest(
                    *by_line.values()
                )  # one mutant of each line, then the next ones
                chosen = [one for turn in turns for one in turn if one][: asked.number]
                entries = [
                    tried(forking, path, one, executed[one.line], seconds, leaving)
                    for one in chosen
                ]
                own, unguarded = (
                    sum(one["own"] is not None for one in entries),
                    [one for one in entries if one.get("leaving")],
                )
                record["modules"][name] = {
                    "mutants": len(entries),
                    "own": own,
                    "unguarded": unguarded,
                }
            print(
                table({"modules": {name: record["modules"][name]}})
                .splitlines()[-1]
                .replace("all", name),
                flush=True,
            )
            for entry in record["modules"][name]["unguarded"]:
                if not entry.get("now") and not entry.get("ended"):
                    print("   ", *entry.values(), sep=" | ", flush=True)
            if asked.json:
                write_record(asked.json, record, indent=1)

    for path in paths:  # now, so that their functions are there
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    session(Forking(work), sorted({test.split("::")[0] for test in seconds}))
    print(table(record))


if __name__ == "__main__":
    main()
