"""The start of a session with `--gpumem`: device, baseline, features."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_gpumem.devices.errors import DeviceError, NoDevice
from pytest_gpumem.devices.opening import DeviceChoice, choose
from pytest_gpumem.options import BY_NAME
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import AdoptionFeature
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.footprints import FootprintFeature, WaitFeature
from pytest_gpumem.plugin.isolation import ExclusiveFeature, IsolationFeature, LeftoverFeature
from pytest_gpumem.plugin.marks import SESSION_PLUGIN
from pytest_gpumem.plugin.outputs import OutputFeature
from pytest_gpumem.plugin.running import Feature, RunningHooks
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.verdicts import VerdictFeature
from pytest_gpumem.plugin.workers import VISIBLE, Workers, check_worker, given, own_in_turn, prepare
from pytest_gpumem.records.device import SIMULATED
from pytest_gpumem.settings import BASE_SELECTION, BASELINE_OF, Settings
from pytest_gpumem.units import did_you_mean


def start(config: pytest.Config, settings: Settings) -> None:
    """Find the device, load the baseline, and register the features. Raises `pytest.UsageError`."""
    prepare(config)
    # BASE of a gate is not that of a session that a test starts.
    revision, base = os.environ.pop(BASELINE_OF, None), os.environ.pop(BASE_SELECTION, None)
    whole = given(config)  # in a worker, which may run in another folder
    if whole is not None:
        revision, base = whole["baseline_of"], whole["base"]
    settings = settings._replace(baseline_of=revision)
    try:
        _check_plugins(config)
        _check_paths(config)
        place = _baseline_place(config, settings) if whole is None else Path(whole["baseline"])
        settings = settings._replace(baseline=str(place))
        chosen = _chosen(settings, place)
        visible = own_in_turn(settings, chosen)
        if visible is not None:
            os.environ[VISIBLE] = visible
            chosen = _chosen(settings, place)
        check_worker(config, chosen.facts, place)
        if chosen.facts.uuid is not None:
            from pytest_gpumem.devices.locks import lock_file

            lock_file(chosen.facts.uuid)
        session = GpuSession(config, settings, chosen, place, base)
        if session.has_past:
            _ = session.baseline  # what is wrong with its files ends the session before any test
    except (UserError, DeviceError) as error:
        raise pytest.UsageError(f"gpumem: {error}") from None
    config.add_cleanup(session.close)
    workers = Workers(config, settings, chosen, place, base)
    workers.carry("broken", lambda: session.broken, session.broken.update)
    expectations = ExpectationFeature(session, workers)
    features: list[Feature] = [  # in the order of entering a phase
        expectations,
        AdoptionFeature(session, workers),
        VerdictFeature(session),
        ExclusiveFeature(session),
        IsolationFeature(session, workers),
        FootprintFeature(session),
        LeftoverFeature(session),
        WaitFeature(session),
        OutputFeature(session, expectations, workers),
    ]
    if settings.processes > 1:
        from pytest_gpumem.plugin.repeating import RepeatFeature

        features.append(RepeatFeature(session))
    plugins = config.pluginmanager
    plugins.register(session, SESSION_PLUGIN)
    plugins.register(RunningHooks(features, session.broken))
    plugins.register(workers)
    plugins.register(entries.BenchmarkFiles(session))
    for feature in features:
        plugins.register(feature, f"gpumem-{feature.name}")


def _check_plugins(config: pytest.Config) -> None:
    # By its module: -p and a conftest load it by another name than its entry point.
    names = {getattr(plugin, "__name__", "") for plugin in config.pluginmanager.get_plugins()}
    if "pytest_benchmark.plugin" not in names:
        raise UserError(
            "--gpumem needs pytest-benchmark, which is switched off; leave out -p no:benchmark"
        )
    if getattr(config.option, "forked", False):
        raise UserError(
            "--forked runs each test in a copy of this process, in which CUDA does not work; "
            "--gpumem-isolate replaces the process after a test that crashes"
        )


def _check_paths(config: pytest.Config) -> None:
    for flag, path in pairwise(map(str, config.invocation_params.args)):
        files = (BY_NAME["baseline"].flag, BY_NAME["report"].flag)
        if flag in files and (config.invocation_params.dir / path).exists():
            raise UserError(
                f"write {flag}={path}: after a space, pytest took the path for tests, and rootdir "
                f"became {config.rootpath}"
            )


# The device


def _chosen(settings: Settings, place: Path) -> DeviceChoice:
    device = f"device {settings.device!r} ({settings.origins.get('device', 'default')})"
    simulated = "choose --gpumem-device sim if the simulated device is meant"
    try:
        chosen = choose(settings.device)
    except NoDevice as missing:
        remedy = ""
        if not settings.device.startswith("sim"):
            remedy = f"; {simulated}; `gpumem doctor` says what is missing"
        raise UserError(f"{device}: {missing}{remedy}") from None
    if chosen.fallback_reason is None:
        return chosen
    no_gpu = f"no GPU ({chosen.fallback_reason})"
    if os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off"):
        from pytest_gpumem.baselines.store import devices

        in_ci = f"{no_gpu}, the variable CI is set, and"
        measured = [key for key in devices(place) if not key.startswith(SIMULATED)]
        if measured:
            raise UserError(
                f"{device}: {in_ci} {place} holds a baseline of {', '.join(measured)}; {simulated}"
            )
        if not settings.device_chosen:
            raise UserError(
                f"{in_ci} no device was chosen: a broken driver must not turn a pipeline green; "
                f"{simulated}"
            )
    if settings.strict:
        raise UserError(f"{no_gpu} under --gpumem-strict; {simulated}")
    return chosen


# The baseline


def _baseline_place(config: pytest.Config, settings: Settings) -> Path:
    if settings.baseline is None:
        return entries.storage_folder(config)
    # It is relative to the ini file that names it, else to where pytest was called.
    folder, origin = config.invocation_params.dir, settings.origins["baseline"]
    if origin.startswith("gpumem_") and config.inipath is not None:
        folder = config.inipath.parent
    place = folder / Path(settings.baseline).expanduser()
    # A session that saves makes one, and a gate's base decides without one.
    may_be_new = settings.save or settings.baseline_of is not None or config.option.collectonly
    if place.is_dir() or (may_be_new and not place.exists()):
        return place
    if place.exists():
        raise UserError(f"{origin}: {place} is a file, not a folder")
    hint = did_you_mean(place.name, [path.name for path in place.parent.glob("*/")])
    raise UserError(f"{origin}: there is no folder {place}{hint}; --gpumem-save makes one")
