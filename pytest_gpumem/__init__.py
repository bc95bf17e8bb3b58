"""Fixtures, measurements and a gate for CUDA memory performance in pytest.

PYTEST_DONT_REWRITE: pytest warns of a plugin's package that was imported without its rewriting (see
`pytest_gpumem_entry`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.units import GB, KB, MB, GiB, KiB, MiB

if TYPE_CHECKING:
    from pytest_gpumem.measuring.case import Case as Case
    from pytest_gpumem.memory.buffers import Buffer as Buffer
    from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark as GpuBenchmark
    from pytest_gpumem.plugin.result import Result as Result

    __version__: str

__all__ = ["GB", "KB", "MB", "Buffer", "Case", "GiB", "GpuBenchmark", "KiB", "MiB", "Result"]

_PLACES = {
    "Buffer": "pytest_gpumem.memory.buffers",
    "Case": "pytest_gpumem.measuring.case",
    "GpuBenchmark": "pytest_gpumem.plugin.gpu_benchmark",
    "Result": "pytest_gpumem.plugin.result",
}


def __getattr__(name: str) -> object:
    # Lazy: pytest imports this package in every session, also in those without --gpumem.
    value: object
    if name in _PLACES:
        from importlib import import_module

        value = getattr(import_module(_PLACES[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("pytest-gpumem")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
