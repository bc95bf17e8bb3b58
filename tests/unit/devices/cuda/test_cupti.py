"""CUPTI serves one tool at a time: who has it, in words."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pytest_gpumem.devices.cuda.cupti import Callbacks, why_refused
from pytest_gpumem.devices.protocol import NotCounted

TAKEN = Exception("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")


def test_who_has_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    for profiles, whose in [(True, "PyTorch's"), (False, "another"), (None, "another")]:
        torch = SimpleNamespace(autograd=SimpleNamespace(_profiler_enabled=lambda on=profiles: on))
        # Its profiler takes CUPTI on a GPU alone.
        monkeypatch.setitem(sys.modules, "torch", None if profiles is None else torch)
        assert why_refused(TAKEN) == f"not read: {whose} profiler has CUPTI"
        assert (
            why_refused(Exception("CUPTI_ERROR_UNKNOWN\nmore"))
            == "CUPTI refuses callbacks: CUPTI_ERROR_UNKNOWN"
        )


def test_without_cupti_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)  # as where it is not installed
    callbacks = Callbacks()
    for _ in range(2):
        with pytest.raises(NotCounted, match="cupti-python cannot be imported"):
            callbacks.add("DRIVER_API", ("cuMemFree_v2",), print, print)
        with pytest.raises(NotCounted), callbacks.subscribed():
            pytest.fail("nothing is held")
