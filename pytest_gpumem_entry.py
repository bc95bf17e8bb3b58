"""The entry point of the pytest plugin: imports `pytest_gpumem.plugin.hooks` past pytest's rewriting of assertions.

pytest rewrites the assertions of every module of a distribution that has a plugin. That compiles the whole package a second time, and
leaves byte code that pip does not remove: the folder that stays behind hides a later editable install. The package asserts nothing. This
module lies outside of it, because the package's own first module would be rewritten before it could act.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGE = "pytest_gpumem"


class _AsWritten:
    """Finds the package's modules as Python does, ahead of pytest's finder."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, path, target) if fullname.partition(".")[0] == PACKAGE else None


sys.meta_path.insert(0, _AsWritten)

from pytest_gpumem.plugin import hooks as hooks  # noqa: E402 - found by the finder above
