"""A harness on a simulated device, and what the measuring tests repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from counted_device import CountedDevice

from pytest_gpumem.measuring.bound import BoundKernel, Kernels
from pytest_gpumem.measuring.case import Case, CaseTarget, target_of
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.measure import Plan, measure
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.measurement import Measurement

QUICK: dict[str, Any] = {"placements": 2, "precision": 0.5, "budget": 0.02}
"""Plan of a measurement whose precision does not matter."""


class RecordedRanges(Ranges):
    """Says to `log` which ranges are opened and closed."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log = log
        self.open: list[str] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.open.append(name)
        self._log(f"<{name}")
        try:
            with super().range(name):
                yield
        finally:
            self._log(f"{self.open.pop()}>")


def moved(target: Target, wanted: int, most: int, random: Any) -> int:
    """Move a target that can be moved; gives the number of its placements."""
    assert target.moves
    target.move(wanted, most, random)
    return target.places


class Bench:
    """One session with one test."""

    def __init__(self, device: CountedDevice | None = None, *, profiled: bool = False) -> None:
        self.device = device or CountedDevice()
        self.log: list[str] = []
        self.ranges = RecordedRanges(self.log.append)
        self.harness = Harness(self.device, self.ranges, profiled=profiled)
        self.arena = Arena(self.device, seed=5)
        self.memory = Memory(self.arena)
        self.kernels = Kernels(self.device)

    def buffers(self, count: int, nbytes: int = 1 << 20, dtype: str = "f4") -> list[Buffer]:
        return [self.memory.device(nbytes, dtype) for _ in range(count)]

    def target(
        self, function: BoundKernel | Callable[..., object], *arguments: Any, **options: Any
    ) -> Target:
        return target_of(function, arguments, {}, arena=self.arena, **options)

    def kernel_target(self, kernel: str, *arguments: Any) -> Target:
        return self.target(getattr(self.kernels, kernel), *arguments)

    def take(self, target: Target, **plan: Any) -> Measurement:
        how = Plan(**{**QUICK, **plan})
        return measure(self.harness, target, how, "test_it")

    def measure(self, kernel: str, *arguments: Any, **plan: Any) -> Measurement:
        return self.take(self.kernel_target(kernel, *arguments), **plan)

    def case(self, build: Callable[[Memory], Case], **plan: Any) -> Measurement:
        return self.take(CaseTarget(build, self.arena), **plan)

    def leftovers(self) -> int:
        """Allocations that are live after everything was closed."""
        self.arena.close()
        self.harness.close()
        return len(self.device.live)
