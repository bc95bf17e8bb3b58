"""The ballast of a memory limit, on a driver that is made up."""

from __future__ import annotations

from itertools import count

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem import GiB, MiB
from pytest_gpumem.devices.cuda import allocators
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.records.device import DeviceFacts

TOTAL, CONTEXT, OTHERS = 80 * GiB, 500 * MiB, 10 * GiB


class Driver:
    """A card that this process and others use."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.addresses = count(2**21, 2**21)

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802 - the runtime's name
        return TOTAL - CONTEXT - OTHERS - sum(self.held.values()), TOTAL

    def malloc(self, nbytes: int) -> int:
        address = next(self.addresses)
        self.held[address] = nbytes
        return address

    def free(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name in ("memGetInfo", "malloc", "free"):
        monkeypatch.setattr(f"cupy.cuda.runtime.{name}", getattr(made, name))
    monkeypatch.setattr(
        allocators.nvml, "bytes_of_this_process", lambda facts: CONTEXT + sum(made.held.values())
    )
    return made


@pytest.fixture
def memory(h100: DeviceFacts) -> CudaMemory:
    return CudaMemory(0, h100)


def test_the_driver_has_left_what_a_card_of_that_size_has(
    driver: Driver, memory: CudaMemory
) -> None:
    memory.limit(16 * GiB)
    assert 16 * GiB <= driver.memGetInfo()[0] + CONTEXT < 16 * GiB + 2 * MiB
    assert memory.in_use() == CONTEXT
    driver.malloc(3 * GiB)  # by any library
    assert memory.in_use() == CONTEXT + 3 * GiB
    assert memory.free_bytes(MemoryKind.DEVICE) < 13 * GiB
    memory.limit(12 * GiB)
    assert 12 * GiB <= driver.memGetInfo()[0] + memory.in_use() < 12 * GiB + 2 * MiB
    memory.close()
    assert list(driver.held.values()) == [3 * GiB]


def test_where_the_driver_lists_no_process_all_that_is_in_use_counts(
    driver: Driver, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocators.nvml, "bytes_of_this_process", lambda facts: None)
    memory.limit(16 * GiB)
    assert memory.in_use() == CONTEXT + OTHERS
    assert 16 * GiB <= driver.memGetInfo()[0] + CONTEXT + OTHERS < 16 * GiB + 2 * MiB


@pytest.mark.parametrize(
    ("limit", "named"),
    [(400 * MiB, r"400 MiB.*context.*500 MiB"), (75 * GiB, r"75 GiB.*only 69\.51 GiB are free")],
)
def test_a_limit_that_cannot_be_holds_nothing(
    driver: Driver, memory: CudaMemory, limit: int, named: str
) -> None:
    with pytest.raises(DeviceError, match=named):
        memory.limit(limit)
    assert not driver.held


def test_the_reserve_and_what_is_kept_shrink_with_the_limit(
    driver: Driver, memory: CudaMemory
) -> None:
    memory.limit(CONTEXT + 400 * MiB)
    assert memory.free_bytes(MemoryKind.DEVICE) >= 300 * MiB
    blocks = memory.scatter([4 * MiB] * 3, seed=1)
    assert max(driver.held.values()) > 60 * GiB  # the ballast
    assert sum(driver.held.values()) - max(driver.held.values()) <= 300 * MiB
    for block in blocks:
        memory.free(block)
