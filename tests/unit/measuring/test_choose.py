"""Which sampler is taken, and why."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.samplers import Choice, choose
from pytest_gpumem.measuring.target import Target, nothing


def chosen(requested: str = "auto", mode: str = "clean-cold", profiled: bool = False, **described: Any) -> Choice:
    nowhere: Any = None
    target = Target(**{"name": "it", "kind": "kernel", "stream": nowhere, "launch": nothing, **described})
    return choose(requested, target, mode, profiled=profiled)


@pytest.mark.parametrize(
    ("facts", "sampler"),
    [
        ({}, "blocked"),
        ({"mode": "dirty-cold"}, "blocked"),
        ({"kind": "callable"}, "blocked"),
        ({"managed": ("a buffer",)}, "blocked"),
        ({"waits": True}, "host"),
        ({"mode": "hot"}, "batched"),
        ({"mode": "hot", "kind": "callable"}, "batched"),
        ({"mode": "hot", "kind": "callable", "restores": True}, "blocked"),
        ({"profiled": True}, "plain"),
        ({"profiled": True, "mode": "hot"}, "plain"),
    ],
)
def test_auto(facts: dict[str, Any], sampler: str) -> None:
    choice = chosen(**facts)
    assert choice.sampler == sampler
    assert choice.reason


def test_what_was_chosen_may_fall_back() -> None:
    assert chosen().fallback
    assert chosen(kind="case").fallback
    assert chosen(mode="hot").fallback


def test_what_was_asked_for_is_taken_and_does_not_fall_back() -> None:
    choice = chosen("host")
    assert (choice.sampler, choice.fallback) == ("host", False)


def test_a_profiler_overrides_the_request() -> None:
    assert chosen("host", profiled=True).sampler == "plain"


def test_batched_refuses_a_cold_mode() -> None:
    with pytest.raises(BadCall, match='goes with mode "hot", not "clean-cold"'):
        chosen("batched")
