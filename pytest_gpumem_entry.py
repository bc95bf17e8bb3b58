"""The entry point of the pytest plugin: imports `pytest_gpumem.plugin.hooks` past pytest's
rewriting of assertions.

Rewriting compiles the whole package a second time, and leaves byte code that pip does not remove:
the folder that stays behind hides a later editable install. This module lies outside of the
package, whose first module would be rewritten before it could act.
"""

from __future__ import annotations

import sys

from _pytest.assertion.rewrite import AssertionRewritingHook

for finder in sys.meta_path:
    if isinstance(finder, AssertionRewritingHook):
        getattr(finder, "_must_rewrite", set()).discard(
            "pytest_gpumem"
        )  # of pytest 8 and 9; a pytest without it rewrites the package

from pytest_gpumem.plugin import hooks as hooks  # noqa: E402
