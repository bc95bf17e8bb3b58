"""The fixtures. Public ones depend on private ones only, so that a user's fixture of the same
name breaks nothing.

Read in every session, also with the plugin off: nothing heavy is imported at the top.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.plugin.marks import NEEDS_GPUMEM, SESSION_PLUGIN

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pytest_gpumem.devices.kinds import MemoryKind
    from pytest_gpumem.devices.protocol import Device
    from pytest_gpumem.measuring.bound import Kernels
    from pytest_gpumem.measuring.works import Work, Works
    from pytest_gpumem.memory.l2 import PersistingStream
    from pytest_gpumem.memory.spaces import Memory
    from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark, GpuTest
    from pytest_gpumem.plugin.gpu_memory import GpuMemory


@pytest.fixture
def _gpumem_test(request: pytest.FixtureRequest) -> Iterator[GpuTest]:
    if not request.config.pluginmanager.hasplugin(SESSION_PLUGIN):
        # Reached by getfixturevalue only: a test that names a fixture was skipped before.
        pytest.skip(NEEDS_GPUMEM)
    from pytest_gpumem.plugin.gpu_benchmark import GpuTest
    from pytest_gpumem.plugin.session import SESSION

    item, session = request.node, request.config.stash[SESSION]
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
    """Work for `gpu_benchmark(work)`: `copy`, `kernel`, `host`, `busy`, `allocating`, `in_turn`,
    `after`, `together`, `staged`."""
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
