"""Pairs of base and head with a planted cause, for `explain_proof.py --cases MODULE.py`.

A module of cases has a list `CASES` at its top level; each entry is a tuple

    (name, base, head)  or  (name, base, head, planted)

name      short text of letters, digits and underscores, unique in the module
base      function without arguments: imports what it needs (CuPy, PyTorch, Triton), makes its arrays, and returns a function without
          arguments that queues one launch's work on the current stream. It is called in a fresh process, with a GPU, once.
head      the same of the slower variant. Give `base` itself for a pair in which nothing changed.
planted   what was planted: a name of a rule (`gpumem explain --rules` lists them), "unexplained" for a cause
          outside the rules, "" for a pair in which nothing changed; several rules of a combined cause as a tuple, either of which may be
          named first. Left out: the explanation is shown and kept, and not held to anything.

    def base():
        import cupy
        x = cupy.ones(1 << 26, "f4")
        return lambda: cupy.multiply(x, 2, out=x)

Module, base and head are imported in both variants' processes: nothing may touch the GPU while the module is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Factory = Callable[[], Callable[[], object]]


class BadCases(ValueError):
    """A module that is none of cases: one line that names it and what is wrong."""


@dataclass(frozen=True)
class Pair:
    """One entry of `CASES`."""

    name: str
    base: Factory
    head: Factory
    planted: tuple[str, ...] | None
    """Rules of which one is to be named first; empty where nothing changed; None where nothing is held to."""


def load(path: Path) -> tuple[Pair, ...]:
    """The cases of a module.

    Raises:
        BadCases: it cannot be imported, or its list is none of cases.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadCases(f"{path}: no Python module")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadCases(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    cases = getattr(module, "CASES", None)
    if not isinstance(cases, (list, tuple)) or not cases:
        raise BadCases(f"{path} has no list CASES of (name, base, head) or (name, base, head, planted)")
    pairs = tuple(_pair(path, index, case) for index, case in enumerate(cases))
    if len({pair.name for pair in pairs}) < len(pairs):
        raise BadCases(f"{path}: two cases of one name among {', '.join(pair.name for pair in pairs)}")
    return pairs


def _pair(path: Path, index: int, case: object) -> Pair:
    if not isinstance(case, (list, tuple)) or len(case) not in (3, 4):
        raise BadCases(f"{path}: CASES[{index}] is {case!r}; accepted is (name, base, head) or (name, base, head, planted)")
    name, base, head, *planted = case
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name, re.ASCII):
        raise BadCases(f"{path}: CASES[{index}]: name {name!r}; accepted are letters, digits and underscores")
    if not callable(base) or not callable(head):
        raise BadCases(f"{path}: CASES[{index}]: base and head of {name} are functions without arguments")
    if not planted:
        return Pair(name, base, head, None)
    given = (planted[0],) if isinstance(planted[0], str) else tuple(planted[0])
    return Pair(name, base, head, tuple(one for one in given if one))
