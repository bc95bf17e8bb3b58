"""What refers to an object, in words."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from pytest_gpumem.devices.allocation_sites import MOST, referrers_of


class Array:
    """Stands for an array of a library."""


class Model:
    def __init__(self, array: Array) -> None:
        self.weights = {"w": [None, array]}


class Slotted:
    __slots__ = ("buffer",)


@pytest.fixture
def app() -> Iterator[Any]:
    module = ModuleType("app")
    sys.modules["app"] = module
    yield module
    del sys.modules["app"]


def kept(app: Any, way: str) -> Array:
    """An array that a module holds in some way; a weak reference would do, if the search did not need the object."""
    array = Array()
    if way == "list":
        app.cache = [0, array]
    elif way == "dict":
        app.cache = {"x": (1, array), 7: None}
    elif way == "attribute":
        app.model = Model(array)
    elif way == "slot":
        app.held = Slotted()
        app.held.buffer = array
    elif way == "class":
        app.Layer = type("Layer", (), {"cache": [array], "__module__": "app"})
    elif way == "closure":
        app.step = lambda: array
    elif way == "default":

        def step(x: Any = array) -> None: ...

        app.step = step
    return array


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("list", "`cache[1]` of the module app"),
        ("dict", "`cache['x'][1]` of the module app"),
        ("attribute", "`model.weights['w'][1]` of the module app"),
        ("slot", "`held.buffer` of the module app"),
        ("class", "`Layer.cache[0]` of the module app"),
        ("closure", "`array` of the function kept.<locals>.<lambda>"),
        ("default", "`[0]` of the function kept.<locals>.step"),
    ],
)
def test_the_way_from_a_name(app: Any, way: str, text: str) -> None:
    array = kept(app, way)
    assert referrers_of(array, [id(sys._getframe())]) == (text,)


def test_a_traceback_keeps_the_local_variables_of_its_functions(app: Any) -> None:
    def train(batch: Array) -> None:
        raise KeyError("loss")

    array = Array()
    try:
        train(array)
    except KeyError as error:
        app.last = error
    (text,) = referrers_of(array, [id(sys._getframe())])
    assert text.startswith(f"`batch`, a local variable of train ({__file__}:")
    assert text.endswith(", which an exception's traceback keeps")


def test_the_value_of_a_fixture(app: Any) -> None:
    definition = type("FixtureDef", (), {"argname": "model"})()
    array = Array()
    definition.cached_result = (array, 0, None)
    app.manager = definition
    assert referrers_of(array, [id(sys._getframe())]) == ("the value of the fixture model",)


def test_what_everything_refers_to_is_told_in_a_few_ways(app: Any) -> None:
    array = Array()
    for number in range(500):
        setattr(app, f"list_{number}", [array])
    assert len(referrers_of(array, [id(sys._getframe())])) == MOST


def test_a_cycle_alone_has_no_name() -> None:
    model = Model(Array())
    model.me = model  # type: ignore[attr-defined]
    array = model.weights["w"][1]
    del model
    assert referrers_of(array, [id(sys._getframe())]) == ()
    gc.collect()
