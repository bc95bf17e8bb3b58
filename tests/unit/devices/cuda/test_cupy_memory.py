"""CuPy's hook in each thread of a process. Without a GPU nothing allocates: the hook is called as a pool does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cupy")

from cupy.cuda.memory_hook import get_memory_hooks

from pytest_gpumem.devices.cuda.guests.cupy_memory import CupyMemory
from pytest_gpumem.devices.memory_events import MemoryLog

MIB = 2**20


def allocates(address: int) -> None:
    """As a pool does in the thread that calls."""
    for hook in get_memory_hooks().values():
        hook.malloc_postprocess(device_id=0, size=MIB, mem_size=MIB, mem_ptr=address, pmem_id=1)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def source() -> Iterator[CupyMemory]:
    made = CupyMemory(0)
    yield made
    made.stop()


def test_a_profiler_of_threads_goes_on(source: CupyMemory) -> None:
    seen: list[str] = []

    def profiles(frame: Any, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    def work() -> None:
        seen.append(str(sys.getprofile() is profiles))

    threading.setprofile(profiles)
    try:
        source.start(MemoryLog(), lines=False)
        in_a_thread(work)
        source.stop()
        assert threading.getprofile() is profiles
    finally:
        threading.setprofile(None)
    assert {"work", "True"} <= set(seen)
    source.start(MemoryLog(), lines=False)
    in_a_thread(lambda: seen.append(str(sys.getprofile())))
    assert seen[-1] == "None"
