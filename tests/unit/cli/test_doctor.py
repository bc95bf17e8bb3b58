from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import known_devices
import pytest
from counted_device import CountedDevice
from msgspec import structs

from pytest_gpumem.devices.checks import MPS_LIMIT
from pytest_gpumem.devices.opening import DeviceChoice, NoDevice
from pytest_gpumem.devices.protocol import Device, DeviceError
from pytest_gpumem.doctor import Check, Machine, Report, Status, examine, text
from pytest_gpumem.kernels.sources import SourceMissing
from pytest_gpumem.nsight.tools import Tool, ToolMissing
from pytest_gpumem.records.device import Card, CardProcess, DeviceFacts

H100 = structs.replace(
    known_devices.H100,
    driver="580.95.05",
    cuda="13.0",
    link="PCIe Gen5 x16",
    pci_bus_id="0000:18:00.0",
)
INSTALLED = {
    "cupy-cuda13x": "14.2.0",
    "cuda-bindings": "13.0.1",
    "nvidia-ml-py": "13.580",
    "pytest-benchmark": "5.3.1",
    "nvtx": "0.2.17",
    "cupti-python": "13.0.1",
    "torch": "2.9.0",
    "triton": "3.5.0",
    "numba": "0.62.0",
}
MEMORY = "MemTotal:       131072000 kB\nMemAvailable:   117964800 kB\n"
FILES = {
    "/proc/driver/nvidia/params": "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n",
    "/proc/meminfo": MEMORY,
}
CARD = Card(
    cards=1,
    name="NVIDIA H100 80GB HBM3",
    driver="580.95.05",
    cuda=(13, 0),
    persistence=True,
    compute_mode="default",
    mig=False,
    ecc=True,
    ecc_pending=True,
    uncorrected_errors=0,
    remap_pending=False,
    remap_failed=False,
    sm_clock_hz=345e6,
    max_sm_clock_hz=1980e6,
    memory_clock_hz=2619e6,
    max_memory_clock_hz=2619e6,
    temperature_c=33.0,
    power_w=71.4,
    power_limit_w=700.0,
    default_power_limit_w=700.0,
    throttle_reasons=(),
    chosen_clocks=False,
    link_generation=1,
    max_link_generation=5,
    card_link_generation=5,
    link_width=16,
    max_link_width=16,
    processes=(),
    memory_bytes=80 << 30,
    free_bytes=79 << 30,
)


def gpu(facts: DeviceFacts) -> Callable[[str], DeviceChoice]:
    def choose(choice: str) -> DeviceChoice:
        assert choice == "cuda"
        return DeviceChoice(facts, lambda: pytest.fail("the doctor must not open the device"))

    return choose


def no_card(pci_bus_id: str | None) -> Card:
    raise NoDevice("NVML Shared Library Not Found")


def no_gpu(choice: str) -> DeviceChoice:
    raise NoDevice("no CUDA device 0: no NVIDIA driver")


def no_tool(wanted: Tool) -> Path:
    raise ToolMissing(f"{wanted.variable}='nowhere' is no program")


def never(path: str) -> None:
    return None


WHOLE = Machine(
    choose=gpu(H100),
    look=lambda pci_bus_id: (
        CARD if pci_bus_id in (H100.pci_bus_id, None) else pytest.fail("another card")
    ),
    version=INSTALLED.get,
    which=lambda command: f"/usr/bin/{command}",
    tool=lambda wanted: Path("/usr/bin", wanted.program),
    fails=lambda program: None,
    read=FILES.get,
    administrator=lambda: False,
    lockable=lambda: 8 << 20,
    wanted=lambda: "",
)


def found(report: Report, name: str) -> Check:
    (check,) = [check for check in report.checks if check.name == name]
    return check


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        ("", "cuda"),
        ("auto", "cuda"),
        ("sim:h200", "cuda"),
        ("cuda:1", "cuda:1"),
        (" cuda ", "cuda"),
    ],
)
def test_the_gpu_that_tests_would_run_on_is_examined(wanted: str, asked: str) -> None:
    seen = []

    def choose(choice: str) -> DeviceChoice:
        seen.append(choice)
        raise NoDevice(f"no {choice}")

    check = found(examine(replace(WHOLE, choose=choose, wanted=lambda: wanted)), "GPU")
    assert set(seen) == {asked}
    assert check.detail.startswith(
        f"GPUMEM_DEVICE={wanted.strip()}: no {asked}" if "cuda" in wanted else f"no {asked}"
    )


def raising(error: Exception) -> Callable[..., Any]:
    def raised(*_: object) -> Any:
        raise error

    return raised


def card(**changes: Any) -> dict[str, Any]:
    return {"look": lambda _: structs.replace(CARD, **changes)}


def facts(**changes: Any) -> dict[str, Any]:
    return {"choose": gpu(structs.replace(H100, **changes))}


def locked(files: dict[str, str], lockable: int | None = None) -> dict[str, Any]:
    return {"read": {**FILES, **files}.get, "lockable": lambda: lockable}


def packages(cuda: tuple[int, int] = (13, 0), **installed: str | None) -> dict[str, Any]:
    return {
        "version": {
            **INSTALLED,
            **{name.replace("_", "-"): version for name, version in installed.items()},
        }.get,
        **card(cuda=cuda),
    }


def counters(parameters: str | None, *, administrator: bool = False) -> dict[str, Any]:
    return {"administrator": lambda: administrator, "read": lambda path: parameters}


def failing(library: str) -> dict[str, Any]:
    """As Numba does with a NumPy that is newer than it knows: it is imported, and fails at its first launch."""
    return {"fails": lambda program: "AttributeError: row_stack" if library in program else None}


MPS = DeviceChoice(
    structs.replace(H100, mps=True),
    raising(DeviceError("opening device 0: cudaErrorMpsServerNotReady: not ready.\nmore")),
)
OK, WARNING, FAILURE = Status.OK, Status.WARNING, Status.FAILURE


@pytest.mark.parametrize(
    ("machine", "name", "status", "detail", "remedy"),
    [
        (
            {"wanted": lambda: "foo"},
            "GPU",
            FAILURE,
            "GPUMEM_DEVICE=foo: 'foo' is not a device; accepted is auto, cuda, cuda:N ",
            "",
        ),
        (
            {"choose": no_gpu, **card(mig=True)},
            "GPU",
            FAILURE,
            "is in MIG mode",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"choose": raising(OSError("libcublas.so.13: cannot open shared object file\nmore"))},
            *(
                "GPU",
                FAILURE,
                "looking for a GPU failed with OSError: libcublas.so.13: cannot open shared object file",
                "",
            ),
        ),
        (
            card(free_bytes=79 << 30),
            "memory",
            OK,
            "79.0 of 80.0 GiB are free: a test of so much fits",
            "",
        ),
        (
            card(free_bytes=40 << 30),
            "memory",
            WARNING,
            "40.0 of 80.0 GiB are free: a test of so much fits",
            "",
        ),
        (card(chosen_clocks=True), "clocks", OK, ", set by a user, ", ""),
        (failing("torch"), "PyTorch", WARNING, "AttributeError: row_stack", "torch"),
        (failing("triton"), "Triton", WARNING, "AttributeError: row_stack", "triton"),
        (failing("numba"), "Numba", WARNING, "AttributeError: row_stack", "numba"),
        (
            locked({}),
            *(
                "pinned memory",
                OK,
                "buffers may lock 62.5 GiB (125.0 GiB of RAM, 112.5 GiB free, RLIMIT_MEMLOCK unlimited)",
                "",
            ),
        ),
        (
            locked({"/sys/fs/cgroup/memory.max": "17179869184\n"}),
            *(
                "pinned memory",
                OK,
                "8.0 GiB (125.0 GiB of RAM, the control group has 16.0 GiB of it",
                "",
            ),
        ),
        (
            locked({"/sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912"}),
            *("pinned memory", WARNING, "the control group has 0.5 GiB of it, 0.5 GiB free", ""),
        ),
        (
            locked({"/sys/fs/cgroup/memory.max": "max\n"}, 65536),
            "pinned memory",
            OK,
            "RLIMIT_MEMLOCK 64 KiB",
            "",
        ),
        (
            locked({"/proc/meminfo": "MemTotal: 4096000 kB\nMemAvailable: 102400 kB\n"}),
            "pinned memory",
            WARNING,
            "0.1 GiB free",
            "",
        ),
        (locked({"/proc/meminfo": ""}), "pinned memory", OK, "unknown", ""),
        (
            packages(cupti_python="12.8.0"),
            "CUPTI",
            WARNING,
            "",
            "pip install 'pytest-gpumem[cupti13]'",
        ),
        (packages(cupti_python=None), "CUPTI", WARNING, "", "pip install 'pytest-gpumem[cupti13]'"),
        (
            packages(cuda_bindings="12.9.1"),
            "CUDA bindings",
            WARNING,
            "",
            "pip install 'pytest-gpumem[cuda13]'",
        ),
        # CuPy decides, not the driver: one of CUDA 13 runs code for CUDA 12.
        (
            packages(cupy_cuda13x=None, cupy_cuda12x="14.2.0"),
            "CUPTI",
            WARNING,
            "",
            "pip install 'pytest-gpumem[cupti12]'",
        ),
        (
            packages((14, 1), cupy_cuda13x=None, cupy="14.2.0", cupti_python=None),
            "CUPTI",
            WARNING,
            "",
            "[cupti13]",
        ),
        # CuPy's wheels overwrite each other: the one there goes first.
        (
            packages((12, 8)),
            "CuPy",
            FAILURE,
            "",
            "pip uninstall -y cupy-cuda13x; pip install 'pytest-gpumem[cuda12]'",
        ),
        (
            packages(cupy_cuda12x="14.1.0"),
            "CuPy",
            WARNING,
            "",
            "uninstall -y cupy-cuda13x cupy-cuda12x; pip install",
        ),
        (
            packages((12, 8), cupy_cuda13x=None),
            "CuPy",
            FAILURE,
            "",
            "pip install 'pytest-gpumem[cuda12]'",
        ),
        (counters("RmProfilingAdminOnly: 1\n"), "counters", WARNING, "", ""),
        (counters("RmProfilingAdminOnly: 1\n", administrator=True), "counters", OK, "", ""),
        (counters("RmProfilingAdminOnly: 0\n"), "counters", OK, "", ""),
        (counters(None), "counters", WARNING, "", ""),
        (
            facts(pageable_memory_access=True),
            "managed memory",
            OK,
            "prefetch works; HMM: plain malloc memory is visible too",
            "",
        ),
        (
            facts(pageable_memory_access=True, host_page_tables=True),
            *("managed memory", OK, "prefetch works; ATS: host pages are read without a fault", ""),
        ),
        (
            facts(compute_capability=(7, 5)),
            *(
                "set-aside",
                WARNING,
                "(compute capability 7.5) has no persisting L2: it came with compute capability 8.0; tests of",
                "",
            ),
        ),
        (
            facts(mig_profile="1g.10gb"),
            *(
                "set-aside",
                WARNING,
                "(MIG profile 1g.10gb) has no persisting L2: the set-aside is disabled in MIG mode; tests of",
                "",
            ),
        ),
        (
            facts(persisting_l2_max_bytes=0),
            "set-aside",
            WARNING,
            "has no persisting L2: persistingL2CacheMaxSize is 0; tests of",
            "",
        ),
        ({"choose": lambda _: MPS}, "set-aside", WARNING, f"by {MPS_LIMIT} in its environment", ""),
        (
            {"choose": lambda _: MPS},
            "set-aside",
            WARNING,
            "cannot be read, DeviceError: opening device 0: cudaErrorMps",
            "",
        ),
        (
            {"kernels": raising(SourceMissing("no CUDA sources: reinstall pytest-gpumem"))},
            *("kernels", FAILURE, "no CUDA sources: reinstall pytest-gpumem", ""),
        ),
    ],
)
def test_what_a_check_finds(
    machine: dict[str, Any], name: str, status: Status, detail: str, remedy: str
) -> None:
    check = found(examine(replace(WHOLE, **machine)), name)
    assert check.status is status
    assert detail in check.detail
    assert remedy in check.remedy


def test_a_program_fails_with_its_last_line_and_a_library_is_tried_only_with_a_gpu() -> None:
    fails = Machine().fails
    assert fails("print(1)") is None
    assert fails("print(1)\nraise ValueError('no row_stack')") == "ValueError: no row_stack"
    assert fails("import os; os.kill(os.getpid(), 9)") == "ended by SIGKILL"
    nothing = replace(
        WHOLE, choose=no_gpu, look=no_card, fails=lambda program: pytest.fail("tried without a GPU")
    )
    assert found(examine(nothing), "Numba").status is Status.OK


def test_a_library_that_nobody_installed_is_not_examined() -> None:
    report = examine(replace(WHOLE, **packages(torch=None, numba=None)))
    assert [
        check.name for check in report.checks if check.name in ("PyTorch", "Triton", "Numba")
    ] == ["Triton"]


def test_a_whole_machine_is_all_ok() -> None:
    report = examine(WHOLE)
    assert [check.name for check in report.checks if check.status is not Status.OK] == []
    assert not report.simulated_only
    assert found(report, "driver").detail == "580.95.05, supports CUDA 13.0; CuPy's CUDA is 13.0"
    assert found(report, "GPU").detail == (
        "NVIDIA H100 80GB HBM3, sm_90, 132 SMs, 79.2 GiB, L2 50 MiB, peak 3352 GB/s, PCIe Gen5 x16"
    )
    assert (
        found(report, "set-aside").detail
        == "up to 31.25 MiB of L2 in steps of 3.125 MiB, windows up to 128 MiB"
    )
    assert found(report, "CuPy").detail == "cupy-cuda13x 14.2.0"
    assert found(report, "clocks").detail == (
        "SM 345 of at most 1980 MHz, memory 2619 of at most 2619 MHz, 33 degrees C, 71 of at most 700 W"
    )
    assert (
        found(report, "host link").detail == "PCIe Gen5 x16, Gen1 now: it drops while the GPU idles"
    )
    assert found(report, "pinned memory").detail == (
        "buffers may lock 62.5 GiB (125.0 GiB of RAM, 112.5 GiB free, RLIMIT_MEMLOCK 8 MiB)"
    )
    assert report.summary == (
        "This machine can measure latency and bandwidth, L2 persistence and managed memory on NVIDIA H100 80GB HBM3, "
        "and its tests can be profiled with nsys and ncu."
    )


def test_without_a_gpu_everything_missing_says_so_and_what_to_do() -> None:
    nothing = Machine(
        choose=no_gpu, look=no_card, version=never, which=never, tool=no_tool, read=never
    )
    report = examine(nothing)
    assert report.simulated_only
    assert (found(report, "GPU").status, found(report, "GPU").detail) == (
        Status.FAILURE,
        "no CUDA device 0: no NVIDIA driver",
    )
    assert found(report, "driver").detail == "no NVIDIA driver is loaded"
    assert {check.name for check in report.checks if check.status is Status.FAILURE} == {
        *("driver", "GPU", "CuPy", "CUDA bindings", "pytest-benchmark"),
    }
    assert {
        f"pytest-gpumem[cuda{major}]" in found(report, "CuPy").remedy for major in (12, 13)
    } == {True}
    assert "simulated device only" in report.summary
    assert {"MIG", "set-aside", "counters", "throttling"}.isdisjoint(
        check.name for check in report.checks
    )


def test_a_driver_without_a_usable_gpu_is_told_apart_from_no_driver() -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    report = examine(replace(WHOLE, choose=no_gpu, look=lambda _: CARD))
    assert (
        found(report, "driver").detail
        == "580.95.05, supports CUDA 13.0, manages 1 card, but no GPU can be used through it"
    )
    assert found(report, "throttling").status is Status.OK
    # Its library is of another version, as after an update without a reboot.
    mismatch = replace(
        WHOLE, choose=no_gpu, look=no_card, read={"/proc/driver/nvidia/version": version}.get
    )
    check = found(examine(mismatch), "driver")
    assert (check.status, check.detail) == (
        Status.FAILURE,
        "580.95.05 is loaded, but its library says: NVML Shared Library Not Found",
    )
    assert "reboot" in check.remedy


def test_a_gpu_of_which_the_driver_says_nothing_is_still_a_gpu() -> None:
    report = examine(replace(WHOLE, look=no_card))
    check = found(report, "state of the GPU")
    assert check.status is Status.WARNING
    assert check.detail.endswith("cannot be read: NVML Shared Library Not Found")
    assert {"throttling", "clocks", "ECC"}.isdisjoint(one.name for one in report.checks)


def test_what_a_card_does_not_say_is_no_finding() -> None:
    report = examine(replace(WHOLE, look=lambda _: Card(cards=1)))
    assert [check.name for check in report.checks if check.status is not Status.OK] == []
    for name in (
        "ECC",
        "memory errors",
        "persistence mode",
        "compute mode",
        "clocks",
        "throttling",
        "host link",
        "other processes",
    ):
        assert found(report, name).detail == "the driver does not say"


@pytest.mark.parametrize(
    ("changes", "name", "status", "detail", "remedy"),
    [
        (
            {"ecc_pending": False},
            "ECC",
            Status.WARNING,
            "on, and off after the next start",
            "nvidia-smi -e 1",
        ),
        (
            {"uncorrected_errors": 3},
            "memory errors",
            Status.WARNING,
            "3 over the card's life",
            "nvidia-smi -q",
        ),
        (
            {"remap_pending": True},
            "memory errors",
            Status.WARNING,
            "waits to be replaced",
            "reset the card",
        ),
        (
            {"remap_failed": True, "remap_pending": True},
            "memory errors",
            Status.FAILURE,
            "could not be replaced",
            "have the card replaced",
        ),
        ({"persistence": False}, "persistence mode", Status.WARNING, "off: ", "nvidia-smi -pm 1"),
        (
            {"compute_mode": "prohibited"},
            "compute mode",
            Status.FAILURE,
            "no process may use the GPU",
            "nvidia-smi -c 0",
        ),
        (
            {"compute_mode": "exclusive process"},
            "compute mode",
            Status.WARNING,
            "exclusive process",
            "nvidia-smi -c 0",
        ),
        (
            {"power_limit_w": 500.0},
            "clocks",
            Status.WARNING,
            "71 of at most 500 W; the default is 700 W",
            "nvidia-smi -pl 700",
        ),
        (
            {"throttle_reasons": ("sw_power_cap",)},
            "throttling",
            Status.WARNING,
            "slowed now by sw_power_cap",
            "wait",
        ),
        (
            {"throttle_reasons": ("sw_power_cap", "hw_slowdown")},
            "throttling",
            Status.FAILURE,
            "sw_power_cap, hw_slowdown",
            "cooling",
        ),
        (
            {"link_width": 8},
            "host link",
            Status.WARNING,
            "PCIe Gen5 x16, but only 8 lanes are in use",
            "seat the card",
        ),
        (
            {"card_link_generation": 6},
            "host link",
            Status.WARNING,
            "PCIe Gen5 x16; the card could do Gen6",
            "slot",
        ),
        (
            {
                "processes": (
                    CardProcess(7, "python", 3 << 30),
                    CardProcess(8),
                    CardProcess(9),
                    CardProcess(10),
                )
            },
            "other processes",
            Status.WARNING,
            "on the GPU: pid 7 (python, 3 GiB), pid 8, pid 9, 1 more; rows measured beside them are UNDECIDED",
            "end them",
        ),
    ],
)
def test_what_disturbs_is_named_with_its_remedy(
    changes: dict[str, Any], name: str, status: Status, detail: str, remedy: str
) -> None:
    report = examine(replace(WHOLE, look=lambda _: structs.replace(CARD, **changes)))
    check = found(report, name)
    assert check.status is status
    assert detail in check.detail
    assert remedy in check.remedy
    assert [one.name for one in report.checks if one.status is not Status.OK] == [name]
    assert report.summary.endswith(
        f" Its measurements are unreliable until this is repaired: {name}."
    ) is (status is Status.FAILURE)


def test_a_finding_without_a_remedy_and_a_remedy_for_nothing_cannot_be() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Check("GPU", Status.WARNING, "odd")
    with pytest.raises(ValueError, match="remedy"):
        Check("GPU", Status.OK, "fine", "get another")


def test_the_report_for_programs_holds_device_and_card() -> None:
    plain = json.loads(json.dumps(examine(WHOLE).to_json()))
    assert plain["card"]["max_link_generation"] == 5
    assert plain["device"]["key"] == H100.key
    assert {check["status"] for check in plain["checks"]} == {"OK"}


def test_a_tool_beside_the_path_is_a_warning_that_names_its_folder() -> None:
    folders = {"nsys": "nsight-systems/2025.3/bin", "ncu": "nsight-compute/2025.3"}
    report = examine(
        replace(
            WHOLE,
            which=never,
            tool=lambda wanted: Path("/opt/nvidia", folders[wanted.program], wanted.program),
        )
    )
    for tool, folder in folders.items():
        assert found(report, tool).status is Status.WARNING
        assert found(report, tool).remedy == f'export PATH="/opt/nvidia/{folder}:$PATH"'
    assert report.summary.endswith("can be profiled with nsys and ncu.")


def test_tools_that_are_nowhere_are_missing() -> None:
    report = examine(replace(WHOLE, which=never, tool=no_tool))
    assert report.summary.endswith("on NVIDIA H100 80GB HBM3.")
    for tool, variable in (("nsys", "GPUMEM_NSYS"), ("ncu", "GPUMEM_NCU")):
        assert found(report, tool).status is Status.WARNING
        assert f"{variable}='nowhere' is no program" in found(report, tool).detail


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_tool_is_the_one_that_the_commands_run(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chosen by its variable, as for `gpumem profile`."""
    chosen = tmp_path / f"my-{tool}"
    chosen.touch(mode=0o755)
    monkeypatch.setenv(f"GPUMEM_{tool.upper()}", str(chosen))
    check = found(examine(replace(WHOLE, tool=Machine().tool)), tool)
    assert check == Check(tool, Status.OK, str(chosen))


def test_what_a_device_cannot_do_is_missing_from_the_summary() -> None:
    facts = structs.replace(
        H100,
        persisting_l2_max_bytes=0,
        concurrent_managed_access=False,
        mps=True,
        mig_profile="1g.10gb",
    )
    report = examine(replace(WHOLE, choose=gpu(facts), which=never, tool=no_tool))
    assert found(report, "set-aside").status is Status.WARNING
    assert found(report, "managed memory").status is Status.WARNING
    assert "concurrentManagedAccess is 0" in found(report, "managed memory").detail
    assert found(report, "MPS").status is Status.WARNING
    assert found(report, "MIG").detail == "instance 1g.10gb"
    assert (
        report.summary == "This machine can measure latency and bandwidth on NVIDIA H100 80GB HBM3."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [("40", f"{MPS_LIMIT}=40 in this process"), (None, f"{MPS_LIMIT} is not set in this process")],
)
def test_under_mps_the_variable_its_value_and_the_bytes_are_named(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    monkeypatch.delenv(MPS_LIMIT, raising=False)
    if value is not None:
        monkeypatch.setenv(MPS_LIMIT, value)
    device, calls = CountedDevice(), list[str]()
    monkeypatch.setattr(device, "close", lambda: calls.append("close"))

    def opened() -> Device:
        calls.append("open")
        return device

    report = examine(
        replace(WHOLE, choose=lambda choice: DeviceChoice(structs.replace(H100, mps=True), opened))
    )
    check = found(report, "set-aside")
    assert check.status is Status.WARNING
    assert check.detail == (
        f"under MPS the L2 set-aside is fixed when the server starts, by {MPS_LIMIT} in its environment: "
        f"9.375 MiB are set aside now ({words}); persisting_stream takes them as they are"
    )
    assert calls == ["open", "close"]
    assert "L2 persistence" not in report.summary


def test_text_has_one_line_for_each_check_and_ends_with_the_summary() -> None:
    report = Report(
        (
            Check("GPU", Status.OK, "there"),
            Check("set-aside", Status.WARNING, "none", "buy another"),
        ),
        False,
        "This machine can.",
    )
    assert text(report, 120) == [
        "OK       GPU        there",
        "warning  set-aside  none -> buy another",
        "",
        "This machine can.",
    ]
    assert text(report, 36)[1:3] == [
        "warning  set-aside  none",
        "                    -> buy another",
    ]


def test_pytest_and_pytest_benchmark_that_do_not_go_together() -> None:
    def broken(pytest_version: str, benchmark: str) -> bool:
        versions = {**INSTALLED, "pytest": pytest_version, "pytest-benchmark": benchmark}
        return (
            found(examine(replace(WHOLE, version=versions.get)), "pytest-benchmark").status
            is Status.FAILURE
        )

    assert broken("9.2.0", "5.2.3")
    assert not broken("9.2.0", "5.3.0")
    assert not broken("9.1.4", "5.2.3")
