"""Launch every kernel of the catalogue once for each element type, at a small and an awkward size, and check its result.

Made to run under compute-sanitizer, which is too slow for the suite's sizes:

    compute-sanitizer --tool memcheck --error-exitcode 1 python ci/bench/launch_every_kernel.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Kernel, Role
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.kernels.latency import NODE_BYTES
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.target_kernel import kernel_target
from pytest_gpumem.memory.buffers import Arena

TILES = 37
"""Not a multiple of anything that a block or a warp handles."""
PASSES = 5
"""Over a footprint."""
MATRIX = (131, 761)
"""Two primes: tiles at both edges are ragged."""
LARGE_TABLE = 99 * 1024
"""Bytes of shared memory that every device of compute capability 8.0 and more has for a block; beyond 48 KiB a kernel opts in."""
AWKWARD = 100_003
"""Elements: a prime, so that every vector width and block size leaves a tail."""


def argument_sizes(kernel: Kernel, itemsize: int) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Elements of each array, and scalars, for a few valid calls of a kernel."""
    arrays = [p.name for p in kernel.parameters if p.role is not Role.SCALAR]
    if kernel.name in ("read", "dot"):
        elements = TILES * tile_bytes(kernel.name) // itemsize
        yield {**dict.fromkeys(arrays, elements), "sums": TILES}, {}
    elif kernel.name == "l2_read":
        yield {"a": TILES * TILE_BYTES // itemsize, "sums": TILES * PASSES}, {"repeats": PASSES}
    elif kernel.name.startswith("transpose"):
        for width, height in (MATRIX, MATRIX[::-1]):
            yield dict.fromkeys(arrays, width * height), {"width": width, "height": height}
    elif kernel.name.startswith("chase"):
        yield {"nodes": 1024 * NODE_BYTES // itemsize, "out": 1}, {"steps": 3000}
    elif kernel.name in ("reset_data", "reset_data_shared", "sliding_window"):
        small = next(name for name in arrays if "persistent" in name)
        yield {**dict.fromkeys(arrays, AWKWARD), small: 1009}, {}
        if kernel.name == "reset_data_shared":
            yield {**dict.fromkeys(arrays, AWKWARD), small: LARGE_TABLE // itemsize}, {}
    else:
        for scalars in {"offset_copy": ({"offset": 0}, {"offset": 7}), "stride_copy": ({"stride": 1}, {"stride": 5})}.get(
            kernel.name, ({},)
        ):
            # Permutations are of whole segments; everything else takes a tail.
            yield dict.fromkeys(arrays, AWKWARD // 1024 * 1024 if kernel.name == "permuted_copy" else AWKWARD), scalars


def main() -> int:
    device = choose(sys.argv[1] if len(sys.argv) > 1 else "cuda").open()
    kernels, launched = Kernels(device), 0
    for name, kernel in CATALOGUE.items():
        for dtype in kernel.dtypes:
            arena = Arena(device, seed=launched)
            itemsize = int(dtype[1:])
            for sizes, scalars in argument_sizes(kernel, itemsize):
                buffers = [arena.buffer((sizes[p.name],), dtype) for p in kernel.parameters if p.role is not Role.SCALAR]
                target = kernel_target(getattr(kernels, name), tuple(buffers), scalars, arena, arena.stream)
                if target.check is not None:
                    target.check()
                target.close()
                launched += 1
            arena.close()
    device.close()
    print(f"{launched} launches of {len(CATALOGUE)} kernels, every result right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
