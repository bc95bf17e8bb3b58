"""The entry point: options, the marker, the switch, and the fixtures.

pytest imports it in every session of everyone who has the plugin installed. Without `--gpumem`
nothing else of the package is imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pytest_gpumem.devices.memory_kinds import MemoryKind
    from pytest_gpumem.devices.protocol import Device
    from pytest_gpumem.measuring.bound import Kernels
    from pytest_gpumem.measuring.works import Work, Works
    from pytest_gpumem.memory.l2 import PersistingStream
    from pytest_gpumem.memory.spaces import Memory
    from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark, GpuTest
    from pytest_gpumem.plugin.gpu_memory import GpuMemory

IDLE: pytest.StashKey[list[str]] = pytest.StashKey()
"""Options given on the command line while the plugin is off."""
REFUSED: pytest.StashKey[str] = pytest.StashKey()
"""Why a worker cannot take part."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpumem", "GPU memory performance")
    for option in OPTIONS:
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
                help=option.help.replace("%", "%%"),
                **more,
            )
        parser.addini(option.key, option.help, type="string", default=None)


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
                why = printable(str(error))  # it names files, which may be called anything
                if not hasattr(config, "workerinput"):
                    raise pytest.UsageError(why) from None
                config.stash[REFUSED] = why  # xdist swallows a worker's usage error
        return
    off = switched_off(os.environ)
    idle = []
    for option in OPTIONS:
        if option.name in off or getattr(config.option, option.key, None) in (None, False):
            continue
        if option.name in NEEDS_RESULTS:
            raise pytest.UsageError(
                f"gpumem: {option.flag} without --gpumem: nothing would be measured"
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


def pytest_collection(session: pytest.Session) -> None:
    why = session.config.stash.get(REFUSED, None)
    if why is not None:
        from pytest_gpumem.plugin.workers import refuse

        refuse(session.config, why)


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
            mistakes[item.nodeid] = "it is collected twice, so its rows would replace each other"
        seen.add(item.nodeid)
    if not mistakes:
        return
    from pytest_gpumem.printable import printable

    # In a worker, which dies silently, or with the plugin off, only these tests fail.
    if not off and not hasattr(config, "workerinput"):
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
        limit = getattr(limits, name)
        if limit is not None and not measures(item):
            return (
                f"marker: {name} {limit} limits one launch of a measurement, and "
                "the test measures nothing"
            )
    return None


# The fixtures: public ones depend on private ones only, so that a user's fixture of the same name
# breaks nothing.


@pytest.fixture
def _gpumem_test(request: pytest.FixtureRequest) -> Iterator[GpuTest]:
    session = request.config.pluginmanager.getplugin(SESSION_PLUGIN)
    if session is None:
        # Reached by getfixturevalue only: a test that names a fixture was skipped before.
        pytest.skip(NEEDS_GPUMEM)
    from pytest_gpumem.plugin.gpu_benchmark import GpuTest

    item = request.node
    session.check_context(item)
    exclusive = request.config.pluginmanager.getplugin("gpumem-exclusive use")
    with exclusive.use(item), closing(GpuTest(item, session)) as test:
        yield test


@pytest.fixture
def _gpumem_benchmark(_gpumem_test: GpuTest, benchmark: Any) -> GpuBenchmark:
    from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark

    return GpuBenchmark(_gpumem_test, benchmark)


@pytest.fixture
def gpu_benchmark(_gpumem_benchmark: GpuBenchmark) -> GpuBenchmark:
    """Measures a kernel, a callable or a `Case`: `gpu_benchmark(f, *args)`,
    `gpu_benchmark.case(build)`."""
    return _gpumem_benchmark


@pytest.fixture
def _gpumem_watched(_gpumem_test: GpuTest) -> GpuMemory:
    from pytest_gpumem.plugin.gpu_memory import GpuMemory

    return GpuMemory(_gpumem_test.item)


@pytest.fixture
def gpu_memory(_gpumem_watched: GpuMemory) -> GpuMemory:
    """`with gpu_memory.watch("decode", max_kept="0 B") as used:` how much memory a part of the test
    takes: `used.peak`, `used.kept`."""
    return _gpumem_watched


@pytest.fixture
def gpu_device(_gpumem_test: GpuTest) -> Device:
    """The device under test: its `facts`, streams and conditions."""
    return _gpumem_test.device


@pytest.fixture
def gpu_kernels(_gpumem_test: GpuTest) -> Kernels:
    """The catalogue of kernels, bound to the device: `gpu_kernels.triad`."""
    return _gpumem_test.session.kernels


@pytest.fixture
def device_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`device_buffer(bytes_or_shape, dtype="f4", like=None)`: device memory."""
    return _gpumem_test.memory.device


@pytest.fixture
def pooled_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`pooled_buffer(bytes_or_shape, dtype="f4", like=None)`: device memory of the driver's
    stream-ordered pool."""
    return _gpumem_test.memory.pooled


@pytest.fixture
def managed_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`managed_buffer(bytes_or_shape, dtype="f4", first_touch="host", read_mostly=False,
    preferred_location=None, accessed_by=None, discard=False, like=None)`: managed memory that
    kernels fault in, with advice."""
    return _gpumem_test.memory.managed


@pytest.fixture
def prefetched_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`prefetched_buffer(bytes_or_shape, dtype="f4", read_mostly=False, preferred_location=None,
    accessed_by=None, like=None)`: managed memory, prefetched to the device before every sample."""
    return _gpumem_test.memory.prefetched


@pytest.fixture
def pinned_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`pinned_buffer(bytes_or_shape, dtype="f4", mapped=True, write_combined=False, portable=True,
    numa=None, like=None)`: page-locked host memory."""
    return _gpumem_test.memory.pinned


@pytest.fixture
def registered_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`registered_buffer(numpy_array)`: host memory that is page-locked in place until the test
    ends."""
    return _gpumem_test.memory.registered


@pytest.fixture
def pageable_buffer(_gpumem_test: GpuTest) -> Callable[..., Any]:
    """`pageable_buffer(bytes_or_shape_or_array, dtype="f4")`: ordinary host memory whose pages
    exist, to compare with."""
    return _gpumem_test.memory.pageable


@pytest.fixture
def _gpumem_peer_memory(_gpumem_test: GpuTest) -> Memory:
    return _gpumem_test.memory


@pytest.fixture
def peer_buffer(_gpumem_peer_memory: Memory) -> Callable[..., Any]:
    """`peer_buffer(bytes_or_shape, dtype="f4")`: memory of another GPU; skips where there is one
    GPU only. See `gpu_device.peer_access`."""
    return _gpumem_peer_memory.peer


@pytest.fixture
def memory_kind(_gpumem_test: GpuTest) -> Callable[[Any], MemoryKind | None]:
    """`memory_kind(address_or_buffer_or_array)`: "device", "managed", "pinned", "registered",
    "pageable", "peer", or None: no memory."""
    from pytest_gpumem.memory.spaces import memory_kind

    device = _gpumem_test.device
    return lambda pointer: memory_kind(device, pointer)


@pytest.fixture
def gpu_work(_gpumem_test: GpuTest) -> Works:
    """Work for `gpu_benchmark(work)`: `copy`, `kernel`, `host`, `allocating`, `in_turn`, `after`,
    `together`, `staged`."""
    return _gpumem_test.works


@pytest.fixture
def staged_copy(_gpumem_test: GpuTest) -> Callable[..., Work]:
    """`staged_copy(n_streams, bytes_or_shape, rounds=8, back=True)`: copy, kernel and copy back, in
    chunks over streams, for `gpu_benchmark`."""
    return _gpumem_test.works.staged


@pytest.fixture
def persisting_stream(
    _gpumem_test: GpuTest,
) -> Callable[..., AbstractContextManager[PersistingStream]]:
    """`with persisting_stream(buffer, hit_ratio="fit", set_aside="fit") as stream:` keeps a buffer
    in L2; all is restored on exit."""
    return _gpumem_test.persisting_stream
