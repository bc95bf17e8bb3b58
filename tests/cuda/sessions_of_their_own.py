"""For tests that start sessions on the GPU, which have it for themselves."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from pytest_gpumem.plugin.state import SESSION


def need_modules(*names: str) -> None:
    """Skip where one of these modules is missing; imports none: pytester would forget it, and PyTorch cannot be imported twice."""
    if missing := [name for name in names if find_spec(name) is None]:
        pytest.skip(f"could not import {missing[0]!r}")


def need_a_free_gpu(config: pytest.Config) -> None:
    """Skip without a GPU, and under --gpumem: the session around would hold the GPU that those inside wait for."""
    if config.stash.get(SESSION, None) is not None:
        pytest.skip("starts sessions that have the GPU for themselves: run this without --gpumem")
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"needs a GPU: {error}")
    pynvml.nvmlShutdown()
