"""What a first measurement launches besides the measured kernel is compiled while CuPy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.devices.cuda import code_cache
from pytest_gpumem.devices.cuda.nvrtc import Compilation, DoesNotCompile
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
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that were compiled, by a compiler that makes nothing."""
    made: list[str] = []

    def compiled(
        source: str, name: str, architecture: str, *, entries: tuple[str, ...], options: Any
    ) -> Compilation:
        made.extend(entries)
        return Compilation(b"", "", dict.fromkeys(entries, name))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(code_cache, "compiled", compiled)
    monkeypatch.setattr(code_cache, "architecture_of", lambda capability: "sm_90")
    return made


@pytest.mark.parametrize("name", ["h100", "h200"])
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
    def broken(*arguments: Any, **keywords: Any) -> Compilation:
        raise DoesNotCompile("expected a ';'")

    monkeypatch.setattr(code_cache, "compiled", broken)
    with compiled_meanwhile(DATASHEETS["h100"].facts()) as cache:
        pass
    with pytest.raises(DoesNotCompile, match="expected a ';'"):
        cache.get(CONTENT_SOURCE, fill("f4"))
