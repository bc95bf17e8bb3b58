"""The device's own kernels compile, without a GPU."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cuda.compiler import (
    CONTENT_SOURCE,
    CPP_TYPES,
    HOLD,
    HOLD_SOURCE,
    fill,
    mismatch,
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_devices_own_kernels_compile(arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("nvidia.cu13")
    own = [
        *map(fill, CPP_TYPES),
        *(mismatch(dtype) for dtype in CPP_TYPES if dtype != "b1"),
    ]
    for source, entries in ((HOLD_SOURCE, [HOLD]), (CONTENT_SOURCE, own)):
        program = core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17"))
        code = program.compile("cubin", name_expressions=tuple(entries))
        assert sorted(code.symbol_mapping) == sorted(entries)
