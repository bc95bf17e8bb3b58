"""`gpumem code`: the figures of a project's kernels, their limits, and another revision beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from committing import git

from pytest_gpumem.cli import main
from pytest_gpumem.devices.cuda.ahead_of_time import from_source
from pytest_gpumem.devices.cuda.nvrtc import CompilerMissing

PROJECT = """
[tool.gpumem.code]
architectures = ["sm_80", "sm_90"]

[[tool.gpumem.code.kernels]]
source = "src/scale.cu"
entries = ["scale<float>", "scale<double>"]
options = ["--std=c++17"]
max_registers = 64
max_spill = 0

[[tool.gpumem.code.kernels]]
source = "src/strided.cu"
"""
SCALE = '#include "index.cuh"\ntemplate <class T> __global__ void scale(T* a, T s, int n) { int i = index(); if (i < n) a[i] *= s; }\n'
STRIDED = "__global__ void every_fourth(float* a, int n) { int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x); if (i < n) a[i] += 1; }\n"
INDEX = "__device__ inline int index() { return blockIdx.x * blockDim.x + threadIdx.x; }\n"

Code = Callable[..., Result]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Code:
    """The command, in a project with two sources."""
    try:
        from_source('extern "C" __global__ void k() {}', "k.cu", "sm_90")
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "src").mkdir()
    for name, text in (
        ("pyproject.toml", PROJECT),
        ("src/scale.cu", SCALE),
        ("src/strided.cu", STRIDED),
        ("src/index.cuh", INDEX),
    ):
        (tmp_path / name).write_text(text)
    return lambda *arguments: CliRunner().invoke(main, ["code", *arguments])


def change(name: str, old: str, new: str) -> None:
    file = Path(name)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def figures(code: Code, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """By name and architecture."""
    code("--json=out.json", *arguments)
    return {
        (one["name"], one["architecture"]): one
        for one in json.loads(Path("out.json").read_text())["kernels"]
    }


def test_each_kernel_for_each_architecture(code: Code) -> None:
    result = code()
    assert result.exit_code == 0, result.output
    names = ("scale<float>", "scale<double>", "every_fourth")
    lines = [line.split() for line in result.output.splitlines() if line.startswith("  ")]
    assert [(line[0], line[1]) for line in lines] == [
        (name, arch) for name in names for arch in ("sm_80", "sm_90")
    ]
    found = figures(code)
    assert found.keys() == {(name, arch) for name in names for arch in ("sm_80", "sm_90")}
    assert all(
        one["registers"] > 0 and one["code"] > 0 and one["spill"] == 0 for one in found.values()
    )


@pytest.mark.parametrize(
    ("limit", "named"),
    [("max_registers = 1", "registers"), ("max_code = 16", "code"), ('max_code = "16 B"', "code")],
)
def test_a_figure_above_its_limit_fails(code: Code, limit: str, named: str) -> None:
    change("pyproject.toml", 'source = "src/strided.cu"', f'source = "src/strided.cu"\n{limit}')
    result = code("--arch", "sm_90")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL src/strided.cu: every_fourth for sm_90: " + named)


def test_spilled_registers_fail(code: Code) -> None:
    Path("src/strided.cu").write_text(
        "__global__ void __launch_bounds__(1024, 2) spills(float* a, int n) { float v[64];"
        "for (int i = 0; i < 64; i++) v[i] = a[i * n + threadIdx.x]; for (int k = 0; k < n; k++)\n#pragma unroll\n"
        "for (int i = 0; i < 64; i++) v[i] = v[(i * 7) % 64] * v[i] + k;\n#pragma unroll\n"
        "for (int i = 0; i < 64; i++) a[i + threadIdx.x * 64] = v[i]; }"
    )
    change("pyproject.toml", "[tool.gpumem.code]", "[tool.gpumem.code]\nmax_spill = 0")
    result = code("--arch", "sm_90")
    assert result.exit_code == 1
    assert "spills for sm_90: spill" in result.output


def test_a_source_that_does_not_compile_fails_and_the_others_are_shown(code: Code) -> None:
    change("src/scale.cu", "*= s", "*= unknown")
    result = code("--arch", "sm_90")
    assert result.exit_code == 1
    assert "every_fourth" in result.output
    assert (
        'FAIL src/scale.cu does not compile for sm_90: src/scale.cu(2): error: identifier "unknown" is undefined'
        in result.output
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"scale<double>"', '"scale<nothing>"', "src/scale.cu does not compile for sm_90"),
        ('"src/strided.cu"', '"src/missing.cu"', "src/missing.cu: No such file or directory"),
        (
            'options = ["--std=c++17"]',
            'options = ["--no-such"]',
            "src/scale.cu does not compile for sm_90",
        ),
        (
            'source = "src/strided.cu"',
            'source = "src/index.cuh"',
            "src/index.cuh holds no kernel that is no template",
        ),
        (
            'source = "src/strided.cu"',
            'triton = "no_such_module:add"\nsignature = "i32"',
            "no_such_module",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_line(code: Code, old: str, new: str, message: str) -> None:
    pytest.importorskip("triton") if "triton" in new else None
    change("pyproject.toml", old, new)
    result = code("--arch", "sm_90")
    assert result.exit_code == 1
    assert [message in line for line in result.output.splitlines() if line.startswith("FAIL")] == [
        True
    ]


def test_another_revision_beside(code: Code) -> None:
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        git(Path(), *arguments)
    change("src/scale.cu", "a[i] *= s", "a[i] = a[i] * s + sqrt(a[i] / s)")
    change("src/strided.cu", "every_fourth", "fourth")
    change("pyproject.toml", "options", "# a comment\noptions")
    result = code("--base", "HEAD", "--arch", "sm_90")
    assert result.exit_code == 0, result.output
    last = {
        line.split()[0]: line.split("  ")[-1]
        for line in result.output.splitlines()
        if line.startswith("  ")
    }
    assert last == {"scale<float>": "other code", "scale<double>": "other code", "fourth": "new"}
    assert "gone: src/strided.cu: every_fourth for sm_90" in result.output
    assert " -> " in result.output
    git(Path(), "checkout", "-q", "src")
    Path("src/index.cuh").write_text("// the same\n" + INDEX)
    result = code("--base", "HEAD", "--arch", "sm_90")
    assert {
        line.split("  ")[-1] for line in result.output.splitlines() if line.startswith("  ")
    } == {"same code"}
    assert len(git(Path(), "worktree", "list").splitlines()) == 1
    result = code("--base", "no-such")
    assert result.exit_code == 4
    assert "no-such is no revision" in result.output


TRITON = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)
"""


def test_kernels_of_triton(code: Code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    Path("src/kernels_of_triton.py").write_text(TRITON)

    def declared(signature: str, warps: int = 4) -> None:
        Path("pyproject.toml").write_text(
            f'[[tool.gpumem.code.kernels]]\ntriton = "kernels_of_triton:add"\nsignature = "{signature}"\nnum_warps = {warps}\n'
        )

    vectors = "*fp32:16, *fp32:16, *fp32:16, i32:16, 1024"
    declared(vectors)
    (one,) = figures(code, "--arch", "sm_90").values()
    assert one["name"] == vectors
    declared(vectors, warps=8)
    (other,) = figures(code, "--arch", "sm_90").values()
    assert one["digest"] != other["digest"]
    declared(vectors.replace("i32:16", "i32"))
    (single,) = figures(code, "--arch", "sm_90").values()
    assert single["digest"] != one["digest"]  # the mask ends anywhere: words are loaded one by one
    declared("*fp32, i32")
    result = code("--arch", "sm_90")
    assert (
        result.exit_code,
        "has 5 parameters (x, y, out, n, BLOCK); the signature '*fp32, i32' has 2" in result.output,
    ) == (1, True)


def test_the_catalogue(code: Code) -> None:
    result = code("--catalogue", "--arch", "sm_90")
    assert result.exit_code == 0
    assert "  triad<float, 1>" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "90"), "--arch: '90' is no architecture"),
        (
            ("--arch", "sm_90", "--arch", "sm_999"),
            "--arch: the installed NVRTC does not compile for 'sm_999'; accepted are sm_",
        ),
        (("--json", "no/such/folder.json"), "--json: no/such/folder.json"),
    ],
)
def test_wrong_arguments(code: Code, arguments: tuple[str, ...], message: str) -> None:
    result = code(*arguments)
    assert (result.exit_code, message in result.stderr) == (4, True)
    assert len(result.output.splitlines()) == 1


def test_an_unknown_architecture_of_the_project_is_its_file_s_fault(code: Code) -> None:
    change("pyproject.toml", '"sm_90"', '"sm_999"')
    result = code()
    assert (result.exit_code, len(result.output.splitlines())) == (4, 1)
    assert (
        "pyproject.toml: tool.gpumem.code.architectures: the installed NVRTC does not compile for 'sm_999'"
        in result.stderr
    )


def test_a_project_without_declarations(code: Code) -> None:
    Path("pyproject.toml").unlink()
    result = code()
    assert result.exit_code == 4
    assert "no [[tool.gpumem.code.kernels]] in" in result.stderr


def test_overloads_are_told_apart(code: Code) -> None:
    found = from_source(
        "__global__ void k(int* a) { *a = 1; }\n__global__ void k(float* a) { *a = 1; }",
        "k.cu",
        "sm_90",
    )
    assert sorted(one.name for one in found) == ["_Z1kPf", "_Z1kPi"]
