"""Imported by the server that forks: `quick_plugins`."""

from __future__ import annotations

from importlib import metadata

import pytest_benchmark.plugin
import pytest_benchmark.session
import quick_plugins

quick_plugins.load_plugins()
quick_plugins.remember()
pytest_benchmark.plugin.get_cpu_info()
pytest_benchmark.session.get_machine_id()
for one in metadata.distributions():
    one.entry_points, one.files, one.metadata  # noqa: B018
