"""Bytecode of the package, of pytest's plugins and of Hypothesis, also where PYTHONDONTWRITEBYTECODE keeps Python from writing it.

Without it each of the hundreds of processes that the tests start compiles the package again, and rewrites the assertions of all plugins
again, which is a seventh of its time.
"""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_benchmark

import pytest_gpumem


def compile_package() -> None:
    """Compile what has changed, for the processes that tests start."""
    compileall.compile_dir(Path(pytest_gpumem.__file__).parent, quiet=2)
    kept = Path(pytest_benchmark.__file__).parent / "__pycache__"
    if not list(
        kept.glob(f"plugin.*-pytest-{pytest.__version__}.pyc")
    ):  # pytest alone makes them, of the plugins that it imports
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        subprocess.run(
            [sys.executable, "-m", "pytest", "--help"],
            env=environment,
            capture_output=True,
            check=False,
        )


@contextmanager
def written() -> Iterator[None]:
    """What is imported within is compiled once, and not by each worker of each run."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
