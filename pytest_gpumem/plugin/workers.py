"""pytest-xdist: which process of a session this is, what its processes tell each other, and the GPU of each worker.

Other modules know no more of it than this: a session may have parts, whose results the process that hands out the tests has.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NoReturn

import pytest

from pytest_gpumem.baselines.storage import RemoteStorage, Storage, storage
from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.plugin.gpus import VISIBLE, orders
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import BASELINE_OF, Settings

SESSION = "session"  # what a part is given: device and baseline of the whole, which stores the rows of all parts
REFUSED = "refused"  # what a part sends: why it cannot take part
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number among the workers of that machine, from 0 on


def is_part(config: pytest.Config) -> bool:
    """True in a worker, which runs the tests that are handed to it: another process has its results."""
    return hasattr(config, "workerinput")


def hands_out(config: pytest.Config) -> bool:
    """True in the controller, which hands the tests to workers, and runs none itself."""
    return not is_part(config) and getattr(config.option, "dist", "no") != "no"


def in_parts(config: pytest.Config) -> bool:
    """True in both."""
    return is_part(config) or hands_out(config)


def refuse_workers(config: pytest.Config, what: str) -> None:
    """Raises `pytest.UsageError`: the session has workers; `what` says what one process does."""
    if in_parts(config):
        raise pytest.UsageError(f"gpumem: {what}, not under xdist; leave out -n")


BY_XDIST = "xdist"  # in place of True: pytest-benchmark is off because of workers alone


def prepare(config: pytest.Config) -> None:
    """With workers, switch pytest-benchmark off as its option does: left to itself it says that nothing is measured.
    `--dist` without workers distributes nothing, and pytest-benchmark is to know it."""
    option = config.option
    if hands_out(config) and not option.tx:
        option.dist = "no"
    if in_parts(config):
        off = benchmarks_are_off(config)
        # xdist gives the workers the options of the controller.
        option.benchmark_disable, option.benchmark_enable = off or BY_XDIST, False


def benchmarks_are_off(config: pytest.Config) -> bool:
    """True if the user has switched pytest-benchmark off."""
    return config.option.benchmark_disable is True and not config.option.benchmark_enable


# What the processes of a session tell each other: plain values, by a key


def given(config: pytest.Config, key: str) -> Any:
    """In a part: what it was given; None if nothing."""
    return getattr(config, "workerinput", {}).get(f"gpumem_{key}")


class Channel:
    """Both ends of what the processes of a session tell each other. Silent in a session of one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._sends: dict[str, Callable[[], object]] = {}
        self._receives: dict[str, Callable[[Any], None]] = {}
        self._gives: dict[str, Callable[[bool], object]] = {}
        self._collected: list[Callable[[Iterable[str]], None]] = []

    def give(self, key: str, value: Callable[[bool], object]) -> None:
        """Give every part a value before it starts. `value`: of a part, by whether it is on this machine; None gives nothing."""
        self._gives[key] = value

    def carry(self, key: str, send: Callable[[], object], receive: Callable[[Any], None]) -> None:
        """Carry a value of a part, as it is at the part's end, to the process that has the results; not from one that crashed."""
        self._sends[key], self._receives[key] = send, receive

    def collect(self, take: Callable[[Iterable[str]], None]) -> None:
        """Take the node ids of the tests that the parts are to run: the process that hands them out collects nothing itself."""
        self._collected.append(take)

    def send(self) -> None:
        """In a part, at its end."""
        for key, value in self._sends.items():
            self._config.workeroutput[f"gpumem_{key}"] = value()  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        here = bool(node.gateway.spec.popen)
        for key, value in self._gives.items():
            node.workerinput[f"gpumem_{key}"] = value(here)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        for take in self._collected:
            take(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {})
        if (why := sent.get(f"gpumem_{REFUSED}")) is not None:
            spec = node.gateway.spec
            machine = "" if spec.popen else f" ({spec.ssh or spec.socket})"
            raise pytest.UsageError(
                printable(
                    f"gpumem: worker {node.gateway.id}{machine}: {why.removeprefix('gpumem: ')}"
                )
            )
        for key, receive in self._receives.items():
            if (value := sent.get(f"gpumem_{key}")) is not None:
                receive(value)


class Refusal:
    """In a worker that cannot take part: ends it before it collects. xdist swallows a usage error of a worker, so the controller raises it:
    no worker runs a test before all of them have collected.
    """

    def __init__(self, config: pytest.Config, error: pytest.UsageError) -> None:
        self._why = str(error)
        self._channel = Channel(config)
        self._channel.carry(REFUSED, lambda: self._why, lambda _: None)

    def pytest_collection(self) -> NoReturn:
        self._channel.send()
        raise pytest.exit.Exception(self._why, returncode=pytest.ExitCode.USAGE_ERROR)


# What the controller tells its workers


def baseline_of_session(config: pytest.Config) -> Storage | None:
    """In a worker, the place of the baseline, as the controller found it: a worker may run in another folder. One on the controller's
    machine reads the copy that the controller brought up to date."""
    session = given(config, SESSION)
    return None if session is None else storage(session["baseline"], offline=session["offline"])


def settings_of_session(config: pytest.Config, settings: Settings) -> Settings:
    """The settings with BASE of a gate, which a worker learns from the controller."""
    session = given(config, SESSION)
    # not of a session that a test starts
    base = os.environ.pop(BASELINE_OF, None) if session is None else session["baseline_of"]
    return settings._replace(baseline_of=base)


def check_worker(config: pytest.Config, facts: DeviceFacts, place: Storage) -> None:
    """Raises `pytest.UsageError`: in a worker, whose GPU is of another model than the session's, or which has not its baseline."""
    whole: Mapping[str, Any] | None = given(config, SESSION)
    if whole is None:
        return
    if facts.key != whole["key"]:
        raise pytest.UsageError(
            f"gpumem: its device is {facts.name} ({facts.key}), the session's is {whole['name']} ({whole['key']}); accepted are workers "
            "with GPUs of one model: run each model in a session of its own"
        )
    if whole["exists"] and not place.folder.exists() and not isinstance(place, RemoteStorage):
        raise pytest.UsageError(
            f"gpumem: the baseline {place} is a folder of the machine that started this worker, which {platform.node()} does not have; "
            "accepted for workers on other machines is a URL, or a folder that all of them share"
        )


def own_in_turn(
    environment: Mapping[str, str], settings: Settings, chosen: DeviceChoice
) -> str | None:
    """In a worker on another machine, the value of `CUDA_VISIBLE_DEVICES` under which its own GPU is device 0; None if device 0 is."""
    if TURN not in environment or ":" in settings.device or chosen.facts.simulated:
        return None
    every = orders(chosen.gpus, chosen.alike, environment.get(VISIBLE))
    return every[int(environment[TURN]) % len(every)] if len(every) > 1 else None


class Controller:
    """In the controller: gives each worker a GPU of its own, and tells it what it must have.

    With more workers than GPUs, some share one and take turns. Every worker sees all GPUs, its own as device 0, so that code which names
    no device, or device 0, runs there. The GPU stands in the worker's specification: the worker that replaces a crashed one has the same.
    """

    def __init__(
        self, settings: Settings, chosen: DeviceChoice, baseline: Storage, channel: Channel
    ) -> None:
        channel.give(SESSION, self._session)
        # "cuda:1" names one GPU for all
        several = ":" not in settings.device and not chosen.facts.simulated
        self._orders = orders(chosen.gpus, chosen.alike, os.environ.get(VISIBLE)) if several else []
        self._facts = chosen.facts
        self._baseline = baseline
        self._baseline_of = settings.baseline_of

    def header(self, config: pytest.Config) -> list[str]:
        """How many workers measure on how many GPUs, if several do."""
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
        for spec in (
            spec for spec in specs if not spec.popen
        ):  # which GPUs its machine has, it must find out itself
            machine = spec.ssh or spec.socket or spec.id
            spec.env.setdefault(TURN, str(machines[machine]))
            machines[machine] += 1

    def _session(self, here: bool) -> dict[str, object]:
        place = self._baseline
        return {
            "key": self._facts.key,
            "name": self._facts.name,
            "baseline": place.location,
            "baseline_of": self._baseline_of,
            "offline": here,
            "exists": place.folder.exists(),
        }
