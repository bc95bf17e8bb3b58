"""Fixtures of this project's own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvtx_injection import Trace, build

pytest_plugins = ["pytester"]


@pytest.fixture(scope="session")
def _nvtx_library(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return build(tmp_path_factory.mktemp("nvtx"))


@pytest.fixture
def nvtx_trace(_nvtx_library: Path | None, tmp_path: Path) -> Trace:
    """Records the NVTX events of child processes that get its `environment`; skips without a C compiler or NVTX."""
    pytest.importorskip("nvtx", reason="nvtx has no wheel for this platform")
    if _nvtx_library is None:
        pytest.skip("no C compiler to build the NVTX injection library with")
    return Trace(_nvtx_library, tmp_path / "nvtx.log")
