"""Run every kernel of the catalogue under each tool of compute-sanitizer.

    python ci/bench/sanitize.py --json ci/records/nvidia-h200/sanitizer.json
    python ci/bench/sanitize.py --launch cuda       # what runs under each tool: every kernel once, at sizes that a slow tool can take

Needs a GPU and `compute-sanitizer` on the PATH. Exits with 1 if a tool finds anything or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Kernel, Role
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.kernels.latency import NODE_BYTES
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.target import KernelTarget
from pytest_gpumem.memory.buffers import Arena

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = 9
"""Exit code that the sanitizer gives for a finding."""
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


def argument_sizes(
    kernel: Kernel, itemsize: int
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
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
        for scalars in {
            "offset_copy": ({"offset": 0}, {"offset": 7}),
            "stride_copy": ({"stride": 1}, {"stride": 5}),
        }.get(kernel.name, ({},)):
            # Permutations are of whole segments; everything else takes a tail.
            yield (
                dict.fromkeys(
                    arrays, AWKWARD // 1024 * 1024 if kernel.name == "permuted_copy" else AWKWARD
                ),
                scalars,
            )


def launch_every_kernel(choice: str) -> int:
    """Launch every kernel once for each element type, at small and awkward sizes, and check its result."""
    device = choose(choice).open()
    kernels, launched = Kernels(device), 0
    for name, kernel in CATALOGUE.items():
        for dtype in kernel.dtypes:
            arena = Arena(device, seed=launched)
            itemsize = int(dtype[1:])
            for sizes, scalars in argument_sizes(kernel, itemsize):
                buffers = [
                    arena.buffer((sizes[p.name],), dtype)
                    for p in kernel.parameters
                    if p.role is not Role.SCALAR
                ]
                target = KernelTarget(
                    getattr(kernels, name), tuple(buffers), scalars, arena, arena.stream
                ).target
                if target.verify is not None:
                    target.check()
                target.close()
                launched += 1
            arena.close()
    device.close()
    print(f"{launched} launches of {len(CATALOGUE)} kernels, every result right")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    parser.add_argument(
        "--launch", metavar="DEVICE", help="launch every kernel here, without a tool"
    )
    arguments = parser.parse_args()
    if arguments.launch:
        return launch_every_kernel(arguments.launch)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA Toolkit")
    seen = {}
    for tool in TOOLS:
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            sys.executable,
            __file__,
            "--launch",
            "cuda",
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [
            line.strip("= ")
            for line in run.stdout.splitlines()
            if "SUMMARY" in line or "every result right" in line
        ]
        seen[tool] = {"exit": run.returncode, "said": said}
        print(f"{tool:10s} exit {run.returncode}: {'; '.join(said)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n")
    return int(any(result["exit"] for result in seen.values()))


if __name__ == "__main__":
    sys.exit(main())
