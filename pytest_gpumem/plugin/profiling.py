"""Options for commands that run tests under a profiler and load this module with `-p`: select
tests, write the names of their ranges.

With `--gpumem-ranges-file` the session only collects tests and writes the file; it needs no device.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.marks import uses
from pytest_gpumem.ranges import Names

MANAGED_FIXTURES = (
    "managed_buffer",
    "prefetched_buffer",
)  # a test that uses one of these allocates managed memory


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
        config.option.gpumem = False  # off, the plugin looks for no device


@pytest.hookimpl(trylast=True)  # after -k, -m and other plugins have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.option.gpumem_only:
        kept = only(items, wanted, config.invocation_params.dir)
        dropped = [item for item in items if not any(item is one for one in kept)]
        items[:] = kept
        if dropped:
            config.hook.pytest_deselected(items=dropped)
    if config.option.gpumem_ranges_file is not None:
        _write_ranges(Path(config.option.gpumem_ranges_file), items)


def _write_ranges(file: Path, items: Sequence[pytest.Item]) -> None:
    names = Names(item.nodeid for item in items)
    found = [
        {
            "nodeid": item.nodeid,
            "name": names.unique(item.nodeid),
            "managed": any(uses(item, name) for name in MANAGED_FIXTURES),
        }
        for item in items
    ]
    write_whole(file, json.dumps(found))


def only(items: Iterable[pytest.Item], wanted: Sequence[str], folder: Path) -> list[pytest.Item]:
    """The items that node ids select, each once.
    `items`: the collected tests; a test that was named twice may occur twice.
    `wanted`: node ids as on pytest's command line: a file, a class or a function in it, with
    parameters or for all of them.
    `folder`: to which their files are relative.
    """
    chosen = [
        ((folder / file).resolve(), inside)
        for file, _, inside in (nodeid.partition("::") for nodeid in wanted)
    ]
    kept: dict[str, pytest.Item] = {}
    for item in items:
        inside = item.nodeid.partition("::")[2]
        if any(
            item.path.resolve() == file
            and (not part or inside == part or inside.startswith((f"{part}::", f"{part}[")))
            for file, part in chosen
        ):
            kept.setdefault(item.nodeid, item)
    return list(kept.values())
