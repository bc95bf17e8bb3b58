"""pytest-xdist: which process of a session this is, what its processes tell each other, and the GPU of each worker."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NoReturn

import pytest

from pytest_gpumem.baselines.storage import RemoteStorage, Storage, storage
from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.plugin.gpus import VISIBLE, orders
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import Settings

SESSION = "gpumem_session"  # key of xdist's `workerinput`: device and baseline of the controller, which stores the rows of all workers
REFUSED = "gpumem_refused"  # key of xdist's `workeroutput`: why the worker cannot take part
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number among the workers of that machine, from 0 on


def is_worker(config: pytest.Config) -> bool:
    """True in a worker, which runs the tests that the controller hands it."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """True in the process that hands the tests to workers, and runs none itself."""
    return not is_worker(config) and getattr(config.option, "dist", "no") != "no"


def under_xdist(config: pytest.Config) -> bool:
    """True in both."""
    return is_worker(config) or is_controller(config)


def refuse_workers(config: pytest.Config, what: str) -> None:
    """Raises `pytest.UsageError`: the session has workers; `what` says what one process does."""
    if under_xdist(config):
        raise pytest.UsageError(f"gpumem: {what}, not under xdist; leave out -n")


def worker_count(config: pytest.Config) -> int:
    """Processes that run tests: the controller's workers, or 1."""
    if not is_controller(config):
        return 1
    return sum(int(count) if times else 1 for count, times, _ in (spec.partition("*") for spec in config.option.tx))


def prepare(config: pytest.Config, *, off: bool = False) -> None:
    """With workers or `off`, switch pytest-benchmark off as its option does: left to itself it says that nothing is measured.
    `--dist` without workers distributes nothing, and pytest-benchmark is to know it."""
    option = config.option
    if is_controller(config) and not option.tx:
        option.dist = "no"
    if off or under_xdist(config):
        option.benchmark_disable, option.benchmark_enable = True, False


# What a worker tells the controller at its end


def send(config: pytest.Config, key: str, value: object) -> None:
    """In a worker: leave a plain value for the controller, which gets it when the worker has ended well."""
    config.workeroutput[key] = value  # type: ignore[attr-defined]


def sent(node: Any, key: str) -> Any:
    """In the controller: what a worker has left; None if it left nothing, as one that crashed. `node`: of `pytest_testnodedown`."""
    return getattr(node, "workeroutput", {}).get(key)


class Refusal:
    """In a worker that cannot take part: ends it before it collects. xdist swallows a usage error of a worker, so the controller raises it:
    no worker runs a test before all of them have collected.
    """

    def __init__(self, config: pytest.Config, error: pytest.UsageError) -> None:
        self._config = config
        self._why = str(error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> NoReturn:
        send(self._config, REFUSED, self._why)
        raise pytest.exit.Exception(self._why, returncode=pytest.ExitCode.USAGE_ERROR)


# What the controller tells its workers


def baseline_of_session(config: pytest.Config) -> Storage | None:
    """In a worker, the place of the baseline, as the controller found it: a worker may run in another folder. One on the controller's
    machine reads the copy that the controller brought up to date."""
    given = getattr(config, "workerinput", {}).get(SESSION)
    return None if given is None else storage(given["baseline"], offline=given["offline"])


def check_worker(config: pytest.Config, facts: DeviceFacts, place: Storage) -> None:
    """Raises `pytest.UsageError`: in a worker, whose GPU is of another model than the session's, or which has not its baseline."""
    given: Mapping[str, Any] | None = getattr(config, "workerinput", {}).get(SESSION)
    if given is None:
        return
    if facts.key != given["key"]:
        raise pytest.UsageError(
            f"gpumem: its device is {facts.name} ({facts.key}), the session's is {given['name']} ({given['key']}); accepted are workers "
            "with GPUs of one model: run each model in a session of its own"
        )
    if given["exists"] and not place.folder.exists() and not isinstance(place, RemoteStorage):
        raise pytest.UsageError(
            f"gpumem: the baseline {place} is a folder of the machine that started this worker, which {platform.node()} does not have; "
            "accepted for workers on other machines is a URL, or a folder that all of them share"
        )


def own_in_turn(environment: Mapping[str, str], settings: Settings, chosen: DeviceChoice) -> str | None:
    """In a worker on another machine, the value of `CUDA_VISIBLE_DEVICES` under which its own GPU is device 0; None if device 0 is."""
    if TURN not in environment or ":" in settings.device or chosen.facts.simulated:
        return None
    every = orders(chosen.gpus, chosen.alike, environment.get(VISIBLE))
    return every[int(environment[TURN]) % len(every)] if len(every) > 1 else None


class Controller:
    """In the controller: gives each worker a GPU of its own, and tells it what it must have; ends the session if a worker has not.

    With more workers than GPUs, some share one and take turns. Every worker sees all GPUs, its own as device 0, so that code which names
    no device, or device 0, runs there. The GPU stands in the worker's specification: the worker that replaces a crashed one has the same.
    """

    def __init__(self, settings: Settings, chosen: DeviceChoice, baseline: Storage) -> None:
        several = ":" not in settings.device and not chosen.facts.simulated  # "cuda:1" names one GPU for all
        self._orders = orders(chosen.gpus, chosen.alike, os.environ.get(VISIBLE)) if several else []
        self._facts = chosen.facts
        self._baseline = baseline

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        workers = len(getattr(config.option, "tx", None) or ())  # none without xdist
        gpus = min(workers, len(self._orders))
        return [f"gpumem: {workers} workers measure on {gpus} GPUs"] if gpus > 1 else []

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

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        place, here = self._baseline, bool(node.gateway.spec.popen)
        offline = isinstance(place, RemoteStorage) and (here or place.offline)
        baseline = {"baseline": place.location, "offline": offline, "exists": place.folder.exists()}
        node.workerinput[SESSION] = {"key": self._facts.key, "name": self._facts.name, **baseline}

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if (why := sent(node, REFUSED)) is not None:
            spec = node.gateway.spec
            machine = "" if spec.popen else f" ({spec.ssh or spec.socket})"
            raise pytest.UsageError(printable(f"gpumem: worker {node.gateway.id}{machine}: {why.removeprefix('gpumem: ')}"))
