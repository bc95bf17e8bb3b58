"""What every session of pytest on this machine loads and asks, once: the plugins that are installed, their metadata, the processor.

The server that forks processes imports this module, so that they have it; the tests' own process does so for the sessions inside it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import suppress
from importlib import metadata
from types import ModuleType

from _pytest.config import default_plugins

PLUGINS = (
    "_hypothesis_pytestplugin",
    "hypothesis.configuration",
    "pytest_benchmark.plugin",
    "pytest_benchmark.session",
    "pytest_benchmark.storage.file",
    "pytest_benchmark.table",
    "pytest_cov.plugin",
    "pytest_rerunfailures",
    "pytest_split.plugin",
    "pytest_timeout",
    "xdist.looponfail",
    "xdist.newhooks",
    "xdist.plugin",
)


def load_plugins() -> None:
    """Import the plugins. pytest would warn that it cannot rewrite their assertions any more."""
    before = {*sys.modules}
    for name in PLUGINS:
        with suppress(ImportError):
            importlib.import_module(name)
    for name in {*sys.modules} - before:
        module = sys.modules[name]
        module.__doc__ = f"{module.__doc__ or ''} PYTEST_DONT_REWRITE"


def _shorten(module: ModuleType) -> None:
    """Have `dir` give the names alone that pytest looks for in a plugin: it looks at every other one too, twice in every session."""
    names = [
        name
        for name, value in vars(module).items()
        if name.startswith("pytest_")
        or type(value).__name__ == "FixtureFunctionDefinition"
        or hasattr(value, "_pytestfixturefunction")
    ]
    module.__dir__ = lambda: names  # type: ignore[method-assign]


def remember() -> None:
    """Ask once. pytest reads the metadata of all that is installed; pytest-benchmark asks programs for the processor and the machine."""
    for name in {*(f"_pytest.{name}" for name in default_plugins), *PLUGINS} & {*sys.modules}:
        _shorten(sys.modules[name])
    installed, found = [*metadata.distributions()], metadata.distributions
    metadata.distributions = lambda **sought: found(**sought) if sought else iter(installed)
    for name in ("entry_points", "files", "metadata"):
        setattr(
            metadata.PathDistribution,
            name,
            once := functools.cached_property(vars(metadata.Distribution)[name].fget),
        )
        once.__set_name__(metadata.PathDistribution, name)
    import pytest_benchmark.plugin
    import pytest_benchmark.session

    pytest_benchmark.plugin.get_cpu_info = functools.cache(pytest_benchmark.plugin.get_cpu_info)
    pytest_benchmark.session.get_machine_id = functools.cache(
        pytest_benchmark.session.get_machine_id
    )
    pytest_benchmark.plugin.get_tag = lambda: "tag"
