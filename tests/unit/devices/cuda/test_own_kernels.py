"""What a first measurement launches besides the measured kernel is compiled while CuPy is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.cuda import nvrtc
from pytest_gpumem.devices.cuda.nvrtc import DoesNotCompile, KernelCode
from pytest_gpumem.devices.cuda.own_kernels import (
    CONTENT_SOURCE,
    HOLD,
    compiled_meanwhile,
    fill,
    mismatch,
)
from pytest_gpumem.devices.protocol import Launch, Stream
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.ranges import Ranges


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that were compiled, by a compiler that makes nothing."""
    made: list[str] = []

    def compiled(source: str, entry: str, architecture: str) -> KernelCode:
        made.append(entry)
        return KernelCode(b"", entry)

    monkeypatch.setattr(nvrtc, "compiled", compiled)
    monkeypatch.setattr(nvrtc, "architecture_of", lambda capability: "sm_90")
    return made


@pytest.mark.parametrize("name", ["h100", "a100"])
def test_it_is_what_the_harness_launches(
    name: str, no_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(DATASHEETS[name], seed=0)
    launched, launch = set[str](), device.kernels.launch

    def noted(one: Launch, stream: Stream, **window: Any) -> None:
        launched.add(one.kernel.expression("float", one.shape))
        launch(one, stream, **window)

    monkeypatch.setattr(device.kernels, "launch", noted)
    harness = Harness(device, Ranges(), profiled=False)
    harness.wake()
    harness.floors()
    harness.close()
    with compiled_meanwhile(device.facts):
        pass
    assert launched
    assert {*no_compiler} == {*launched, HOLD, fill("f4"), mismatch("f4", "close")}


def test_what_does_not_compile_is_reported_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: Any, **keywords: Any) -> KernelCode:
        raise DoesNotCompile("expected a ';'")

    monkeypatch.setattr(nvrtc, "compiled", broken)
    with compiled_meanwhile(DATASHEETS["h100"].facts()) as compiler:
        pass
    with pytest.raises(DoesNotCompile, match="expected a ';'"):
        compiler.get(CONTENT_SOURCE, fill("f4"))


@pytest.mark.parametrize(
    ("capability", "architecture"), [((9, 0), "sm_90"), ((10, 3), "compute_90"), ((7, 0), None)]
)
def test_what_is_compiled_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str | None
) -> None:
    """One that is newer than the compiler gets code that the driver translates; one that is too old is refused with the remedy."""
    monkeypatch.undo()
    monkeypatch.setattr(
        nvrtc, "_loaded", lambda: SimpleNamespace(nvrtcGetSupportedArchs=lambda: (0, [75, 80, 90]))
    )
    if architecture is not None:
        assert nvrtc.architecture_of(capability) == architecture
        return
    with pytest.raises(
        DoesNotCompile, match=r"for compute capability 7\.5 and newer, this GPU has 7\.0: .*cuda12"
    ):
        nvrtc.architecture_of(capability)
