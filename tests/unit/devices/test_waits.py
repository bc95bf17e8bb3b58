"""The calls that make the host wait, and the line that called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_gpumem.devices.user_lines import PACKAGE, line_of


def test_the_calls_that_wait() -> None:
    for name, call in [
        ("cuCtxSynchronize", "cuCtxSynchronize"),
        ("cuStreamSynchronize", "cuStreamSynchronize"),
        ("cuMemFree_v2", "cuMemFree"),
        ("cuMemcpyDtoH_v2", "cuMemcpyDtoH"),
        ("cuMemcpy2DUnaligned_v2", "cuMemcpy2DUnaligned"),
        ("cuMemcpyDtoD_v2", None),
        ("cuMemcpyPeer", None),
        ("cuMemcpyHtoDAsync_v2", None),
        ("cuMemFreeAsync", None),
        ("cuLaunchKernel", None),
    ]:
        cuda = pytest.importorskip("pytest_gpumem.devices.cuda.waits", reason="needs cuda-bindings")
        match = cuda.CALLS.fullmatch(name)
        assert (match and match[1]) == call


def test_the_innermost_line_of_the_user() -> None:
    found: list[tuple[str, int, str]] = []

    def users() -> None:
        library = compile(
            "found.append(line_of(sys._getframe()))", str(Path(PACKAGE, "inside.py")), "exec"
        )
        exec(library, {"found": found, "line_of": line_of, "sys": sys})

    users()
    ((file, line, function),) = found
    assert (file, line, function) == (__file__, users.__code__.co_firstlineno + 4, "users")
