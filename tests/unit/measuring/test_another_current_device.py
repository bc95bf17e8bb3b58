"""A test that has made another GPU current: whatever it calls happens on the GPU of its session all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from counted_device import CountedDevice

from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.spaces import Memory, memory_kind
from pytest_gpumem.ranges import Ranges

FACETS = ("streams", "graphs", "kernels", "memory", "content", "l2", "managed")
ANYWHERE = ("memory.part", "memory.near_host")  # need no device to be current


@pytest.fixture
def made() -> SimpleNamespace:
    """What a test has at hand when it makes another GPU current."""
    device = CountedDevice()
    arena = Arena(device, seed=7)
    memory, kernels = Memory(arena), Kernels(device)
    return SimpleNamespace(
        device=device,
        arena=arena,
        memory=memory,
        kernels=kernels,
        works=Works(memory),
        conductor=Conductor(device, Ranges(), profiled=False),
        x=memory.device("1 MiB"),
        y=memory.device("1 MiB"),
        pages=memory.managed("1 MiB", first_touch="host"),
    )


@pytest.fixture
def outside(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs that are done while another GPU is current."""
    found, depth = list[str](), 0

    @contextmanager
    def current() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1

    def noting(verb: str) -> Callable[..., None]:
        return lambda *_, **__: None if depth or verb in ANYWHERE else found.append(verb)

    monkeypatch.setattr(made.device, "current", current)
    monkeypatch.setattr(made.device, "elsewhere", lambda: None if depth else "GPU 1")
    for facet in FACETS:
        owner = getattr(made.device, facet)
        for name in dir(owner):
            if not name.startswith("_") and callable(getattr(owner, name)):
                made.device.before(f"{facet}.{name}", noting(f"{facet}.{name}"))
    return found


def _persists(made: SimpleNamespace) -> None:
    with persisting(made.device, made.x) as stream:
        assert stream.window is not None
        stream.reset("window")
        stream.renew()


def _measures(made: SimpleNamespace) -> None:
    target = made.conductor.target(made.kernels.copy, (made.x, made.y), {}, arena=made.arena)
    made.conductor.measure(
        target, Plan(budget=0.01, placements=2), arena=made.arena, label="", name="test"
    )


def _measures_a_case(made: SimpleNamespace) -> None:
    def build(memory: Memory) -> Case:
        x = memory.device("1 MiB")
        return Case(
            launch=lambda: None,
            reference=lambda: None,
            reads=[x],
            check=lambda: x.read() is not None,
        )

    target = made.conductor.case(build, arena=made.arena)
    made.conductor.measure(
        target, Plan(budget=0.01, placements=2), arena=made.arena, label="", name="test"
    )


CALLS: dict[str, Callable[[SimpleNamespace], object]] = {
    "device buffer": lambda made: made.memory.device(4096),
    "managed buffer": lambda made: made.memory.managed(4096),
    "prefetched buffer": lambda made: made.memory.prefetched(4096, read_mostly=True),
    "pool": lambda made: made.memory.pooled(4096),
    "pinned buffer": lambda made: made.memory.pinned(4096),
    "registered buffer": lambda made: made.memory.registered(4096),
    "read": lambda made: made.x.read(),
    "write": lambda made: made.x.write(np.zeros(made.x.size)),
    "view": lambda made: made.x.view(),
    "DLPack": lambda made: made.x.__dlpack__(),
    "advise": lambda made: made.pages.advise(read_mostly=True),
    "prefetch": lambda made: made.pages.prefetch("device"),
    "discard": lambda made: made.pages.discard(),
    "persisting stream": _persists,
    "memory kind": lambda made: memory_kind(made.device, made.x),
    "untimed call": lambda made: made.kernels.copy(made.x, made.y),
    "work": lambda made: made.works.enqueue(
        made.works.in_turn(*[made.works.kernel(made.kernels.copy, made.x, made.y)] * 2)
    ),
    "staged copy": lambda made: made.works.enqueue(made.works.staged(2, "1 MiB")),
    "work at once": lambda made: made.works.together(
        made.works.copy(made.x, made.y), made.works.busy(1e-6)
    ),
    "saved inputs": lambda made: made.conductor.target(
        made.kernels.offset_copy, (made.x, made.y), {}, arena=made.arena
    ),
    "measurement": _measures,
    "measurement of a case": _measures_a_case,
}


def test_everything_happens_on_the_sessions_gpu(made: SimpleNamespace, outside: list[str]) -> None:
    for name in CALLS:
        CALLS[name](made)
        assert outside == [], name
