"""Which process of a session under xdist this is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cases import naming

from pytest_gpumem.plugin.workers import (
    Channel,
    given,
    hands_out,
    in_parts,
    is_part,
    refuse_workers,
)


def config(*tx: str, worker: bool = False, **options: Any) -> Any:
    """A configuration as xdist leaves it; without `dist`, as where xdist is not installed."""
    option = SimpleNamespace(
        **{"tx": [*tx], "benchmark_disable": False, "benchmark_enable": True, **options}
    )
    return SimpleNamespace(option=option, **({"workerinput": {}} if worker else {}))


PLAIN = config()
ALONE = config(dist="no")
CONTROLLER = config("2*popen", dist="load")
WORKER = config(dist="no", worker=True)
WORKER_OF_CONTROLLER = config("2*popen", dist="load", worker=True)


def test_a_process_is_a_worker_or_the_controller_or_alone() -> None:
    for one, worker, controller in [
        (PLAIN, False, False),
        (ALONE, False, False),
        (CONTROLLER, False, True),
        (WORKER, True, False),
        (WORKER_OF_CONTROLLER, True, False),
    ]:
        with naming(one):
            assert (is_part(one), hands_out(one), in_parts(one)) == (
                worker,
                controller,
                worker or controller,
            )
            if worker or controller:
                with pytest.raises(
                    pytest.UsageError,
                    match=r"^gpumem: a sweep is of one process, not under xdist; leave out -n$",
                ):
                    refuse_workers(one, "a sweep is of one process")
            else:
                refuse_workers(one, "a sweep is of one process")


def test_a_worker_that_crashed_has_sent_nothing() -> None:
    worker, received = config(worker=True), list[object]()
    worker.workeroutput = {}
    channel = Channel(worker)
    channel.carry("figure", lambda: 3, received.append)
    channel.give("place", lambda here: "folder" if here else None)
    channel.pytest_testnodedown(SimpleNamespace())
    channel.pytest_testnodedown(SimpleNamespace(workeroutput={}))
    assert received == []
    channel.send()
    channel.pytest_testnodedown(SimpleNamespace(workeroutput=worker.workeroutput))
    assert received == [3]
    node = SimpleNamespace(
        workerinput=worker.workerinput, gateway=SimpleNamespace(spec=SimpleNamespace(popen=True))
    )
    channel.pytest_configure_node(node)
    assert (given(worker, "place"), given(worker, "other"), given(ALONE, "place")) == (
        "folder",
        None,
        None,
    )
