"""The CUDA sources themselves, compiled for the host and run thread by thread, against the catalogue's references.

It checks indices, tails, grids, parameter order and arithmetic of what ships; what it cannot check is the GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from kernel_calls import arguments_of, call_of, vector_counts

from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import LaunchShape, Role, read_source
from pytest_gpumem.records.device import DeviceFacts

C_TYPES = {
    "f4": ("float", ctypes.c_float),
    "f8": ("double", ctypes.c_double),
    "i4": ("int", ctypes.c_int),
}
COMPILED = [(k.name, dtype) for k in CATALOGUE.values() if k.source for dtype in k.dtypes]
WARPWISE = ("l2_read",)
"""Kernels whose threads exchange values within a warp."""
BLOCKWISE = ("transpose_tiled", "transpose_padded", "read", "dot", "reset_data_shared")
"""Kernels whose threads share memory."""
GUARD = 256
"""Bytes after every array that no kernel may touch."""


def entry_points() -> str:
    """One C function for each kernel, element type and number of vectors, called with what `arguments_of` lists."""
    rng = np.random.default_rng(0)
    text = []
    for name, dtype in COMPILED:
        kernel: Any = CATALOGUE[name]
        arrays = arguments_of(name, 64, dtype, rng)
        order = kernel.arguments_of(call_of(kernel, arrays, steps=1))
        c_type = C_TYPES[dtype][0]
        kinds = [
            "Pointer" if a in arrays else c_type if isinstance(a, str) else "unsigned long long"
            for a in order
        ]
        parameters = ", ".join(
            f"{'void*' if kind == 'Pointer' else kind} p{i}" for i, kind in enumerate(kinds)
        )
        values = ", ".join(
            f"Pointer{{p{i}}}" if kind == "Pointer" else f"p{i}" for i, kind in enumerate(kinds)
        )
        side_by_side = "threads" if name in BLOCKWISE else "32u" if name in WARPWISE else "1u"
        for vectors in vector_counts(kernel):
            function = f"{Path(kernel.source).stem}_cu::{kernel.expression(dtype, LaunchShape(1, 1, vectors=vectors))}"
            text.append(
                f'extern "C" void {name}_{dtype}_{vectors}(unsigned blocks, unsigned threads, unsigned shared, {parameters})\n'
                f"{{ launch(blocks, threads, shared, {side_by_side}, [=] {{ {function}({values}); }}); }}\n"
            )
    text.append('extern "C" bool wrote_past_shared_memory() { return shared_overrun; }\n')
    text.append('extern "C" bool got_stuck() { return stuck; }\n')
    return "".join(text)


def on_host(source: str) -> str:
    """A source whose dynamic shared memory is that of `host_cuda.hpp`."""
    return re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(dynamic_shared.data());",
        source,
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> ctypes.CDLL:
    """The kernels, which one worker of xdist compiles for all."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "host_kernels"
    with FileLock(f"{folder}.lock"):
        if not (folder / "kernels.so").exists():
            compile_kernels(compiler, folder)
    return ctypes.CDLL(str(folder / "kernels.so"))


def compile_kernels(compiler: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("host_cuda.hpp"), folder)
    spaces = ""
    for name in sorted({k.source for k in CATALOGUE.values() if k.source}):
        source = on_host(read_source(name))
        spaces += f"namespace {Path(name).stem}_cu {{\n{source}\n}}\n"
    (folder / "kernels.cpp").write_text(f'#include "host_cuda.hpp"\n{spaces}{entry_points()}')
    flags = "-std=c++17 -O0 -fwrapv -ffp-contract=off -w -pthread -shared -fPIC"
    built = subprocess.run(
        [compiler, *flags.split(), "kernels.cpp", "-o", "kernels.so"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]


class Guarded:
    """A copy of an array at an address that is a multiple of 256, with guard bytes behind it."""

    def __init__(self, content: np.ndarray) -> None:
        self._raw = np.full(content.nbytes + 2 * GUARD, 0xA5, dtype="u1")
        first = -self._raw.ctypes.data % GUARD
        self._guard = self._raw[first + content.nbytes : first + content.nbytes + GUARD]
        self.array = self._raw[first : first + content.nbytes].view(content.dtype)
        self.array[:] = content

    @property
    def intact(self) -> bool:
        return bool((self._guard == 0xA5).all())


SCALARS = {
    "mul": [{"s": 3}, {"s": -7}],
    "triad": [{"s": 3}, {"s": -7}],
    "write": [{"value": 5}],
    "init": [{"value": 5}],
    "init_warp_per_page": [{"value": -2}, {"value": 3, "page": 4096}],
    "offset_copy": [{"offset": 0}, {"offset": 5}, {"offset": 32}],
    "stride_copy": [{"stride": 1}, {"stride": 3}, {"stride": 32}],
    "chase": [{"steps": 1}, {"steps": 12345, "start": 2}],
    "chase_l1": [{"steps": 1}, {"steps": 12345, "start": 2}],
    "chase_onward": [{"steps": 1}, {"steps": 12345}],
    "elementwise": [{"rounds": 1}, {"rounds": 9}],
    "reread": [{"times": 1}, {"times": 3}],
}

# A lone vector's rest, one tile and a rest, several tiles, more than a 64 KiB page.
SIZES = (35, 4096, 4099, 33001)


def test_source_gives_the_references_result(library: ctypes.CDLL, h100: DeviceFacts) -> None:
    for name, dtype in COMPILED:
        for blocks in [None, 1, 3]:
            kernel: Any = CATALOGUE[name]
            rng = np.random.default_rng(7)
            for size in SIZES:
                if name.startswith("chase") and (size < 48 or blocks == 3):
                    continue
                for scalars in SCALARS.get(name, [{}]):
                    arrays = arguments_of(name, size, dtype, rng)
                    call = call_of(kernel, arrays, blocks, **scalars)
                    assert kernel.problem(call) is None, (name, dtype, blocks)
                    expected = kernel.reference(arrays, call.scalars)
                    for vectors in vector_counts(kernel):
                        # Outputs are poisoned, as a measurement does before it checks.
                        guarded = {}
                        for parameter in kernel.parameters:
                            if parameter.role is not Role.SCALAR:
                                guarded[parameter.name] = Guarded(arrays[parameter.name])
                            if parameter.role is Role.WRITE:
                                guarded[parameter.name].array.view("u1")[:] = 0xFF
                        run(
                            library,
                            replace(kernel.shape(h100, call), vectors=vectors),
                            kernel,
                            dtype,
                            call,
                            guarded,
                        )
                        for parameter in kernel.parameters:
                            if parameter.role is Role.SCALAR:
                                continue
                            actual = guarded[parameter.name]
                            assert actual.intact, f"{parameter.name}: written past its end"
                            content = expected.get(parameter.name, arrays[parameter.name])
                            assert content.dtype == actual.array.dtype, (name, dtype, blocks)
                            assert len(content) == len(actual.array), (name, dtype, blocks)
                            tolerance = kernel.relative_tolerance if dtype != "i4" else 0.0
                            what = f"{parameter.name}, {size}, {scalars}, {vectors}"
                            np.testing.assert_allclose(
                                actual.array, content, rtol=tolerance, atol=0, err_msg=what
                            )


def test_matrices_of_any_shape_are_transposed(library: ctypes.CDLL, h100: DeviceFacts) -> None:
    for width, height in [
        (128, 192),
        (1, 70),
        (65, 63),
    ]:
        for name in ["transpose", "transpose_tiled", "transpose_padded"]:
            kernel = CATALOGUE[name]
            idata = np.arange(width * height, dtype="i4")
            call = call_of(kernel, {"odata": idata, "idata": idata}, width=width, height=height)
            guarded = {"odata": Guarded(np.full_like(idata, -1)), "idata": Guarded(idata)}
            run(library, kernel.shape(h100, call), kernel, "i4", call, guarded)
            assert guarded["odata"].intact, (width, name)
            np.testing.assert_array_equal(
                guarded["odata"].array.reshape(width, height), idata.reshape(height, width).T
            )


def test_rereading_goes_through_every_element_whatever_the_stride(
    library: ctypes.CDLL, h100: DeviceFacts
) -> None:
    for blocks in [None, 1, 3]:
        for stride in [1, 2, 32, 1000]:
            kernel, x = CATALOGUE["reread"], np.arange(32_000, dtype="i4")
            call = call_of(kernel, {"y": x, "x": x}, blocks, times=2, stride=stride)
            assert kernel.problem(call) is None, (blocks, stride)
            guarded = {"y": Guarded(np.full_like(x, -1)), "x": Guarded(x)}
            run(library, kernel.shape(h100, call), kernel, "i4", call, guarded)
            assert guarded["y"].intact, (blocks, stride)
            np.testing.assert_array_equal(guarded["y"].array, x.reshape(-1, stride).T.reshape(-1))


def test_every_pass_reads_every_tile_whatever_the_grid(
    library: ctypes.CDLL, h100: DeviceFacts
) -> None:
    for blocks in [1, 2, 5]:
        # 8, 16 and 40 warps on 8 tiles: as many as tiles, a multiple of them, and five times as many.
        kernel, a = CATALOGUE["l2_read"], np.arange(8 * 1024, dtype="i4")
        arrays = {"a": a, "sums": np.full(8 * 11, -1, dtype="i4")}
        call = call_of(kernel, arrays, blocks, repeats=11)
        guarded = {key: Guarded(array) for key, array in arrays.items()}
        run(library, kernel.shape(h100, call), kernel, "i4", call, guarded)
        assert guarded["sums"].intact, blocks
        np.testing.assert_array_equal(
            guarded["sums"].array, a.reshape(8, 1024).sum(axis=1, dtype="i4").repeat(11)
        )


def test_a_walk_goes_on_where_the_last_one_ended(library: ctypes.CDLL, h100: DeviceFacts) -> None:
    kernel, rng = CATALOGUE["chase_onward"], np.random.default_rng(11)
    arrays = arguments_of("chase_onward", 16 * 100, "i4", rng)
    arrays["out"][:] = -3  # as a random start may be: taken modulo the nodes, unsigned
    guarded = {key: Guarded(array) for key, array in arrays.items()}
    call = call_of(kernel, arrays, steps=30)
    node = (2**32 - 3) % 100
    for _ in range(5):
        run(library, kernel.shape(h100, call), kernel, "i4", call, guarded)
        for _ in range(30):
            node = int(arrays["nodes"][16 * node])
        assert guarded["out"].array.tolist() == [node]


def run(
    library: ctypes.CDLL, shape: LaunchShape, kernel: Any, dtype: str, call: Any, guarded: Any
) -> None:
    arguments: list[Any] = []
    for item in kernel.arguments_of(call):
        if isinstance(item, int):
            arguments.append(ctypes.c_ulonglong(item))
        elif item in guarded:
            arguments.append(ctypes.c_void_p(guarded[item].array.ctypes.data))
        else:
            c_type = C_TYPES[dtype][1]
            value = call.scalars[item]
            arguments.append(c_type(int(value)) if dtype == "i4" else c_type(value))
    sizes = (ctypes.c_uint(n) for n in (shape.blocks, shape.threads, shape.shared_bytes))
    getattr(library, f"{kernel.name}_{dtype}_{shape.vectors}")(*sizes, *arguments)
    library.wrote_past_shared_memory.restype = library.got_stuck.restype = ctypes.c_bool
    assert not library.got_stuck(), (
        f"{kernel.name}: threads wait at a barrier that others do not come to"
    )
    assert not library.wrote_past_shared_memory(), (
        f"{kernel.name}: written past the shared memory of its launch shape"
    )
