"""Machine code that a process compiled serves the next one, without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_gpumem.devices.protocol import Device

SOURCE = 'extern "C" __global__ void answer(int* out) { out[0] = 42; }'


def test_the_next_process_needs_no_compiler(
    gpu_device: Device, device_buffer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_gpumem.devices.cuda import code_cache, compiler

    out = device_buffer((1,), "i4")

    def answer() -> int:
        fresh = compiler.Compiler(
            code_cache.CodeCache(gpu_device.facts.compute_capability, tmp_path)
        )
        out.write(np.zeros(1, "i4"))
        fresh.private(SOURCE, "answer")((1,), (1,), (np.uint64(out.address),))
        gpu_device.streams.synchronize()
        return int(out.read()[0])

    assert answer() == 42
    (kept,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(code_cache, "compiled", lambda *_, **__: pytest.fail("it was compiled again"))
        assert answer() == 42
    kept.write_bytes(kept.read_bytes()[:-1])
    assert answer() == 42
