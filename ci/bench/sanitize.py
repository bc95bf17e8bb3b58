"""Run every kernel of the catalogue under each tool of compute-sanitizer.

    python ci/bench/sanitize.py
    python ci/bench/sanitize.py --launch cuda       # what runs under each tool: every kernel once, at sizes that a slow tool can take

Needs a GPU and `compute-sanitizer` on the PATH. Exits with 1 if a tool finds anything or a result is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from kernel_calls import arguments_of, fitting

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Role
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.target import KernelTarget
from pytest_gpumem.memory.buffers import Arena

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = 9
"""Exit code that the sanitizer gives for a finding."""
AWKWARD = 100_003
"""Elements: a prime, so that every vector width and block size leaves a tail."""
SCALARS = {"offset_copy": {"offset": 7}, "stride_copy": {"stride": 5}}
SIZES = {"permuted_copy": AWKWARD // 1024 * 1024, "reset_data_shared": AWKWARD // 2}
"""Of kernels that take whole segments alone, or a table that fits into the shared memory of a block."""


def sizes_of(name: str, dtype: str) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each array, and scalars, for a valid call of a kernel."""
    rng = np.random.default_rng(1)
    arrays = arguments_of(name, SIZES.get(name, AWKWARD), dtype, rng)
    scalars = {"steps": 3000} if name.startswith("chase") else SCALARS.get(name, {})
    return {key: array.size for key, array in arrays.items()}, {**fitting(name, arrays), **scalars}


def launch_every_kernel(choice: str) -> int:
    """Launch every kernel once for each element type, at small and awkward sizes, and check its result."""
    device = choose(choice).open()
    kernels, launched = Kernels(device), 0
    for name, kernel in CATALOGUE.items():
        for dtype in kernel.dtypes:
            arena = Arena(device, seed=launched)
            sizes, scalars = sizes_of(name, dtype)
            arrays = [p.name for p in kernel.parameters if p.role is not Role.SCALAR]
            buffers = tuple(arena.buffer((sizes[array],), dtype) for array in arrays)
            bound = getattr(kernels, name)
            target = KernelTarget(bound, buffers, scalars, arena)
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
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
        command += [sys.executable, __file__, "--launch", "cuda"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [
            line.strip("= ")
            for line in run.stdout.splitlines()
            if "SUMMARY" in line or "every result right" in line
        ]
        seen[tool] = {"exit": run.returncode, "said": said}
        print(f"{tool:10s} exit {run.returncode}: {'; '.join(said)}", flush=True)
    return int(any(result["exit"] for result in seen.values()))


if __name__ == "__main__":
    sys.exit(main())
