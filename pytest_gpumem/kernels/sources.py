"""The folder of the CUDA sources, and the options that every compilation of them needs.

They live in the repository's top-level `kernels/` and ship inside the wheel as
`pytest_gpumem/kernels/cu/`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

COMPILE_OPTIONS = ("--std=c++17",)
"""Options of NVRTC and nvcc alike, besides the architecture. The sources include no header and need
no other option."""

CPP_TYPES = {"f4": "float", "f8": "double", "i4": "int"}  # of the templates' elements

_PACKAGE = Path(__file__).parent


def folder() -> Path:
    """Return the folder of the `.cu` files: of the wheel, else of the checkout.

    Raises `FileNotFoundError`: the installation is incomplete.
    """
    shipped, checkout = _PACKAGE / "cu", _PACKAGE.parent.parent / "kernels"
    for candidate in (shipped, checkout):
        if any(candidate.glob("*.cu")):
            return candidate
    raise FileNotFoundError(
        f"no CUDA sources in {shipped} (installed) nor in {checkout} (checkout): reinstall "
        "pytest-gpumem"
    )


def read(name: str) -> str:
    """Return the text of a source file, such as "stream.cu"."""
    path = folder() / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        present = ", ".join(sorted(p.name for p in path.parent.glob("*.cu")))
        raise FileNotFoundError(
            f"no kernel source {name!r} in {path.parent}; there are {present}"
        ) from None


def fingerprint(name: str) -> str:
    """Return the SHA-256 of a source's text, in hexadecimal."""
    return hashlib.sha256(read(name).encode("utf-8")).hexdigest()
