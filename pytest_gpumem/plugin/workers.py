"""Workers of pytest-xdist: the process that hands out tests has their results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import BASE_SELECTION, Settings

BASE = "base"  # what a part is given: what BASE selects, in a gate
WHOLE = "session"  # what a part is given: device and baseline of the whole
REFUSED = "refused"  # what a part sends: why it cannot take part
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the driver reads it once, when a process initialises CUDA
_MIG = "MIG-"
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number there, from 0 on
BY_XDIST = "xdist"  # in place of True: pytest-benchmark is off because of workers alone


def is_part(config: pytest.Config) -> bool:
    """True in a worker: another process has its results."""
    return hasattr(config, "workerinput")


def in_parts(config: pytest.Config) -> bool:
    """True in a worker, and in the controller, which runs no test itself."""
    return is_part(config) or getattr(config.option, "dist", "no") != "no"


def isolate(config: pytest.Config, settings: Settings) -> None:
    """Have xdist run the tests in a worker, replaced however often, unless the user chose workers.
    Without the option a gate asks for it, which isolates where it can.
    """
    if is_part(config):
        return
    if not config.pluginmanager.hasplugin("xdist"):
        if settings.isolate:
            raise pytest.UsageError(
                "gpumem: --gpumem-isolate needs pytest-xdist: pip install pytest-xdist"
            )
        return
    option = config.option
    has_workers = option.numprocesses is not None or option.tx
    refuses_workers = settings.processes > 1 or option.collectonly
    if (
        has_workers
        or config.getoption("usepdb", False)
        or (refuses_workers and not settings.isolate)
    ):
        return
    option.tx = ["popen"]
    if option.dist == "no":
        option.dist = "load"


def prepare(config: pytest.Config) -> None:
    """With workers, switch pytest-benchmark off as its option does: else it warns."""
    option = config.option
    if not is_part(config) and in_parts(config) and not option.tx:
        option.dist = "no"  # it distributes nothing, and pytest-benchmark is to know
    if in_parts(config):
        off = benchmarks_are_off(config)
        # xdist gives the workers the options of the controller.
        option.benchmark_disable, option.benchmark_enable = off or BY_XDIST, False


def benchmarks_are_off(config: pytest.Config) -> bool:
    return config.option.benchmark_disable is True and not config.option.benchmark_enable


def given(config: pytest.Config, key: str) -> Any:
    return getattr(config, "workerinput", {}).get(f"gpumem_{key}")


class Workers:
    """What the processes of a session tell each other, at both ends: plain values, by a key.

    Every worker sees all GPUs, its own as device 0. With more workers than GPUs, some share one and
    take turns. A worker that replaces another has the same: it stands in the specification.
    """

    def __init__(
        self, config: pytest.Config, settings: Settings, chosen: DeviceChoice, baseline: Path
    ) -> None:
        self._config = config
        self._orders = _orders_of(settings, chosen)
        self._gives: dict[str, Callable[[bool], object]] = {}
        self._carries: dict[str, tuple[Callable[[], object], Callable[[Any], None]]] = {}
        self.give(WHOLE, partial(_whole, settings, chosen.facts, baseline))

    def give(self, key: str, value: Callable[[bool], object]) -> None:
        """Give every worker a value before it starts, by whether it is on this machine."""
        self._gives[key] = value

    def carry(self, key: str, send: Callable[[], object], receive: Callable[[Any], None]) -> None:
        """Carry a value from the end of a worker to the process with the results."""
        self._carries[key] = send, receive

    def send(self) -> None:
        for key, (value, _) in self._carries.items():
            self._config.workeroutput[f"gpumem_{key}"] = value()  # type: ignore[attr-defined]

    def header(self) -> list[str]:
        workers = len(getattr(self._config.option, "tx", None) or ())  # none without xdist
        gpus = min(workers, len(self._orders))
        return [f"gpumem: {workers} workers measure on {gpus} GPUs"] if gpus > 1 else []

    # In the controller

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

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        for key, value in self._gives.items():
            node.workerinput[f"gpumem_{key}"] = value(bool(node.gateway.spec.popen))

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
        for key, (_, receive) in self._carries.items():
            value = sent.get(f"gpumem_{key}")
            if value is not None:
                receive(value)


class Refusal:
    """Ends a worker that cannot take part before it collects. xdist swallows its usage error, so
    the controller raises it before any worker runs a test.
    """

    def __init__(self, config: pytest.Config, why: str) -> None:
        self._config, self._why = config, why

    def pytest_collection(self) -> NoReturn:
        self._config.workeroutput[f"gpumem_{REFUSED}"] = self._why  # type: ignore[attr-defined]
        raise pytest.exit.Exception(self._why, returncode=pytest.ExitCode.USAGE_ERROR)


# What the controller tells its workers


def _whole(settings: Settings, facts: DeviceFacts, place: Path, _: bool) -> dict[str, object]:
    return {
        "key": facts.key,
        "name": facts.name,
        "baseline": str(place),
        "baseline_of": settings.baseline_of,
        "exists": place.exists(),
    }


@cache
def _selection_of_base(file: str) -> dict[str, Any]:
    """Wait for what the gate writes while its screen collects."""
    gate = os.getppid()
    while not os.path.exists(file):
        if os.getppid() != gate:
            pytest.exit("gpumem: the gate has ended", pytest.ExitCode.INTERRUPTED)
        time.sleep(0.01)
    plain: dict[str, Any] | None = json.loads(Path(file).read_text(encoding="utf-8"))
    if plain is None:
        why = "gpumem: the tests of BASE cannot be collected"
        pytest.exit(why, pytest.ExitCode.INTERRUPTED)
    return plain


def base_of_gate(config: pytest.Config) -> str | dict[str, Any] | None:
    """What BASE selects, or the file that will have it, in the screen of a gate and its workers."""
    return given(config, BASE) if is_part(config) else os.environ.pop(BASE_SELECTION, None)


def plain_base(of_base: str | dict[str, Any]) -> dict[str, Any]:
    """What BASE selects, as plain values, once it is known."""
    return _selection_of_base(of_base) if isinstance(of_base, str) else of_base


def check_worker(config: pytest.Config, facts: DeviceFacts, place: Path) -> None:
    """Raise `pytest.UsageError` in a worker that has another model of GPU, or not the baseline."""
    whole: Mapping[str, Any] | None = given(config, WHOLE)
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
