"""Bytecode of the package and of Hypothesis, also where PYTHONDONTWRITEBYTECODE keeps Python from writing it.

Without it each of the hundreds of processes that the tests start compiles the package again, and each worker rewrites the assertions of
all plugins again.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest_gpumem


def compile_package() -> None:
    """Compile what has changed, for the processes that tests start."""
    compileall.compile_dir(Path(pytest_gpumem.__file__).parent, quiet=2)


@contextmanager
def written() -> Iterator[None]:
    """What is imported within is compiled once, and not by each worker of each run."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
