"""Where memory ends is what was asked for, whatever the driver rounds it up to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.driver")

from pytest_gpumem.devices.cuda import links
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.records.device import DeviceFacts

START = 0x7F00_0000_0000
ASKED = 1000


class Driver:
    """Knows one allocation, rounded up.

    Args:
        kind: `cudaMemoryType`.
        size: what the driver took.
        tells: whether it tells the range, as it does for device and managed memory.
    """

    def __init__(self, kind: int, size: int, tells: bool) -> None:
        self.kind, self.size, self.tells = kind, size, tells

    def attributes(self, address: int) -> SimpleNamespace:
        return SimpleNamespace(
            type=self.kind if START <= address < START + self.size else 0, device=0
        )

    def range(self, address: int) -> tuple[int, int, int]:
        return (0, START, self.size) if self.tells else (1, 0, 0)


@pytest.fixture
def owned(h100: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> CudaMemory:
    allocations = CudaMemory(0, h100)
    monkeypatch.setattr(allocations, "free_bytes", lambda kind: 1 << 30)
    return allocations


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        (MemoryKind.DEVICE, Driver(2, ASKED, True)),
        (MemoryKind.MANAGED, Driver(3, 65536, True)),
        (MemoryKind.PINNED, Driver(1, 4096, False)),
        (MemoryKind.PINNED, Driver(1, 4096, True)),
        # The driver knows the bytes and no more, and the process has the rest of the page.
        (MemoryKind.MANAGED, Driver(3, ASKED, True)),
        (MemoryKind.PINNED, Driver(1, ASKED, True)),
    ],
)
def test_the_byte_past_the_end_is_not_the_buffers(
    owned: CudaMemory, monkeypatch: pytest.MonkeyPatch, kind: MemoryKind, driver: Driver
) -> None:
    monkeypatch.setattr(links.runtime, "pointerGetAttributes", driver.attributes)
    monkeypatch.setattr(links.D, "cuMemGetAddressRange", driver.range)
    monkeypatch.setattr(links, "is_of_a_driver", lambda address: True)
    monkeypatch.setattr(links, "is_mapped", lambda address: START <= address < START + 4096)
    for name in ("malloc", "mallocManaged", "hostAlloc"):
        monkeypatch.setattr(
            f"pytest_gpumem.devices.cuda.allocations.runtime.{name}", lambda *_: START
        )
    for name in ("free", "freeHost"):
        monkeypatch.setattr(
            f"pytest_gpumem.devices.cuda.allocations.runtime.{name}", lambda *_: None
        )
    made = owned.allocate(ASKED, kind, mapped=False, write_combined=False)
    assert owned.kind_at(START) is kind
    assert owned.kind_at(START + ASKED - 1) is kind
    assert owned.kind_at(START + ASKED) is None
    owned.free(made)
    # Somebody else's memory may lie there next, and be larger.
    assert owned.kind_at(START + ASKED) is (kind if driver.size > ASKED else MemoryKind.PAGEABLE)
