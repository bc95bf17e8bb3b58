"""The cases of `l2_persistence.py`, as a user's tests: it runs pytest on this file."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from l2_experiment import DEFAULT, IN_A_GRAPH, Experiment
from msgspec.structs import asdict

from pytest_gpumem import MiB
from pytest_gpumem.measuring.l2_sweep import grid
from pytest_gpumem.memory.l2 import fit_hit_ratio, fit_set_aside
from pytest_gpumem.records.l2_sweep import OFF, Setting

ROUNDS = 6
"""Placements on which the settings are compared."""
CARRIER_ROUNDS = 10
"""The same where a difference of 3 % is to be seen to be none, and few settings are compared."""


@pytest.fixture
def experiment(bench: Any, gpu_device: Any, device_buffer: Any, gpu_kernels: Any) -> Any:
    """Makes the experiment of a case, with its kernel and buffers; skips where no time is left."""
    bench.begin(gpu_device)
    made = []

    def make(case: dict[str, Any]) -> tuple[Experiment, Any, tuple[Any, Any], Any]:
        kernel = getattr(gpu_kernels, case["kernel"])
        kernel = kernel if case["blocks"] is None else kernel.with_grid(case["blocks"])
        stream, window = device_buffer(case["out_mib"] * MiB, "i4"), device_buffer(case["mib"] * MiB, "i4")
        arguments = (window, stream) if case["kernel"] == "sliding_window" else (stream, window)
        made.append(Experiment(gpu_device, kernel, arguments, window, seed=case["mib"]))
        return made[-1], kernel, arguments, window

    yield make
    for one in made:
        one.close()


def options(setting: Setting) -> dict[str, Any]:
    """A place of the map as arguments of `persisting_stream`."""
    return {"set_aside": setting.set_aside, "hit_ratio": setting.hit_ratio} if setting.set_aside else {"set_aside": "off"}


def in_rounds(timed: Experiment, settings: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Samples of each setting by round, with its arguments."""
    return [{"options": one, "rounds": own} for one, own in zip(settings, timed.rounds(settings, rounds), strict=True)]


def compared(bench: Any, what: str, case: dict[str, Any], experiment: Any, named: dict[str, dict[str, Any]], rounds: int) -> None:
    """Measure settings on common placements and record them."""
    measured = in_rounds(experiment(case)[0], list(named.values()), rounds)
    bench.add(what, case, {"named": {name: i for i, name in enumerate(named)}, "measured": measured})


def test_thrashing(bench: Any, thrashing_case: dict[str, Any], experiment: Any) -> None:
    """A window beyond its set-aside, half of L2 or the maximum, at hit ratio 1 and at the one that fits."""
    named = {
        "off": {"set_aside": "off"},
        "ratio 1, L2/2": {"set_aside": "50%", "hit_ratio": 1.0},
        "fitted, L2/2": {"set_aside": "50%", "hit_ratio": "fit"},
        "ratio 1, maximum": {"set_aside": "max", "hit_ratio": 1.0},
        "fitted, maximum": {"set_aside": "max", "hit_ratio": "fit"},
    }
    compared(bench, "thrashing", thrashing_case, experiment, named, ROUNDS)


def test_carriers(bench: Any, carriers_case: dict[str, Any], experiment: Any) -> None:
    """The same window on a stream, on a graph's kernel and on each launch; a graph is compared with a graph."""
    named = {
        "off": {"set_aside": "off"},
        "off, graph": dict(IN_A_GRAPH),
        "stream": {"where": "stream"},
        "graph": {"where": "graph"},
        "launch": {"where": "launch"},
    }
    compared(bench, "carriers", carriers_case, experiment, named, CARRIER_ROUNDS)


def test_settings(bench: Any, settings_case: dict[str, Any], experiment: Any, gpu_device: Any, l2_sweep: Any) -> None:
    """Sweep it as a user does, measure the full grid, and compare: off, default, maximum, fitted, swept, the grid's best."""
    facts = gpu_device.facts
    before = asdict(gpu_device.conditions())
    timed, kernel, arguments, window = experiment(settings_case)
    begun = gpu_device.now()
    found = l2_sweep(kernel, *arguments, window=window)
    spent = gpu_device.now() - begun

    places = [(setting, timed.seconds(options(setting))) for setting in grid(facts)]
    best = min(places, key=lambda place: statistics.median(place[1]))[0]
    largest, fitted = facts.persisting_l2_max_bytes, fit_set_aside(facts, window.nbytes)
    named = {
        "off": options(OFF),
        "driver default": dict(DEFAULT),
        "maximum": options(Setting(largest, fit_hit_ratio(largest, window.nbytes))),
        "fitted": options(Setting(fitted, fit_hit_ratio(fitted, window.nbytes))),
        "swept": found.recommend(),
        "grid's best": options(best),
    }
    assert gpu_device.l2.set_aside() == bench.record["device"]["set_aside"], "the driver's default is not in place"
    different = [one for i, one in enumerate(named.values()) if one not in list(named.values())[:i]]
    bench.add(
        "settings",
        settings_case,
        {
            "sweep": {
                "recommend": found.recommend(),
                "sentences": list(found.sentences),
                "points": [[*point.setting, point.latency, point.half_width] for point in found.points],
                "confirmed": [[*point.setting, point.latency, point.half_width] for point in (found.off, found.best)],
                "gain": [found.gain.share, found.gain.low, found.gain.high],
                "grid": found.grid,
                "seconds": spent,
            },
            "grid": [[*setting, samples] for setting, samples in places],
            "named": {name: different.index(one) for name, one in named.items()},
            "measured": in_rounds(timed, different, ROUNDS),
            "conditions": [before, asdict(gpu_device.conditions())],
        },
    )
