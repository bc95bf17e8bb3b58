"""Measures the health of a GPU: DRAM bandwidth against the datasheet, controls against a baseline, and its state under load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from msgspec import to_builtins
from msgspec.structs import replace

from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import files
from pytest_gpumem.devices.opening import NoDevice
from pytest_gpumem.devices.protocol import Device, DeviceError
from pytest_gpumem.doctor import gpu
from pytest_gpumem.doctor.machine import Machine
from pytest_gpumem.doctor.report import Check, Status
from pytest_gpumem.judging.drift import KINDS, LIMITS, between
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.kernels.calls import requested_bytes
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.controls import read_controls
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.device import Card, DeviceFacts
from pytest_gpumem.records.measurement import Controls
from pytest_gpumem.settings import device_choice
from pytest_gpumem.units import MiB, format_rate, format_share, format_time

COPIED = 512 * MiB
"""Bytes of each array of the copy in DRAM; less on a small GPU."""
LOAD = 8.0
"""Seconds of copies under which the state is read: a warm GPU shows throttling that a cold one does not. Copies and not reads of L2, under
which a sound H100 reaches its power limit."""
SPELL = 200  # copies that are queued while the state is read once
LEAST_SHARE = 0.75
"""Share of the datasheet's bandwidth below which a copy in DRAM is slow. An H100 copies at 91 % and an H200 at 88 % of it."""
Verdict = Literal["healthy", "slow", "throttled"]


@dataclass(frozen=True)
class HealthFigures:
    """Figures and state of a GPU."""

    controls: Controls
    copy: float  # bytes per second that copies in DRAM read and write, the median under load
    card: (
        Card | None
    )  # state under load: the lowest clocks and all throttle reasons that were seen; None if NVML does not answer


@dataclass(frozen=True)
class Health:
    """The health of a GPU."""

    facts: DeviceFacts
    measured: HealthFigures
    verdict: Verdict
    checks: tuple[Check, ...]

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        simulated = " (simulated)" if self.facts.simulated else ""
        found = "; ".join(check.detail for check in self.checks if check.status is not Status.OK)
        return f"{self.facts.name}{simulated} is {self.verdict}{f': {found}' if found else ''}."

    def to_json(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "verdict": self.verdict,
            "simulated": self.facts.simulated,
            "copy_bytes_per_s": self.measured.copy,
            "controls": to_builtins(self.measured.controls),
            "card": to_builtins(self.measured.card),
            "checks": [check.to_json() for check in self.checks],
        }


def examine(place: Storage, machine: Machine | None = None) -> Health:
    """Measure the GPU that tests would run on, which has to be idle: GPUMEM_DEVICE, else the first one; the simulated device only where
    GPUMEM_DEVICE names it.

    Args:
        place: of the baselines.
        machine: answers queries.

    Raises:
        NoAnswer: there is no GPU, or it cannot be measured.
        BaselineError: as `files`.
    """
    machine = machine or Machine()
    wanted = machine.wanted().strip()
    try:
        chosen, reason = (
            (machine.choose(device_choice(wanted)), "")
            if wanted.startswith("sim")
            else gpu.find(machine)
        )
        if chosen is None:
            raise NoAnswer(f"nothing was measured: {reason}")
        baseline = _stored(place, chosen.facts.key)
        device = chosen.open()
        try:
            measured = measure(device, chosen.card)
        finally:
            device.close()
    except DeviceError as error:
        raise NoAnswer(f"nothing was measured: {error}") from None
    return judge(chosen.facts, measured, baseline)


def measure(device: Device, look: Callable[[], Card]) -> HealthFigures:
    """Read the controls, and copy in DRAM while the state is read.
    `look`: reads the state; may raise `NoDevice`.
    Raises `DeviceError`: there is too little free memory, or a launch failed.
    """
    arena = Arena(device, seed=0)
    try:
        facts, stream = device.facts, device.streams.create()
        nbytes = max(min(COPIED, facts.memory_bytes // 16 // MiB * MiB), 4 * facts.l2_bytes)
        arrays = {name: arena.buffer(nbytes, "f4") for name in ("c", "a")}
        copy = BoundKernel(CATALOGUE["copy"], device, stream).launch(arrays, {})
        start, end = device.streams.event(), device.streams.event()
        states, rates = list[Card](), list[float]()

        def spell() -> None:
            device.streams.record(start, stream)
            for _ in range(SPELL):
                device.kernels.launch(copy, stream)
            device.streams.record(end, stream)
            with suppress(NoDevice):
                states.append(look())
            device.streams.synchronize(stream)
            rates.append(
                SPELL
                * requested_bytes(copy.kernel.accesses(copy.call))
                / device.streams.elapsed(start, end)
            )

        spell()  # compiles the kernel and raises the clocks
        controls = read_controls(device)
        states.clear()
        rates.clear()
        begun = device.now()
        while not rates or device.now() - begun < LOAD:
            spell()
        return HealthFigures(controls, statistics.median(rates), _worst(states) if states else None)
    finally:
        arena.close()


def _worst(states: Sequence[Card]) -> Card:
    """The last state with the lowest clocks and all throttle reasons of any."""
    known = [one.throttle_reasons for one in states if one.throttle_reasons is not None]
    reasons = tuple(dict.fromkeys(reason for one in known for reason in one)) if known else None
    clocks = {
        name: [clock for one in states if (clock := getattr(one, name)) is not None]
        for name in ("sm_clock_hz", "memory_clock_hz")
    }
    return replace(
        states[-1],
        throttle_reasons=reasons,
        **{name: min(values) for name, values in clocks.items() if values},
    )


def _stored(place: Storage, key: str) -> dict[str | None, list[Controls]]:
    """By UUID of the GPU, the controls of the runs in a baseline, one a process. Raises `BaselineError`: as `files`."""
    found: dict[str | None, dict[Controls, None]] = {}
    for _, content in files(place, key):
        for row in content.rows:
            one = row.measurement
            card = one.provenance.card if one.provenance is not None else None
            for controls in (one.controls, *(further.controls for further in one.further)):
                if controls is not None:
                    found.setdefault(card, {})[controls] = None
    return {card: list(readings) for card, readings in found.items()}


def judge(
    facts: DeviceFacts, measured: HealthFigures, baseline: Mapping[str | None, Sequence[Controls]]
) -> Health:
    """Judge a GPU.
    `baseline`: the controls of a baseline by UUID of the GPU.
    """
    load = _under_load(measured.card)
    slow = (_bandwidth(facts, measured), _controls(facts, measured.controls, baseline))
    verdict: Verdict = "healthy"
    if any(check.status is not Status.OK for check in slow):
        verdict = "slow"
    if load.status is not Status.OK:
        verdict = "throttled"
    return Health(facts, measured, verdict, (*slow, load))


_AGAIN = "measure again on the idle GPU; if it stays, run the vendor's diagnostics: dcgmi diag -r 3"


def _bandwidth(facts: DeviceFacts, measured: HealthFigures) -> Check:
    rate, peak = f"a copy moves {format_rate(measured.copy)}", facts.dram_peak
    if not peak:
        return Check("DRAM bandwidth", Status.OK, f"{rate}; the datasheet's bandwidth is unknown")
    detail = f"{rate}, {format_share(measured.copy / peak)} of the datasheet's {format_rate(peak)}"
    if measured.copy < LEAST_SHARE * peak:
        return Check(
            "DRAM bandwidth",
            Status.WARNING,
            f"{detail}, less than {format_share(LEAST_SHARE)}",
            _AGAIN,
        )
    return Check("DRAM bandwidth", Status.OK, detail)


def _controls(
    facts: DeviceFacts, now: Controls, baseline: Mapping[str | None, Sequence[Controls]]
) -> Check:
    named = {"DRAM": now.dram, "L2": now.l2, "idle launch": now.launch, "DRAM latency": now.latency}
    figures = ", ".join(
        f"{name} {format_time(seconds)}" for name, seconds in named.items() if seconds is not None
    )
    own, whose = baseline.get(facts.uuid, ()), "this GPU"
    if not own:
        own, whose = (
            [one for readings in baseline.values() for one in readings],
            "other GPUs of the model",
        )
    then = [one for one in own if one.source == now.source]
    if not then:
        return Check("controls", Status.OK, f"{figures}; the baseline has none to compare with")
    against = f"{counted(len(then), 'process')} of {whose} in the baseline"
    if slower := [f"{text} against {against}" for text in _slower(now, then)]:
        return Check("controls", Status.WARNING, f"{figures}; {'; '.join(slower)}", _AGAIN)
    latencies = [one.latency for one in then if one.latency is not None]
    variant = (
        now.latency is not None
        and latencies
        and all(
            abs(math.log(now.latency / one)) > math.log1p(LIMITS["latency"]) for one in latencies
        )
    )
    compared = f"another variant of the card than in {against}" if variant else f"as in {against}"
    return Check("controls", Status.OK, f"{figures}; {compared}")


def _slower(now: Controls, then: Sequence[Controls]) -> Iterator[str]:
    """The controls that take longer than in the baseline, in words."""
    for kind, name in KINDS.items():
        values = [value for one in then if (value := getattr(one, kind)) is not None]
        drift = between([value] if (value := getattr(now, kind)) is not None else [], values, kind)
        if drift is not None and drift.too_large and drift.share > 0:
            yield f"{name} takes {change(drift.share)}"


def _under_load(card: Card | None) -> Check:
    if card is None:
        return Check(
            "under load", Status.OK, "throttling and clocks are unknown: pip install nvidia-ml-py"
        )
    throttling, clocks = gpu.throttling(card), gpu.clocks(card)
    if throttling.status is not Status.OK:
        return Check(
            "under load",
            throttling.status,
            f"{throttling.detail}; {clocks.detail}",
            throttling.remedy,
        )
    return Check("under load", Status.OK, f"throttling {throttling.detail}; {clocks.detail}")
