"""The device's own kernels compile, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")

from pytest_gpumem.devices.cuda import content, streams
from pytest_gpumem.devices.values import rule_of


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_devices_own_kernels_compile(arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    pytest.importorskip("nvidia.cu13")
    fills = [f"gpumem_fill_random<{t}>" for t in content.CPP_TYPES.values()]
    compares = [f"gpumem_mismatch<{t}, {rule_of(d)[2]}<{t}>>" for d, t in content.CPP_TYPES.items() if d != "b1"]
    for source, entries in ((streams.SOURCE, ["gpumem_hold"]), (content.SOURCE, [*fills, *compares])):
        program = core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17"))
        code = program.compile("cubin", name_expressions=tuple(entries))
        assert sorted(code.symbol_mapping) == sorted(entries)
