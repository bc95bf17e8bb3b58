"""Checks of the GPU: its presence, its abilities, and states that disturb a measurement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.checks import fixed_by_mps, unsupported
from pytest_gpumem.doctor.machine import Machine
from pytest_gpumem.doctor.report import Check, Status, in_one_line
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.memory.managed import no_migration
from pytest_gpumem.options import device_choice
from pytest_gpumem.records.device import Card, CardProcess, DeviceFacts
from pytest_gpumem.units import GiB, QuantityError, format_rate, short_bytes

HARDWARE_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Clock event reasons by which the hardware protects itself. Waiting for an idle GPU does not clear them."""
SHOWN_PROCESSES = 3
LEAST_FREE = 0.9
"""Share of a card's memory below which something else takes a part of it that counts: the driver and ECC take less than a tenth."""


def find(machine: Machine) -> tuple[opening.DeviceChoice | None, str]:
    """The GPU that tests would run on, or the reason why there is none. Where tests would run simulated, the first GPU."""
    wanted = machine.wanted().strip()
    prefix = f"GPUMEM_DEVICE={wanted}: " if wanted else ""
    real = bool(wanted) and wanted != "auto" and not wanted.startswith("sim")
    try:
        return machine.choose(device_choice(wanted) if real else "cuda"), ""
    except (opening.NoDevice, QuantityError) as missing:
        return None, f"{prefix if real else ''}{missing}"
    except (
        Exception
    ) as broken:  # a broken CuPy or driver raises anything while it is loaded: that is a finding
        return None, f"looking for a GPU failed with {in_one_line(broken)}"


def look(machine: Machine, facts: DeviceFacts | None) -> tuple[Card | None, str]:
    """The card as NVML describes it, the first one if CUDA can use none; or the reason why NVML does not answer."""
    try:
        return machine.look(facts.pci_bus_id if facts is not None else None), ""
    except opening.NoDevice as missing:
        return None, str(missing)
    except Exception as broken:  # such as a library of another version than the package
        return None, in_one_line(broken)


def identity(
    machine: Machine, facts: DeviceFacts | None, reason: str, card: Card | None, unseen: str
) -> Iterator[Check]:
    """Driver and GPU.
    `facts`: the GPU as CUDA describes it; None if no GPU can be used.
    `reason`: why `facts` is None.
    `card`: the card as NVML describes it; None if NVML does not answer.
    `unseen`: why `card` is None.
    """
    yield _driver(machine, facts, card, unseen)
    if facts is not None:
        yield Check("GPU", Status.OK, _description(facts))
    elif card is not None and card.mig:
        remedy = "name an instance in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them; nvidia-smi mig makes them)"
        yield Check("GPU", Status.FAILURE, f"{reason}; {card.name} is in MIG mode", remedy)
    else:
        yield Check(
            "GPU",
            Status.FAILURE,
            reason,
            "see the lines of driver and CuPy; until then tests run on the simulated device",
        )


def _driver(machine: Machine, facts: DeviceFacts | None, card: Card | None, unseen: str) -> Check:
    supports = (
        f", supports CUDA {card.cuda[0]}.{card.cuda[1]}"
        if card is not None and card.cuda is not None
        else ""
    )
    if facts is not None:
        return Check(
            "driver",
            Status.OK,
            f"{facts.driver or 'version unknown'}{supports}; CuPy's CUDA is {facts.cuda or 'unknown'}",
        )
    if card is not None:
        why = f"{card.driver or 'version unknown'}{supports}, manages {counted(card.cards, 'card')}, but no GPU can be used through it"
        return Check("driver", Status.WARNING, why, "see the line GPU")
    module = re.search(
        r"Kernel Module.*?\s(\d+\.\d[\d.]*)", machine.read("/proc/driver/nvidia/version") or ""
    )
    if module:
        remedy = "reboot after an update of the driver; in a container, start it with GPU access"
        return Check(
            "driver",
            Status.FAILURE,
            f"{module[1]} is loaded, but its library says: {unseen}",
            remedy,
        )
    return Check(
        "driver",
        Status.FAILURE,
        "no NVIDIA driver is loaded",
        "install the driver; in a container, start it with GPU access",
    )


def _description(facts: DeviceFacts) -> str:
    link = f", {facts.link}" if facts.link else ""
    peak = format_rate(facts.dram_peak) if facts.dram_peak else "unknown"
    return (
        f"{facts.name}, {facts.arch}, {facts.sm_count} SMs, {facts.memory_bytes / 2**30:.1f} GiB, "
        f"L2 {short_bytes(facts.l2_bytes)}, peak {peak}{link}"
    )


def abilities(machine: Machine, chosen: opening.DeviceChoice) -> Iterator[Check]:
    """Checks of how the GPU is shared and of what it supports."""
    facts = chosen.facts
    yield Check("MIG", Status.OK, f"instance {facts.mig_profile}" if facts.mig_profile else "off")
    if facts.mps:
        detail = "a server runs: its other clients disturb every measurement"
        yield Check(
            "MPS",
            Status.WARNING,
            detail,
            "stop it while measuring: echo quit | nvidia-cuda-mps-control",
        )
    else:
        yield Check("MPS", Status.OK, "off")
    yield _persisting(machine, chosen)
    if (why := no_migration(facts)) is None:
        hosts = "; ATS: host pages are read without a fault" if facts.host_page_tables else ""
        hosts = hosts or (
            "; HMM: plain malloc memory is visible too" if facts.pageable_memory_access else ""
        )
        yield Check("managed memory", Status.OK, f"pages migrate on demand, prefetch works{hosts}")
    else:
        detail = f"{why}; tests of managed_buffer and prefetched_buffer skip"
        yield Check(
            "managed memory",
            Status.WARNING,
            detail,
            "measure managed memory on bare Linux, on a GPU that can",
        )


def _persisting(machine: Machine, chosen: opening.DeviceChoice) -> Check:
    facts = chosen.facts
    fixed = cache(lambda: machine.set_aside(chosen))
    try:
        reason = unsupported(facts, fixed)
    except Exception as broken:  # a server that is out of order refuses a new context with anything
        reason = fixed_by_mps(f"how much that is cannot be read, {in_one_line(broken)}")
    if reason is not None:
        remedy = (
            "stop the server while measuring"
            if facts.mps
            else "measure L2 persistence on a whole GPU of compute capability 8.0 or newer"
        )
        return Check(
            "set-aside", Status.WARNING, f"{reason}; tests of persisting_stream skip", remedy
        )
    most, step = short_bytes(facts.persisting_l2_max_bytes), short_bytes(facts.l2_step_bytes)
    window = short_bytes(facts.access_policy_max_window_bytes)
    if facts.mps:
        detail = f"{fixed_by_mps(f'{short_bytes(fixed())} are set aside now')}; persisting_stream takes them as they are"
        return Check(
            "set-aside", Status.WARNING, detail, "stop the server to measure other set-asides"
        )
    return Check(
        "set-aside", Status.OK, f"up to {most} of L2 in steps of {step}, windows up to {window}"
    )


def state(card: Card) -> Iterator[Check]:
    """Checks of states of the card that disturb a measurement."""
    yield _room(card)
    yield _ecc(card)
    yield _memory(card)
    yield _persistence(card)
    yield _compute_mode(card)
    yield clocks(card)
    yield throttling(card)
    yield _link(card)
    yield _processes(card)


_UNKNOWN = "the driver does not say"


def _room(card: Card) -> Check:
    if (
        card.memory_bytes is None or card.free_bytes is None or card.mig
    ):  # an instance has a part of it
        return Check("memory", Status.OK, _UNKNOWN)
    detail = f"{card.free_bytes / GiB:.1f} of {card.memory_bytes / GiB:.1f} GiB are free: a test of so much fits"
    if card.free_bytes < card.memory_bytes * LEAST_FREE:
        return Check(
            "memory", Status.WARNING, detail, "end what uses the rest: nvidia-smi lists it"
        )
    return Check("memory", Status.OK, detail)


def _ecc(card: Card) -> Check:
    if card.ecc is None:
        return Check("ECC", Status.OK, _UNKNOWN)
    if card.ecc_pending is not None and card.ecc_pending != card.ecc:
        detail = f"{_on(card.ecc)}, and {_on(card.ecc_pending)} after the next start, which begins a new baseline"
        return Check(
            "ECC", Status.WARNING, detail, f"reboot, or keep it: sudo nvidia-smi -e {int(card.ecc)}"
        )
    return Check("ECC", Status.OK, _on(card.ecc))


def _memory(card: Card) -> Check:
    if card.remap_failed:
        return Check(
            "memory errors",
            Status.FAILURE,
            "a row of the card's memory could not be replaced",
            "have the card replaced",
        )
    if card.remap_pending:
        detail = "a row of the card's memory waits to be replaced"
        return Check(
            "memory errors", Status.WARNING, detail, "reset the card: sudo nvidia-smi -r, or reboot"
        )
    if card.uncorrected_errors:
        detail = f"{card.uncorrected_errors} over the card's life that could not be corrected"
        return Check(
            "memory errors", Status.WARNING, detail, "nvidia-smi -q -d ECC,ROW_REMAPPER tells more"
        )
    return Check("memory errors", Status.OK, "none" if card.uncorrected_errors == 0 else _UNKNOWN)


def _persistence(card: Card) -> Check:
    if card.persistence is False:
        detail = "off: the driver is loaded anew for each process that finds the card unused, and chosen clocks are forgotten"
        return Check(
            "persistence mode",
            Status.WARNING,
            detail,
            "sudo nvidia-smi -pm 1, or run nvidia-persistenced",
        )
    return Check("persistence mode", Status.OK, _UNKNOWN if card.persistence is None else "on")


def _compute_mode(card: Card) -> Check:
    if card.compute_mode == "prohibited":
        return Check(
            "compute mode",
            Status.FAILURE,
            "prohibited: no process may use the GPU",
            "sudo nvidia-smi -c 0",
        )
    if card.compute_mode == "exclusive process":
        detail = "exclusive process: while one process has the GPU, others of a test run fail"
        return Check(
            "compute mode",
            Status.WARNING,
            detail,
            "sudo nvidia-smi -c 0 where tests start processes, as with pytest -n",
        )
    return Check("compute mode", Status.OK, card.compute_mode or _UNKNOWN)


def clocks(card: Card) -> Check:
    """Check of clocks, temperature and power."""
    parts = []
    for name, now, most in (
        ("SM", card.sm_clock_hz, card.max_sm_clock_hz),
        ("memory", card.memory_clock_hz, card.max_memory_clock_hz),
    ):
        if now is not None:
            parts.append(
                f"{name} {now / 1e6:.0f}{f' of at most {most / 1e6:.0f}' if most is not None else ''} MHz"
            )
    if card.chosen_clocks:
        parts.append("set by a user")
    if card.temperature_c is not None:
        parts.append(f"{card.temperature_c:.0f} degrees C")
    if card.power_w is not None:
        limit = f" of at most {card.power_limit_w:.0f}" if card.power_limit_w is not None else ""
        parts.append(f"{card.power_w:.0f}{limit} W")
    shown = ", ".join(parts) or _UNKNOWN
    default = card.default_power_limit_w
    if (
        default is not None and card.power_limit_w is not None and card.power_limit_w < default - 1
    ):  # NVML reports milliwatts
        detail = f"{shown}; the default is {default:.0f} W"
        return Check(
            "clocks",
            Status.WARNING,
            detail,
            f"sudo nvidia-smi -pl {default:.0f}, unless the baseline has this limit too",
        )
    return Check("clocks", Status.OK, shown)


def throttling(card: Card) -> Check:
    """Check of the reasons that slow the card."""
    if not card.throttle_reasons:
        return Check(
            "throttling", Status.OK, "none" if card.throttle_reasons is not None else _UNKNOWN
        )
    detail = f"slowed now by {', '.join(card.throttle_reasons)}"
    if any(reason in HARDWARE_REASONS for reason in card.throttle_reasons):
        return Check(
            "throttling",
            Status.FAILURE,
            detail,
            "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    return Check(
        "throttling",
        Status.WARNING,
        detail,
        "wait until the GPU is idle and cool, or raise its power limit",
    )


def _link(card: Card) -> Check:
    if card.max_link_generation is None or card.max_link_width is None:
        return Check("host link", Status.OK, _UNKNOWN)
    link = f"PCIe Gen{card.max_link_generation} x{card.max_link_width}"
    if card.link_width is not None and card.link_width < card.max_link_width:
        detail = (
            f"{link}, but only {card.link_width} lanes are in use: transfers are as much slower"
        )
        return Check(
            "host link",
            Status.WARNING,
            detail,
            "reseat the card, and check the lanes of its slot in the BIOS",
        )
    if (
        card.card_link_generation is not None
        and card.card_link_generation > card.max_link_generation
    ):
        detail = f"{link}; the card could do Gen{card.card_link_generation}"
        return Check(
            "host link",
            Status.WARNING,
            detail,
            "use a faster slot, or raise its generation in the BIOS",
        )
    idle = card.link_generation is not None and card.link_generation < card.max_link_generation
    return Check(
        "host link",
        Status.OK,
        f"{link}{f', Gen{card.link_generation} now: it drops while the GPU idles' if idle else ''}",
    )


def _processes(card: Card) -> Check:
    if not card.processes:
        return Check(
            "other processes",
            Status.OK,
            "none that the driver lists" if card.processes is not None else _UNKNOWN,
        )
    shown = [_process(one) for one in card.processes[:SHOWN_PROCESSES]]
    more = [f"{left} more"] if (left := len(card.processes) - len(shown)) else []
    detail = f"on the GPU: {', '.join(shown + more)}; rows measured beside them are UNDECIDED"
    return Check(
        "other processes",
        Status.WARNING,
        detail,
        "end them, or measure on a GPU of your own (--gpumem-device cuda:N)",
    )


def _process(one: CardProcess) -> str:
    details = [
        part
        for part in (one.name, short_bytes(one.memory_bytes) if one.memory_bytes else None)
        if part
    ]
    return f"pid {one.pid}" + (f" ({', '.join(details)})" if details else "")


def _on(flag: bool) -> str:
    return "on" if flag else "off"
