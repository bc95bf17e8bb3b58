"""Workers of pytest-xdist, which is the engine beyond one process, one GPU and one machine.

Other modules know that a session may have parts: the process that hands out tests has their
results.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import BASELINE_OF, Settings

SESSION = "session"  # what a part is given: device and baseline of the whole
REFUSED = "refused"  # what a part sends: why it cannot take part
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the driver reads it once, when a process initialises CUDA
_MIG = "MIG-"
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number there, from 0 on


def is_part(config: pytest.Config) -> bool:
    """True in a worker: another process has its results."""
    return hasattr(config, "workerinput")


def hands_out(config: pytest.Config) -> bool:
    """True in the controller, which runs no test itself."""
    return not is_part(config) and getattr(config.option, "dist", "no") != "no"


def in_parts(config: pytest.Config) -> bool:
    """True in both."""
    return is_part(config) or hands_out(config)


def isolate(config: pytest.Config, settings: Settings, *, by_option: bool) -> None:
    """Have xdist run the tests in a worker, replaced however often, unless the user chose workers.
    `by_option`: else by a gate, which isolates where it can.
    Raises `pytest.UsageError`: by option, and pytest-xdist is not installed, or is switched off.
    """
    if is_part(config):
        return
    if not config.pluginmanager.hasplugin("xdist"):
        if by_option:
            raise pytest.UsageError(
                "gpumem: --gpumem-isolate needs pytest-xdist: pip install pytest-xdist"
            )
        return
    option = config.option
    has_workers = option.numprocesses is not None or option.tx
    refuses_workers = settings.processes > 1 or option.collectonly
    if has_workers or config.getoption("usepdb", False) or (refuses_workers and not by_option):
        return
    option.tx = ["popen"]
    if option.dist == "no":
        option.dist = "load"


BY_XDIST = "xdist"  # in place of True: pytest-benchmark is off because of workers alone


def prepare(config: pytest.Config) -> None:
    """With workers, switch pytest-benchmark off as its option does: else it warns."""
    option = config.option
    if hands_out(config) and not option.tx:
        option.dist = "no"  # it distributes nothing, and pytest-benchmark is to know
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
    """Both ends of what the processes of a session tell each other."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._sends: dict[str, Callable[[], object]] = {}
        self._receives: dict[str, Callable[[Any], None]] = {}
        self._gives: dict[str, Callable[[bool], object]] = {}
        self._collected: list[Callable[[Iterable[str]], None]] = []

    def give(self, key: str, value: Callable[[bool], object]) -> None:
        """Give every part a value before it starts.
        `value`: by whether the part is on this machine; None gives nothing.
        """
        self._gives[key] = value

    def carry(self, key: str, send: Callable[[], object], receive: Callable[[Any], None]) -> None:
        """Carry a value from the end of a part to the process with the results."""
        self._sends[key], self._receives[key] = send, receive

    def collect(self, take: Callable[[Iterable[str]], None]) -> None:
        """Take the node ids that the parts are to run: the controller collects nothing itself."""
        self._collected.append(take)

    def send(self) -> None:
        """In a part, at its end."""
        for key, value in self._sends.items():
            self._config.workeroutput[f"gpumem_{key}"] = value()  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        for key, value in self._gives.items():
            node.workerinput[f"gpumem_{key}"] = value(bool(node.gateway.spec.popen))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        for take in self._collected:
            take(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {})
        refusal = sent.get(f"gpumem_{REFUSED}")
        if refusal is not None:
            spec, worker = node.gateway.spec, node.gateway.id
            if not spec.popen:
                worker += f" ({spec.ssh or spec.socket})"
            why = f"gpumem: worker {worker}: {refusal.removeprefix('gpumem: ')}"
            raise pytest.UsageError(printable(why))
        for key, receive in self._receives.items():
            value = sent.get(f"gpumem_{key}")
            if value is not None:
                receive(value)


class Refusal:
    """Ends a worker that cannot take part before it collects. xdist swallows its usage error, so
    the controller raises it: no worker runs a test before all have collected.
    """

    def __init__(self, config: pytest.Config, why: str) -> None:
        self._config, self._why = config, why

    def pytest_collection(self) -> NoReturn:
        self._config.workeroutput[f"gpumem_{REFUSED}"] = self._why  # type: ignore[attr-defined]
        raise pytest.exit.Exception(self._why, returncode=pytest.ExitCode.USAGE_ERROR)


# What the controller tells its workers


def baseline_of_session(config: pytest.Config) -> Path | None:
    """In a worker, which may run in another folder: the baseline of the controller."""
    session = given(config, SESSION)
    return None if session is None else Path(session["baseline"])


def settings_of_session(config: pytest.Config, settings: Settings) -> Settings:
    """The settings with BASE of a gate, which a worker learns from the controller."""
    session = given(config, SESSION)
    # not of a session that a test starts
    base = os.environ.pop(BASELINE_OF, None) if session is None else session["baseline_of"]
    return settings._replace(baseline_of=base)


def check_worker(config: pytest.Config, facts: DeviceFacts, place: Path) -> None:
    """Raise `pytest.UsageError` in a worker that has another model of GPU, or not the baseline."""
    whole: Mapping[str, Any] | None = given(config, SESSION)
    if whole is None:
        return
    if facts.key != whole["key"]:
        raise pytest.UsageError(
            f"gpumem: its device is {facts.name} ({facts.key}), the session's is {whole['name']} "
            f"({whole['key']}); accepted are workers with GPUs of one model: run each model in a "
            "session of its own"
        )
    if whole["exists"] and not place.exists():
        raise pytest.UsageError(
            f"gpumem: the baseline {place} is a folder of the machine that started this worker, "
            f"which {platform.node()} does not have; accepted for workers on other machines is a "
            "folder that all of them share"
        )


def own_in_turn(settings: Settings, chosen: DeviceChoice) -> str | None:
    """In a worker on another machine: `CUDA_VISIBLE_DEVICES` of its turn; None: as it is."""
    every = _orders_of(settings, chosen) if TURN in os.environ else []
    if len(every) < 2:
        return None
    return every[int(os.environ[TURN]) % len(every)]


def _orders_of(settings: Settings, chosen: DeviceChoice) -> list[str]:
    if ":" in settings.device or chosen.facts.simulated:  # "cuda:1" names one GPU for all
        return []
    return orders(chosen.gpus, chosen.alike, os.environ.get(VISIBLE))


def orders(gpus: Sequence[str], alike: Collection[str], visible: str | None) -> list[str]:
    """The values of `CUDA_VISIBLE_DEVICES` under which each GPU of a model in turn is device 0.

    A process sees one MIG instance at most: of several, each is a GPU of its own.
    `gpus`: UUIDs of the GPUs that this process sees, in its order.
    `alike`: those of the model of the first.
    `visible`: `CUDA_VISIBLE_DEVICES` of this process; None if it is not set.
    """
    if gpus and gpus[0].startswith(_MIG):
        names = [name.strip() for name in (visible or "").split(",")]
        instances = [name for name in names if name.startswith(_MIG)]
        return list(dict.fromkeys(instances)) or [gpus[0]]
    values = []
    for first in gpus:
        if first in alike:
            others = [gpu for gpu in gpus if gpu != first]
            values.append(",".join([first, *others]))
    return values


class Controller:
    """Gives each worker a GPU, and tells it what it must have.

    With more workers than GPUs, some share one and take turns. Every worker sees all GPUs, its own
    as device 0. A worker that replaces another has the same: it stands in the specification.
    """

    def __init__(
        self, settings: Settings, chosen: DeviceChoice, baseline: Path, channel: Channel
    ) -> None:
        channel.give(SESSION, self._session)
        self._orders = _orders_of(settings, chosen)
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
        gpus, machines = cycle(self._orders), Counter[object]()
        for spec in specs:
            if not spec.popen:  # which GPUs its machine has, it must find out itself
                machine = spec.ssh or spec.socket or spec.id
                spec.env.setdefault(TURN, str(machines[machine]))
                machines[machine] += 1
            elif len(self._orders) > 1:
                spec.env.setdefault(VISIBLE, next(gpus))

    def _session(self, _is_here: bool) -> dict[str, object]:
        return {
            "key": self._facts.key,
            "name": self._facts.name,
            "baseline": str(self._baseline),
            "baseline_of": self._baseline_of,
            "exists": self._baseline.exists(),
        }
