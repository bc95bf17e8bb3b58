"""The entry point: options, the marker, and the switch. Without `--gpumem` nothing else of the package is imported.

pytest imports this module in every session of everyone who has the plugin installed. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from pytest_gpumem.limits import OF_LAUNCH
from pytest_gpumem.options import MARKER_KEYWORDS, OPTIONS
from pytest_gpumem.plugin.marks import (
    MARKER,
    NEEDS_GPUMEM,
    SESSION_PLUGIN,
    TEST_FIXTURE,
    marks_of,
    measures,
    uses,
)
from pytest_gpumem.settings import (
    BASE_SELECTION,
    Settings,
    SettingsError,
    marker_keywords,
    marker_limits,
    of_test,
    resolve,
    switched_off,
)

pytest_plugins = ["pytest_gpumem.plugin.fixtures"]

IDLE: pytest.StashKey[list[str]] = pytest.StashKey()
"""Options given on the command line while the plugin is off."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpumem", "GPU memory performance")
    for option in OPTIONS:
        text = option.help.replace("%%", "%")
        if not option.ini_only:
            action = "store_true" if option.is_flag else "store"
            more: dict[str, Any] = {} if option.is_flag else {"metavar": option.metavar}
            if option.bare is not None:
                more |= {"nargs": "?", "const": option.bare}
            # Everything defaults to None, flags too: without a value here, the environment and the ini file decide.
            group.addoption(
                option.flag,
                dest=option.key,
                action=action,
                default=None,
                help=text.replace("%", "%%"),
                **more,
            )
        parser.addini(option.key, text, type="string", default=None)


@pytest.hookimpl(wrapper=True)  # before other plugins read their options
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    settings = _settings(
        config
    )  # pytest_configure reads them again: plugins change options until then
    in_a_gate = BASE_SELECTION in os.environ
    if settings.enabled and (settings.isolate or in_a_gate):
        from pytest_gpumem.plugin.isolation import isolate

        isolate(config, settings, asked=settings.isolate)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}({', '.join(f'{name}=None' for name in MARKER_KEYWORDS)}): limits and plan of a test's GPU measurements.",
    )
    settings = _settings(config)
    if settings.enabled:
        from pytest_gpumem.collector import uncollected
        from pytest_gpumem.devices.opening import asked

        with uncollected(), asked(settings.device) as answer:
            from pytest_gpumem.plugin.session import start
            from pytest_gpumem.printable import printable

            try:
                start(config, settings, answer)
            except pytest.UsageError as error:
                from pytest_gpumem.plugin.workers import Refusal, is_part

                refused = pytest.UsageError(
                    printable(str(error))
                )  # it names files, which may be called anything
                if not is_part(config):
                    raise refused from None
                config.pluginmanager.register(Refusal(config, refused), "gpumem-refusal")
        return
    off = switched_off(os.environ)
    idle = [
        option
        for option in OPTIONS
        if option.name not in off and getattr(config.option, option.key, None) not in (None, False)
    ]
    if unfulfilled := [option.flag for option in idle if option.needs_results]:
        raise pytest.UsageError(
            f"gpumem: {', '.join(unfulfilled)} without --gpumem: nothing would be measured, and the run would be green"
        )
    config.stash[IDLE] = [option.flag for option in idle]


def pytest_report_header(config: pytest.Config) -> list[str]:
    idle = config.stash.get(IDLE, [])
    return (
        [f"gpumem: off, which leaves {', '.join(idle)} without effect; --gpumem turns it on"]
        if idle
        else []
    )


def _settings(config: pytest.Config) -> Settings:
    command_line = {}
    ini = {}
    try:
        for option in OPTIONS:
            command_line[option.key] = getattr(config.option, option.key, None)
            ini[option.key] = config.getini(option.key)
        return resolve(
            command_line,
            os.environ,
            ini,
            config.inipath.name if config.inipath else "the ini file",
            [text.partition("=")[0].strip() for text in config.option.override_ini or ()],
        )
    except SettingsError as error:
        raise pytest.UsageError(f"gpumem: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    collected = list(items)
    result = yield
    # A test that a conftest deselects has its mistake named too, as one that -k deselects, and a marker that a conftest adds counts.
    _check_markers(config, list(dict.fromkeys([*collected, *items])), items)
    return result


def _check_markers(
    config: pytest.Config, collected: list[pytest.Item], items: list[pytest.Item]
) -> None:
    """Skip the tests that need the plugin where it is off, and refuse the session for mistakes in markers, or fail their tests.
    `collected`: with what was deselected.
    """
    off = not config.pluginmanager.hasplugin(SESSION_PLUGIN)
    skip = pytest.mark.skip(reason=NEEDS_GPUMEM)
    mistakes: dict[str, str] = {}
    seen: set[str] = set()
    for item in collected:
        if item.get_closest_marker(MARKER) is not None and (mistake := _mistake(item)):
            mistakes[item.nodeid] = mistake
    for item in items:
        if uses(item, TEST_FIXTURE):
            if off and item.nodeid not in mistakes:
                item.add_marker(skip, append=False)
            elif not off and item.nodeid in seen:
                mistakes[item.nodeid] = (
                    "it is collected twice, and the second measurement would replace the first; collect it once"
                )
            seen.add(item.nodeid)
    if mistakes:
        from pytest_gpumem.plugin.workers import is_part
        from pytest_gpumem.printable import printable

        # A worker that raises here dies without a word to the user. A session that measures nothing runs its other tests.
        if off or is_part(config):
            for item in items:
                if (
                    item.nodeid in mistakes
                ):  # its setup is that of no fixture, and no mark skips it or expects its failure
                    vars(item)["setup"] = partial(
                        pytest.fail, f"gpumem: {mistakes[item.nodeid]}", pytrace=False
                    )
                    vars(item)["iter_markers"] = lambda name=None: iter(())
            return
        tests: dict[
            tuple[str, str], list[str]
        ] = {}  # those of one function with the same mistake are one
        for nodeid, mistake in mistakes.items():
            tests.setdefault((nodeid.partition("[")[0], mistake), []).append(nodeid)
        lines = [
            f"gpumem: {nodeids[0]}{f' and {len(nodeids) - 1} more of it' if nodeids[1:] else ''}: {mistake}"
            for (_, mistake), nodeids in list(tests.items())[:MOST_MISTAKES]
        ]
        if (more := len(tests) - len(lines)) > 0:
            lines.append(
                f"gpumem: {more} further {'test' if more == 1 else 'tests'} with such a mistake"
            )
        raise pytest.UsageError("\n".join(printable(lines)))


MOST_MISTAKES = 10  # of markers, that are listed


def _mistake(item: pytest.Item) -> str | None:
    """The mistake in a test's markers; None if there is none."""
    try:
        keywords = marker_keywords(marks_of(item))
        limits = marker_limits(keywords)
        of_test(Settings(), keywords)
    except SettingsError as error:
        return str(error)
    of_launch = [name for name in OF_LAUNCH if getattr(limits, name) is not None]
    if of_launch and not measures(item):
        return f"marker: {of_launch[0]} {getattr(limits, of_launch[0])} limits one launch of a measurement, and the test measures nothing"
    return None
