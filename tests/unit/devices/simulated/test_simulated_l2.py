"""The simulated L2: what it remembers of its lines is what they are."""

from __future__ import annotations

import random
from collections.abc import Callable

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.l2 import L2Lines
from pytest_gpumem.units import MiB


def test_the_state_and_the_sums_follow_every_change() -> None:
    chance, l2 = random.Random(1), L2Lines(DATASHEETS["h100"])
    memory = [Allocation(MemoryKind.DEVICE, 40 * MiB, 0, 0) for _ in range(5)]
    states = [l2.state()]

    def touch(one: Allocation) -> None:
        share = chance.choice([0.0, chance.random()])
        l2.touch(
            one,
            normal=chance.random() * one.nbytes,
            persisting=share * one.nbytes,
            dirty=chance.random() * one.nbytes,
        )

    changes: dict[str, Callable[[Allocation], object]] = {
        "touch": touch,
        "forget": l2.forget,
        "release": lambda one: l2.release(one, chance.random() * 40 * MiB),
        "write back": lambda one: l2.write_back(chance.random() * 40 * MiB),
        "set aside": lambda one: l2.request_set_aside(chance.randrange(30) * MiB),
        "reset": lambda one: l2.reset_persisting(),
        "restore": lambda one: l2.restore(chance.choice(states)),
    }
    for name in chance.choices([*changes], [8, 2, 2, 4, 1, 1, 2], k=2000):
        changes[name](chance.choice(memory))
        set_aside, lines = state = l2.state()
        held = {id(one): l2.lines(one) for one in memory}
        assert set_aside == l2.set_aside, name
        known = {key: tuple(figures) for key, *figures in lines}
        empty = (0.0, 0.0, 0.0)
        assert {key: (one.normal, one.persisting, one.dirty) for key, one in held.items()} == {
            id(one): known.get(id(one), empty) for one in memory
        }, name
        assert l2.persisting == sum(figures[1] for figures in known.values()), name
        assert l2.persisting <= l2.set_aside * (1 + 1e-9), name
        states = [*states[-20:], state]
