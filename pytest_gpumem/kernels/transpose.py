"""Matrix transpose, three ways: strided writes, a tile in shared memory, a padded tile
(`kernels/transpose.cu`).

Matrices are dense and lie row by row: `idata` has `height` rows of `width` elements, `odata` has
`width` rows of `height`.
"""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.kernel import (
    SECTORS_COALESCED,
    SECTORS_SCATTERED,
    WARP,
    Access,
    Arrays,
    Call,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    grid,
    module_of,
    same_size,
    touch,
)
from pytest_gpumem.records.device import DeviceFacts

TILE = 64
"""Elements along each side of a tile. The guide's tile has 32, one for each bank; with 64 the
conflicts are the same, and a thread has four times the loads in flight."""

_ROWS = 4  # of a tile that a block handles at once; `ROWS` in the source
_THREADS = TILE * _ROWS


def _matrix(call: Call) -> tuple[int, int]:
    return int(call.scalars["width"]), int(call.scalars["height"])


def _shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
    width, height = _matrix(call)
    return grid(call, ceil_div(width, TILE) * ceil_div(height, TILE), _THREADS)


def _fits(call: Call) -> str | None:
    (width, height), size = _matrix(call), call.arrays["idata"].size
    if width * height != size:
        matrix = f"a matrix of width {width} and height {height} has {width * height} elements"
        return f"{matrix}; the arrays have {size}"
    return None


def _arguments(call: Call) -> tuple[str | int, ...]:
    return ("odata", "idata", *_matrix(call))


def _transpose(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    """Return the transpose; of a prefix its rows' first elements, which begin the first row."""
    source, width, height = arrays["idata"], int(scalars["width"]), int(scalars["height"])
    rows = source.size // width
    matrix = source[: rows * width].reshape(rows, width)
    if rows != height:
        matrix = matrix[:, :1]
    return {"odata": module_of(source).ascontiguousarray(matrix.T).reshape(-1).copy()}


def _kernel(name: str, entry: str, sectors: float, cycles: int) -> Kernel:
    """`sectors`: of a written request. `cycles`: on chip, to turn a warp's 32 words."""

    def accesses(call: Call) -> tuple[Access, ...]:
        return (
            touch("idata", "read", call),
            touch("odata", "write", call, sectors=sectors),
        )

    def on_chip_cycles(call: Call) -> float:
        return call.arrays["idata"].size / WARP * cycles

    return Kernel(
        name=name,
        parameters=(
            Parameter("odata", Role.WRITE),
            Parameter("idata", Role.READ),
            Parameter("width", Role.SCALAR, least=1),
            Parameter("height", Role.SCALAR, least=1),
        ),
        shape=_shape,
        accesses=accesses,
        source="transpose.cu",
        entry=entry,
        reference=_transpose,
        launch_arguments=_arguments,
        dtypes=("f4", "i4"),  # sectors and bank conflicts hold for 4-byte words
        section="CUDA C++ Best Practices Guide 9.2.3 Shared Memory: the transposed half of "
        "C = AA^T",
        checks=(same_size("odata", "idata"), _fits),
        on_chip_cycles=on_chip_cycles,
    )


# Cycles: a coalesced request touches a line, a strided one 32; a column of an unpadded tile is of
# a single bank.
KERNELS = (
    _kernel("transpose", f"transpose<{{dtype}}, {TILE}>", SECTORS_SCATTERED, 1 + WARP),
    _kernel(
        "transpose_tiled",
        f"transpose_tiled<{{dtype}}, {TILE}, {TILE}>",
        SECTORS_COALESCED,
        1 + 1 + WARP + 1,
    ),
    _kernel(
        "transpose_padded",
        f"transpose_tiled<{{dtype}}, {TILE}, {TILE + 1}>",
        SECTORS_COALESCED,
        1 + 1 + 1 + 1,
    ),
)
