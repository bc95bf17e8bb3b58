"""The entry point: options, the marker, and the switch.

pytest imports it in every session of everyone who has the plugin installed. Without `--gpumem`
nothing else of the package is imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from pytest_gpumem.limits import OF_LAUNCH
from pytest_gpumem.options import MARKER_KEYWORDS, NEEDS_RESULTS, OPTIONS
from pytest_gpumem.plugin.marks import (
    MARKER,
    NEEDS_GPUMEM,
    SESSION_PLUGIN,
    TEST_FIXTURE,
    keywords_of,
    measures,
    uses,
)
from pytest_gpumem.settings import (
    BASE_SELECTION,
    Settings,
    SettingsError,
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
            # None, of flags too: the environment and the ini file decide.
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
    # Read again in pytest_configure: plugins change options until then.
    settings = _settings(config)
    if settings.enabled and (settings.isolate or BASE_SELECTION in os.environ):
        from pytest_gpumem.plugin.workers import isolate

        isolate(config, settings)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}({', '.join(f'{name}=None' for name in MARKER_KEYWORDS)}): "
        "limits and plan of a test's GPU measurements.",
    )
    settings = _settings(config)
    if settings.enabled:
        from pytest_gpumem.collector import uncollected

        with uncollected():
            from pytest_gpumem.plugin.start import start
            from pytest_gpumem.printable import printable

            try:
                start(config, settings)
            except pytest.UsageError as error:
                from pytest_gpumem.plugin.workers import Refusal, is_part

                why = printable(str(error))  # it names files, which may be called anything
                if not is_part(config):
                    raise pytest.UsageError(why) from None
                config.pluginmanager.register(Refusal(config, why), "gpumem-refusal")
        return
    off = switched_off(os.environ)
    idle = []
    for option in OPTIONS:
        if option.name in off or getattr(config.option, option.key, None) in (None, False):
            continue
        if option.name in NEEDS_RESULTS:
            raise pytest.UsageError(
                f"gpumem: {option.flag} without --gpumem: nothing would be measured, and the run "
                "would be green"
            )
        idle.append(option.flag)
    config.stash[IDLE] = idle


@pytest.hookimpl(wrapper=True)
def pytest_report_header(config: pytest.Config) -> Generator[None, list[object], list[object]]:
    lines = yield
    outputs = config.pluginmanager.getplugin("gpumem-outputs")
    if outputs is not None:
        return [*outputs.header(lines)]
    idle = config.stash.get(IDLE, [])
    if idle:
        without = f"which leaves {', '.join(idle)} without effect"
        lines.append(f"gpumem: off, {without}; --gpumem turns it on")
    return lines


def _settings(config: pytest.Config) -> Settings:
    overrides = [text.partition("=")[0].strip() for text in config.option.override_ini or ()]
    command_line = {}
    # A private method of pytest 8 and 9: it finds misspelt keys.
    ini = dict.fromkeys(getattr(config, "_get_unknown_ini_keys", list)())
    try:
        for option in OPTIONS:
            command_line[option.key] = getattr(config.option, option.key, None)
            ini[option.key] = config.getini(option.key)
        return resolve(
            command_line,
            os.environ,
            ini,
            config.inipath.name if config.inipath else "the ini file",
            overrides,
        )
    except SettingsError as error:
        raise pytest.UsageError(f"gpumem: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    collected = list(items)
    expectations = config.pluginmanager.getplugin("gpumem-expectations")
    if expectations is not None:
        expectations.note(collected)
    result = yield
    # Mistakes in deselected tests are named too, and markers that a conftest adds count.
    _check_markers(config, list(dict.fromkeys([*collected, *items])), items)
    return result


def _check_markers(
    config: pytest.Config, collected: list[pytest.Item], items: list[pytest.Item]
) -> None:
    """Skip tests that need the plugin where it is off, and refuse mistakes in markers."""
    off = not config.pluginmanager.hasplugin(SESSION_PLUGIN)
    mistakes: dict[str, str] = {}
    for item in collected:
        of_item = _mistake(item)
        if of_item is not None:
            mistakes[item.nodeid] = of_item
    seen: set[str] = set()
    for item in items:
        if not uses(item, TEST_FIXTURE):
            continue
        if off and item.nodeid not in mistakes:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPUMEM), append=False)
        elif not off and item.nodeid in seen:
            mistakes[item.nodeid] = (
                "it is collected twice, and the second measurement would replace the first; "
                "collect it once"
            )
        seen.add(item.nodeid)
    if not mistakes:
        return
    from pytest_gpumem.plugin.workers import is_part
    from pytest_gpumem.printable import printable

    # A worker that raises dies without a word. Without measurements the other tests run.
    if not off and not is_part(config):
        tests: dict[str, list[str]] = {}
        for nodeid, mistake in mistakes.items():
            tests.setdefault(mistake, []).append(nodeid)
        lines = []
        for mistake, nodeids in tests.items():
            others = f" and {len(nodeids) - 1} more" if len(nodeids) > 1 else ""
            lines.append(f"gpumem: {nodeids[0]}{others}: {mistake}")
        raise pytest.UsageError("\n".join(printable(lines)))
    for item in items:
        if item.nodeid in mistakes:
            # It fails instead of the setup of its fixtures, and no mark skips it or expects it.
            why = f"gpumem: {mistakes[item.nodeid]}"
            vars(item)["setup"] = partial(pytest.fail, why, pytrace=False)
            vars(item)["iter_markers"] = lambda name=None: iter(())


def _mistake(item: pytest.Item) -> str | None:
    if item.get_closest_marker(MARKER) is None:
        return None
    try:
        keywords = keywords_of(item)
        limits = marker_limits(keywords)
        of_test(Settings(), keywords)
    except SettingsError as error:
        return str(error)
    for name in OF_LAUNCH:
        if getattr(limits, name) is not None and not measures(item):
            return (
                f"marker: {name} {getattr(limits, name)} limits one launch of a measurement, and "
                "the test measures nothing"
            )
    return None
