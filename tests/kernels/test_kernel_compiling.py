"""Every kernel compiles for old and new architectures, without a GPU, and is the machine code that it is meant to be."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from kernel_calls import called, vector_counts

from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import COMPILE_OPTIONS, LaunchShape, read_source

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="cuda-bindings has no wheel for this machine"
)

pytestmark = pytest.mark.xdist_group("nvrtc")  # one worker compiles them all

OLDEST, NEWEST = "sm_80", "sm_120"
KERNELS = tuple(CATALOGUE.values())
SOURCES = sorted({k.source for k in KERNELS if k.source})


def expressions(source: str) -> list[str]:
    """Every instance that a launch shape may ask for."""
    kernels = [k for k in KERNELS if k.source == source]
    shapes = {k.name: [LaunchShape(1, 1, vectors=v) for v in vector_counts(k)] for k in kernels}
    return sorted(
        {
            k.expression(dtype, shape)
            for k in kernels
            for dtype in k.dtypes
            for shape in shapes[k.name]
        }
    )


def one_of_each(source: str) -> list[str]:
    """One instance of each kernel."""
    return list(
        {expression.partition("<")[0]: expression for expression in expressions(source)}.values()
    )


def compiled(source: str, architecture: str, instances: list[str]) -> Any:
    """A compiled program with these instances of a source's kernels. Raises AssertionError with the compiler's log."""
    program = called(
        nvrtc.nvrtcCreateProgram(read_source(source).encode(), source.encode(), 0, [], [])
    )
    for expression in instances:
        called(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
    options = [
        option.encode() for option in (*COMPILE_OPTIONS, f"--gpu-architecture={architecture}")
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # Never a bytes object: NVRTC writes into it, and Python shares those of length 1, which is an empty log's.
    log = bytearray(called(nvrtc.nvrtcGetProgramLogSize(program)))
    called(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode().strip("\0 \n")
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    assert not text, f"{source} for {architecture}: {text}"
    return program


@functools.cache
def for_the_oldest(source: str) -> Any:
    """A program with all instances."""
    return compiled(source, OLDEST, expressions(source))


@pytest.fixture(scope="module", autouse=True)
def _nvrtc() -> None:
    try:
        called(nvrtc.nvrtcVersion())
    except RuntimeError as missing:  # the bindings are there, the library is not
        pytest.skip(f"no NVRTC on this machine: {missing}")


def test_compiles_without_a_warning() -> None:
    for source in SOURCES:
        # The newest differs in no language feature that one instance of each would not show.
        for program, instances in (
            (compiled(source, NEWEST, one_of_each(source)), one_of_each(source)),
            (for_the_oldest(source), expressions(source)),
        ):
            assert called(nvrtc.nvrtcGetCUBINSize(program)) > 0, source
            names = [called(nvrtc.nvrtcGetLoweredName(program, e.encode())) for e in instances]
            assert len(set(names)) == len(names), source


def ptx(source: str) -> dict[str, str]:
    """PTX by mangled name."""
    program = for_the_oldest(source)
    text = bytearray(called(nvrtc.nvrtcGetPTXSize(program)))
    called(nvrtc.nvrtcGetPTX(program, text))
    bodies = re.split(r"\.entry ", text.decode())[1:]
    by_name = {body[: body.index("(")]: body for body in bodies}
    return {
        e: by_name[called(nvrtc.nvrtcGetLoweredName(program, e.encode())).decode()]
        for e in expressions(source)
    }


def accesses(body: str, kind: str) -> list[str]:
    return re.findall(rf"\b{kind}\.global[\w.]*", body)


def test_stream_accesses_are_128_bits_wide() -> None:
    for expression, body in ptx("stream.cu").items():
        ((name, cpp, vectors),) = re.findall(r"^(\w+)<(\w+), (?:512, )?(\d)>$", expression)
        sources_of = sum(p.role.value == "read" for p in CATALOGUE[name].parameters)
        vector = r"\.v2\." if cpp == "double" else r"\.v4\."
        wide = [a for a in accesses(body, "ld") if re.search(vector, a)]
        reduces = name in ("read", "dot")
        # one whole tile; a kernel with tails has one vector more for the last tile and a scalar for the rest
        assert len(wide) == sources_of * (int(vectors) + (not reduces)), expression
        assert len(accesses(body, "ld")) - len(wide) == (0 if reduces else sources_of), expression
        wide_stores = [a for a in accesses(body, "st") if re.search(vector, a)]
        assert len(wide_stores) == (0 if reduces else int(vectors) + 1), expression
        if reduces:
            assert sources_of * int(vectors) == 8


def test_only_the_chase_through_l1_looks_there() -> None:
    for expression, body in ptx("latency.cu").items():
        through = "ca" if expression.startswith("chase_l1<") else "cg"
        assert set(accesses(body, "ld")) == {f"ld.global.{through}.s32"}, expression


def test_l2_reads_bypass_l1_by_eight_wide_loads() -> None:
    (body,) = ptx("l2_bandwidth.cu").values()
    assert accesses(body, "ld") == ["ld.global.cg.v4.s32"] * 8
