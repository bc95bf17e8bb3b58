"""No check of a result passes on a GPU where nothing was launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_calls import SCALARS, arguments_of, fitting

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.case import target_of
from pytest_gpumem.measuring.target import Target, WrongResult
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory


@pytest.mark.parametrize("of_works", [False, True])
@pytest.mark.parametrize("name", CATALOGUE)
def test_no_check_passes_without_a_launch(
    gpu_device: Device, monkeypatch: pytest.MonkeyPatch, name: str, of_works: bool
) -> None:
    arena = Arena(gpu_device, seed=5)
    memory, kernel = Memory(arena), getattr(Kernels(gpu_device), name)
    arrays = arguments_of(name, 2000, CATALOGUE[name].dtypes[0], np.random.default_rng(1))
    arguments: dict[str, Any] = {**SCALARS.get(name, {}), **fitting(name, arrays)}
    for parameter, array in arrays.items():
        arguments[parameter] = memory.device(array.shape, array.dtype)
    kernel(**arguments)  # the outputs hold the result before
    target: Target = Works(memory).kernel(kernel, **arguments)
    if not of_works:
        target = target_of(kernel, (), arguments, arena=arena)
    assert target.check() is None
    with monkeypatch.context() as nothing:
        nothing.setattr(gpu_device.kernels, "launch", lambda *_, **__: None)
        with pytest.raises(WrongResult, match="after one launch"):
            target.check()
    assert target.check() is None
    target.close()
    arena.close()


def test_updates_in_turn_are_checked(gpu_device: Device) -> None:
    arena = Arena(gpu_device, seed=5)
    works, x = Works(Memory(arena)), Memory(arena).device(1 << 20)
    update = works.kernel(Kernels(gpu_device).elementwise, x)
    for work in works.in_turn(update, update), works.after(update, update):
        assert work.check() is None
    arena.close()
