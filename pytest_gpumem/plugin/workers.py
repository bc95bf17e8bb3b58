"""Workers of pytest-xdist: their devices, and what they send: the rows that `plugin.verdicts` gives
to the reports of tests, and what is known at their end."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import Settings

if TYPE_CHECKING:
    from pytest_gpumem.records.row import Row

_ROWS = "gpumem_rows"  # attribute of a report
_KEY = "gpumem"  # of what a worker is given, and of what it sends
_REFUSED = "refused"  # key of what a worker sends: why it cannot take part
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the driver reads it once, when a process initialises CUDA
_MIG = "MIG-"
TURN = "_GPUMEM_TURN"  # variable of a worker on another machine: its number there, from 0 on


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
        # xdist gives the workers the options of the controller; True would be the user's.
        option.benchmark_disable, option.benchmark_enable = off or "xdist", False


def benchmarks_are_off(config: pytest.Config) -> bool:
    return config.option.benchmark_disable is True and not config.option.benchmark_enable


def given(config: pytest.Config) -> dict[str, Any] | None:
    """What a worker is given, as `Workers.pytest_configure_node` writes it; None in no worker."""
    values: dict[str, Any] | None = getattr(config, "workerinput", {}).get(_KEY)
    return values


def put_rows(report: pytest.TestReport, rows: Sequence[Row]) -> None:
    """Put the rows of a test on its report, with their samples, as plain values."""
    setattr(report, _ROWS, msgspec.to_builtins(rows))


def take_rows(report: pytest.TestReport) -> list[Row] | None:
    """Take the rows off a report of this process or of a worker; None if it has none."""
    plain: list[Any] | None = vars(report).pop(_ROWS, None)
    if not plain:
        return plain
    from pytest_gpumem.records.row import Row

    return msgspec.convert(plain, list[Row])


class Workers:
    """What the processes of a session tell each other, at both ends: plain values.

    A worker that replaces another has the same GPU: it stands in the specification.
    """

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        chosen: DeviceChoice,
        baseline: Path,
        base: str | dict[str, Any] | None,
    ) -> None:
        """`base`: as `session.GpuSession` has it."""
        self._config, self._base = config, base
        self._orders = _orders_of(settings, chosen)
        self._gives = {
            "key": chosen.facts.key,
            "name": chosen.facts.name,
            "baseline": str(baseline),
            "baseline_of": settings.baseline_of,
            "exists": baseline.exists(),
        }
        self._carries: dict[str, tuple[Callable[[], object], Callable[[Any], None]]] = {}
        self.folder = (given(config) or {}).get("folder") or ""
        """The folder of the files of `isolation.last_words`, if there are workers."""
        if isinstance(base, str):  # the gate's folder: it may kill this process
            self.folder = os.path.dirname(base)
        elif not self.folder and in_parts(config):  # the controller, or on another machine
            folder = tempfile.TemporaryDirectory(prefix="gpumem-")
            config.add_cleanup(folder.cleanup)
            self.folder = folder.name

    def carry(self, key: str, send: Callable[[], object], receive: Callable[[Any], None]) -> None:
        """Carry a value from the end of a worker to the process with the results."""
        self._carries[key] = send, receive

    def send(self) -> None:
        values = {key: value() for key, (value, _) in self._carries.items()}
        self._config.workeroutput[_KEY] = values  # type: ignore[attr-defined]

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
        base, folder = self._base, self.folder
        if not node.gateway.spec.popen:  # on another machine
            base, folder = plain_base(base), ""
        node.workerinput[_KEY] = {**self._gives, "base": base, "folder": folder}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get(_KEY, {})
        refusal = sent.get(_REFUSED)
        if refusal is not None:
            spec, worker = node.gateway.spec, node.gateway.id
            if not spec.popen:
                worker += f" ({spec.ssh or spec.socket})"
            why = f"gpumem: worker {worker}: {refusal.removeprefix('gpumem: ')}"
            raise pytest.UsageError(printable(why))
        for key, (_, receive) in self._carries.items():
            if key in sent:
                receive(sent[key])


def refuse(config: pytest.Config, why: str) -> NoReturn:
    """End a worker that cannot take part. The controller raises the usage error before any worker
    runs a test.
    """
    config.workeroutput[_KEY] = {_REFUSED: why}  # type: ignore[attr-defined]
    raise pytest.exit.Exception(why, returncode=pytest.ExitCode.USAGE_ERROR)


# What the controller tells its workers


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


def plain_base(base: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """What BASE selects, as plain values, once it is known."""
    return _selection_of_base(base) if isinstance(base, str) else base


def check_worker(config: pytest.Config, facts: DeviceFacts, place: Path) -> None:
    """Raise `pytest.UsageError` in a worker that has another model of GPU, or not the baseline."""
    whole = given(config)
    if whole is None:
        return
    if facts.key != whole["key"]:
        raise pytest.UsageError(
            f"gpumem: its device is {facts.name} ({facts.key}), the session's is {whole['name']} "
            f"({whole['key']}); run each model of GPU in a session of its own"
        )
    if whole["exists"] and not place.exists():
        raise pytest.UsageError(
            f"gpumem: the baseline {place} is a folder of the machine that started this worker, "
            f"which {platform.node()} does not have; workers on other machines need a shared folder"
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
    `alike`: those of the model of the first.
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
