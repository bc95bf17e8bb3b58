"""The device's own kernels compile, without a GPU."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cuda.compiler import (
    CONTENT_SOURCE,
    HOLD,
    HOLD_SOURCE,
    fill,
    mismatch,
)
from pytest_gpumem.devices.values import compared_type, plain_type

TYPES = ("f2", "f4", "f8", "b1", "u1", "i2", "u4", "i8", "c8", "c16", "V3")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_devices_own_kernels_compile(arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("nvidia.cu13")
    own = sorted(
        {fill(plain_type(dtype)[0]) for dtype in TYPES}
        | {mismatch(compared_type(dtype)[0]) for dtype in TYPES if dtype != "V3"}
    )
    for source, entries in ((HOLD_SOURCE, [HOLD]), (CONTENT_SOURCE, own)):
        program = core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17"))
        code = program.compile("cubin", name_expressions=tuple(entries))
        assert sorted(code.symbol_mapping) == sorted(entries)
