"""The GPUs of a session: one for each worker of pytest-xdist, and several for a test that asks for them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any

import pytest

from pytest_gpumem.devices.opening import Chosen
from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.plugin.marks import PEER_FIXTURE, marks_of, uses
from pytest_gpumem.settings import Settings, marker_keywords, of_marker

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the driver reads it once, when a process initialises CUDA
KEY = "gpumem_device"  # key of xdist's `workerinput`: `DeviceFacts.key` of the controller, which stores the rows of all workers
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number among the workers of that machine, from 0 on
_MIG = "MIG-"


def orders(gpus: Sequence[str], alike: Collection[str], visible: str | None) -> list[str]:
    """The values of `CUDA_VISIBLE_DEVICES` under which each GPU of one model in turn is device 0, and the others follow.

    A process sees one MIG instance at most, the first in the list: of several, each is a GPU of its own.
    `gpus`: UUIDs of the GPUs that this process sees, in its order.
    `alike`: those of the model of the first.
    `visible`: `CUDA_VISIBLE_DEVICES` of this process, with indices, UUIDs or MIG instances; None if it is not set.
    """
    if gpus and gpus[0].startswith(_MIG):
        listed = [name.strip() for name in (visible or "").split(",")]
        return list(dict.fromkeys(name for name in listed if name.startswith(_MIG))) or [gpus[0]]
    return [",".join((first, *(other for other in gpus if other != first))) for first in gpus if first in alike]


def beginning_with(gpu: str | None, chosen: Chosen) -> str | None:
    """The value of `CUDA_VISIBLE_DEVICES` under which a GPU is device 0; None if it is that of the session, or is not among them."""
    if gpu is None or gpu == chosen.facts.uuid:
        return None
    every = orders(chosen.gpus, chosen.alike, os.environ.get(VISIBLE))
    return next((order for order in every if order.split(",")[0] == gpu), None)


def reserved(item: pytest.Item, chosen: Chosen) -> tuple[str, ...]:
    """UUIDs of the GPUs that a test has for itself: one, two if it uses `peer_buffer`, or as many as its marker says.
    Raises `Unsupported`: the marker asks for more than there are.
    """
    asked = of_marker(marker_keywords(marks_of(item)), "gpus")
    there = max(1, len(chosen.gpus))
    if asked is not None and asked > there:
        raise Unsupported(f"the test needs {asked} GPUs (gpus={asked}); this process sees {there}")
    own = chosen.gpus or ((chosen.facts.uuid,) if chosen.facts.uuid is not None else ())
    return own[: max(asked or 1, 2 if uses(item, PEER_FIXTURE) else 1)]


def own_in_turn(environment: Mapping[str, str], settings: Settings, chosen: Chosen) -> str | None:
    """In a worker on another machine, the value of `CUDA_VISIBLE_DEVICES` under which its own GPU is device 0; None if device 0 is."""
    if TURN not in environment or ":" in settings.device or chosen.facts.simulated:
        return None
    every = orders(chosen.gpus, chosen.alike, environment.get(VISIBLE))
    return every[int(environment[TURN]) % len(every)] if len(every) > 1 else None


class WorkerGpus:
    """In the controller of xdist: gives each worker a GPU of its own; with more workers than GPUs, some share one and take turns.

    Every worker sees all GPUs, its own as device 0, so that code which names no device, or device 0, runs there. The GPU stands in the
    worker's specification: the worker that replaces a crashed one has the same.
    """

    def __init__(self, settings: Settings, chosen: Chosen) -> None:
        several = ":" not in settings.device and not chosen.facts.simulated  # "cuda:1" names one GPU for all
        self._orders = orders(chosen.gpus, chosen.alike, os.environ.get(VISIBLE)) if several else []
        self._key = chosen.facts.key

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        workers = len(getattr(config.option, "tx", None) or ())  # none without xdist
        gpus = min(workers, len(self._orders))
        return [f"gpumem: {workers} workers measure on {gpus} GPUs"] if gpus > 1 else []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[KEY] = self._key

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        here = [spec for spec in specs if spec.popen]
        if len(self._orders) > 1:
            for spec, order in zip(here, cycle(self._orders), strict=False):
                spec.env.setdefault(VISIBLE, order)
        machines = Counter[object]()
        for spec in (spec for spec in specs if not spec.popen):  # which GPUs its machine has, it must find out itself
            machine = spec.ssh or spec.socket or spec.id
            spec.env.setdefault(TURN, str(machines[machine]))
            machines[machine] += 1
