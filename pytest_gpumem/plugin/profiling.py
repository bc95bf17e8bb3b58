"""Options for commands that run tests under a profiler and load this module with `-p`: select
tests, write the names of their ranges.

With `--gpumem-ranges-file` the session only collects tests and writes the file; it needs no device.
PYTEST_DONT_REWRITE: as in `pytest_gpumem`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.experiment_process import selected
from pytest_gpumem.plugin.marks import uses
from pytest_gpumem.ranges import Names


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpumem profile", "part of the command gpumem profile")
    group.addoption(
        "--gpumem-ranges-file",
        metavar="FILE",
        default=None,
        help="Only collect, and write each test and its range's name.",
    )
    group.addoption(
        "--gpumem-only",
        metavar="NODEID",
        action="append",
        default=[],
        help="Run this test and no other; repeatable.",
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin reads its settings
def pytest_configure(config: pytest.Config) -> None:
    if config.option.gpumem_ranges_file is not None:
        config.option.gpumem = False  # or the plugin looks for a device


@pytest.hookimpl(trylast=True)  # after -k, -m and other plugins have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.gpumem_only:
        kept = selected(items, config.option.gpumem_only, config.invocation_params.dir)
        dropped = [item for item in items if item not in kept]
        items[:] = dict.fromkeys(kept)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
    if config.option.gpumem_ranges_file is not None:
        names = Names(item.nodeid for item in items)
        ranges = []
        for item in items:
            managed = uses(item, "managed_buffer") or uses(item, "prefetched_buffer")
            name = names.unique(item.nodeid)
            ranges.append({"nodeid": item.nodeid, "name": name, "managed": managed})
        write_whole(Path(config.option.gpumem_ranges_file), json.dumps(ranges))
