"""The calls of the driver after which the kernels of an executable graph are no longer known."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.bindings.driver")

from cuda.bindings import driver

from pytest_gpumem.devices.cuda import modules


def test_each_call_that_changes_a_node_that_may_hold_kernels_is_followed() -> None:
    changing = re.compile(r"cuGraphExec(Kernel|ChildGraph|)NodeSetParams")
    calls = {name for name in dir(driver) if changing.fullmatch(name)}
    assert len(calls) == 3
    assert calls <= set(modules._GRAPHS_LOST)
