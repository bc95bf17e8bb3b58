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
    ("facts", "sampler", "fallback"),
    [
        ({}, "blocked", True),
        ({"mode": "dirty-cold"}, "blocked", True),
        ({"kind": "callable"}, "blocked", True),
        ({"kind": "case"}, "blocked", True),
        ({"managed": ("a buffer",)}, "blocked", True),
        ({"waits": True}, "host", False),
        ({"mode": "hot"}, "batched", True),
        ({"mode": "hot", "kind": "callable"}, "batched", True),
        ({"mode": "hot", "kind": "callable", "restores": True}, "blocked", True),
        ({"profiled": True}, "plain", False),
        ({"profiled": True, "mode": "hot"}, "plain", False),
        ({"requested": "host"}, "host", False),
        ({"requested": "host", "profiled": True}, "plain", False),
    ],
)
def test_a_sampler_is_chosen(facts: dict[str, Any], sampler: str, fallback: bool) -> None:
    choice = chosen(**facts)
    assert (choice.sampler, choice.fallback) == (sampler, fallback)
    assert choice.reason


def test_batched_refuses_a_cold_mode() -> None:
    with pytest.raises(BadCall, match='goes with mode "hot", not "clean-cold"'):
        chosen("batched")
