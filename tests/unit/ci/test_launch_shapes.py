"""Launch shapes of the stream kernels: the variants compute the same in the asked shape, and what their record says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import launch_shapes
import pytest

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.memory.buffers import Arena

MIB = 2**20


@pytest.fixture
def device() -> Iterator[Device]:
    opened = choose("sim").open()
    yield opened
    opened.close()


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    made = Arena(device, seed=0)
    yield made
    made.close()


def test_every_variant_handles_the_whole_array_in_its_shape(device: Device, arena: Arena) -> None:
    variants = launch_shapes.Variants(device, arena, 4 * MIB)
    shapes = {(v.kernel, v.threads, v.vectors): v.launch.shape for v in variants.all}
    assert len(shapes) == len(variants.all) == 5 * 9 + 2 * 12
    assert (shapes["triad", 1024, 4].blocks, shapes["triad", 1024, 4].threads, shapes["triad", 1024, 4].vectors) == (64, 1024, 4)
    assert (shapes["copy", 256, 1].blocks, shapes["copy", 256, 1].threads, shapes["copy", 256, 1].vectors) == (1024, 256, 1)
    assert (shapes["dot", 512, 8].blocks, shapes["dot", 512, 8].threads) == (64, 512)
    entries = {(v.kernel, v.threads, v.vectors): v.launch.kernel.expression("float", v.launch.shape) for v in variants.all}
    assert entries["triad", 1024, 4] == "triad<float, 4>"
    assert entries["read", 256, 16] == "read<float, 256, 16>"


def test_the_choice_is_the_catalogues_and_is_tried_where_it_is_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_shapes, "THREADS", (256, 1024))
    device = choose("sim:rtx3090").open()  # its SMs hold 1536 threads, which blocks of 1024 do not fill
    arena = Arena(device, seed=0)
    variants = launch_shapes.Variants(device, arena, 4 * MIB)
    triad = [(v.threads, v.vectors) for v in variants.all if v.kernel == "triad"]
    assert variants.chosen["triad"][0] == 512
    assert triad[-1] == variants.chosen["triad"]
    assert len(triad) == 2 * 3 + 1
    arena.close()
    device.close()


def variant(threads: int, vectors: int, seconds: list[float], chosen: bool = False, right: bool = True) -> dict[str, Any]:
    shape = {"kernel": "read", "threads": threads, "vectors": vectors, "bytes": 10**9}
    return {**shape, "chosen": chosen, "right": right, "seconds": seconds}


def test_the_choice_is_set_against_the_best_by_the_median_batch() -> None:
    record = {
        "device": {"name": "NVIDIA H200", "simulated": False, "driver": "580"},
        "ended": "2026-11-21T00:00:00",
        "array_bytes": 2**30,
        "rounds": 3,
        "launches": 10,
        "variants": [
            variant(512, 8, [0.00020, 0.00025, 0.00030], chosen=True),
            variant(512, 4, [0.00023, 0.00024, 0.00024]),
            variant(256, 4, [0.00010, 0.00100, 0.00100], right=False),
        ],
    }
    (found,) = launch_shapes.choices(record)
    assert found["best"]["vectors"] == 4
    assert found["loss"] == pytest.approx(1 - 24 / 25)
    text = launch_shapes.table(record)
    assert "4167     4000*" in text
    assert "1000!" in text
    assert "chosen 512 x 8 (tiles of 64 KiB): 4.00 % below the best, 512 x 4 (tiles of 32 KiB)" in text


def test_a_wrong_variant_is_shown_by_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launch_shapes.Variants, "wrong", lambda self: self.all[:1])
    for name, values in {"THREADS": (256,), "MAP_VECTORS": (1,), "REDUCE_TRIED": (2,)}.items():
        monkeypatch.setattr(launch_shapes, name, values)
    monkeypatch.setattr(sys, "argv", ["x", "--device", "sim", "--mib", "1", "--rounds", "1", "--launches", "1"])
    assert launch_shapes.main() == 1
    assert "!" in capsys.readouterr().out.split("chosen", 2)[1]
