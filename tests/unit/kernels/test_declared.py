"""Declarations of kernels in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.kernels.declared import ARCHITECTURES, BadDeclaration, project
from pytest_gpumem.units import KiB

GOOD = """
[tool.gpumem.code]
architectures = ["sm_90a"]
max_spill = 0

[[tool.gpumem.code.kernels]]
source = "a.cu"
entries = ["scale<float>"]
options = ["--std=c++17"]
max_registers = 32
max_spill = "1 KiB"

[[tool.gpumem.code.kernels]]
triton = "mine.kernels:add"
signature = "*fp32:16, i32, 1024"
num_warps = 8
"""


def test_declarations_with_their_limits(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(GOOD)
    found = project(tmp_path)
    cuda, triton = found.sources
    assert found.architectures == ("sm_90a",)
    assert (cuda.source, cuda.entries, cuda.options, cuda.limits) == (
        "a.cu",
        ("scale<float>",),
        ("--std=c++17",),
        {"spill": KiB, "registers": 32},
    )
    assert (triton.triton, triton.signature, triton.triton_options, triton.limits) == (
        "mine.kernels:add",
        "*fp32:16, i32, 1024",
        {"num_warps": 8},
        {"spill": 0},
    )


@pytest.mark.parametrize(
    "text", [None, "", "[tool.other]\na = 1"], ids=["no file", "empty", "another tool"]
)
def test_a_project_may_declare_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    assert (project(tmp_path).sources, project(tmp_path).architectures) == ((), ARCHITECTURES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "max_spill = 0",
            "max_spil = 0",
            r"tool.gpumem.code: there is no key 'max_spil'; accepted are .*max_spill",
        ),
        (
            "max_spill = 0",
            "max_spill = -1",
            r'max_spill: -1; accepted is bytes such as 0 or "4 KiB"',
        ),
        ("max_spill = 0", 'max_spill = "1 KB/s"', "max_spill: '1 KB/s' is not understood"),
        (
            "max_registers = 32",
            'max_registers = "32"',
            r"kernels\[0\].max_registers: '32'; accepted is a number from 0 on",
        ),
        ("max_registers = 32", "max_registers = true", r"kernels\[0\].max_registers: True"),
        (
            'source = "a.cu"',
            "",
            r'kernels\[0\] needs source = "FILE.cu" or triton = "MODULE:FUNCTION"',
        ),
        ('source = "a.cu"', "source = 1", r"kernels\[0\].source: 1; a text is needed"),
        (
            'entries = ["scale<float>"]',
            'entries = "scale<float>"',
            r"kernels\[0\].entries: 'scale<float>'; a list of texts is needed",
        ),
        (
            "num_warps = 8",
            "num_warps = 0",
            r"kernels\[1\].num_warps: 0; accepted is a whole number from 1 on",
        ),
        (
            "num_warps = 8",
            'options = ["-O1"]',
            r"kernels\[1\]: there is no key 'options'; accepted are triton, signature",
        ),
        (
            '"mine.kernels:add"',
            '"mine.kernels.add"',
            r'triton: \'mine.kernels.add\'; accepted is "MODULE:FUNCTION"',
        ),
        (
            '["sm_90a"]',
            '["90"]',
            r"architectures: '90' is no architecture; accepted is such as \"sm_90\"",
        ),
        (
            "[[tool.gpumem.code.kernels]]\nsource",
            "[tool.gpumem.code.kernels]\nsource",
            "Cannot overwrite|is no array of tables|not a",
        ),
        ("[tool.gpumem.code]", "[tool.gpumem.code", "pyproject.toml: "),
        (
            "[tool.gpumem.code]",
            '[tool.gpumem]\nmode = "hot"\n[tool.gpumem.code]',
            r"tool.gpumem: .* 'mode'; .*\[tool.pytest.ini_options\], as gpumem_mode",
        ),
        (GOOD, "[tool]\ngpumem = 1", "is no table"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    (tmp_path / "pyproject.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadDeclaration, match=message) as raised:
        project(tmp_path)
    assert "\n" not in str(raised.value)
    assert "pyproject.toml" in str(raised.value)
