"""Facts without a GPU: why there is none, in one line; and what is computed from what the driver says."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
from known_devices import H100
from msgspec import structs

from pytest_gpumem.devices import opening
from pytest_gpumem.devices.cuda import facts
from pytest_gpumem.devices.cuda.facts import CudaUnavailable, read_facts, split_mig
from pytest_gpumem.devices.opening import NoDevice


class Code(int):
    name = "CUDA_ERROR"


class FakeDriver:
    """The few calls that come before a device is looked at."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NO_DEVICE=100)

    count, init = 1, 0

    def cuInit(self, flags: int) -> tuple[Code]:  # noqa: N802
        return (Code(self.init),)

    def cuDeviceGetCount(self) -> tuple[Code, int]:  # noqa: N802
        return Code(0), self.count

    def cuDriverGetVersion(self) -> tuple[Code, int]:  # noqa: N802
        return Code(0), 13000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    bindings = pytest.importorskip("cuda.bindings")
    fake = FakeDriver()
    monkeypatch.setattr(bindings, "driver", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    monkeypatch.setattr(facts, "_elsewhere", lambda index, process: facts.query(index))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("pytest_gpumem.devices.cuda.nvml.present", lambda: True)
    with pytest.raises(CudaUnavailable) as raised:
        read_facts(0)
    assert (
        str(raised.value)
        == "CuPy is not installed: pip install 'pytest-gpumem[cuda13]' or 'pytest-gpumem[cuda12]'"
    )
    # Without a driver, installing CuPy would not help.
    monkeypatch.setattr("pytest_gpumem.devices.cuda.nvml.present", lambda: False)
    with pytest.raises(CudaUnavailable, match=r"^no NVIDIA driver is loaded$"):
        read_facts(0)


def test_a_driver_library_that_is_missing_is_named_in_one_line(driver: FakeDriver) -> None:
    def missing(flags: int) -> tuple[Code]:
        raise RuntimeError("libcuda.so.1 not found\nsearched in many places")

    driver.cuInit = missing  # type: ignore[method-assign]
    with pytest.raises(CudaUnavailable) as raised:
        read_facts(0)
    assert str(raised.value) == "no NVIDIA driver: libcuda.so.1 not found"


def test_a_driver_that_sees_no_gpu_names_the_mask(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.init = 100
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        CudaUnavailable, match=r"^the driver sees no GPU \(CUDA_VISIBLE_DEVICES=\)$"
    ):
        read_facts(0)


def test_an_index_too_high_says_how_many_there_are(driver: FakeDriver) -> None:
    driver.count = 2
    with pytest.raises(
        CudaUnavailable, match=r"^there is no device 2: CUDA sees 2 GPUs, numbered from 0$"
    ):
        read_facts(2)


def test_gpus_that_copy_directly_come_first(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.count = 4
    reaching = {(1, 3), (3, 1), (1, 0)}  # 0 does not reach 1
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (Code(0), index), raising=False)
    monkeypatch.setattr(
        driver,
        "cuDeviceCanAccessPeer",
        lambda one, other: (Code(0), (one, other) in reaching),
        raising=False,
    )
    names = {2: "another model"}
    monkeypatch.setattr(
        facts,
        "_read",
        lambda driver, device: structs.replace(
            H100, uuid=f"GPU-{device}", name=names.get(device, H100.name)
        ),
    )
    found = facts.query(1)
    assert found.gpus == ("GPU-1", "GPU-3", "GPU-0", "GPU-2")
    assert found.alike == ("GPU-1", "GPU-3", "GPU-0")


def test_a_driver_of_an_older_major_version_is_refused(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupy.cuda.runtime.runtimeGetVersion", lambda: 13020)
    monkeypatch.setattr(facts, "_elsewhere", lambda index, process: facts.DriverFacts(H100, 12040))
    with pytest.raises(
        CudaUnavailable, match=r"supports CUDA 12\.4, the installed CuPy needs CUDA 13.*\[cuda12\]"
    ):
        read_facts(0)


def test_the_door_passes_the_reason_on(driver: FakeDriver) -> None:
    driver.count = 0
    with pytest.raises(NoDevice, match=r"^no CUDA device 0: the driver sees no GPU$"):
        opening.choose("cuda")


class FakeProcess:
    """A process that has answered."""

    running = False

    def __init__(self, answer: bytes = b"") -> None:
        self._answer, self.closed = answer, 0

    def answer(self) -> bytes:
        return self._answer

    def close(self) -> None:
        self.closed += 1


def test_the_process_that_was_started_early_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess(msgspec.json.encode(facts.DriverFacts(H100, 13000)))
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    monkeypatch.setattr(facts, "_linked_version", lambda: 13000)
    monkeypatch.setattr(facts, "FactsProcess", lambda index: process)
    with opening.asked("auto") as asked:
        assert id(asked) == id(process)
        monkeypatch.setattr(facts, "FactsProcess", lambda *_: pytest.fail("started twice"))
        assert opening.choose("auto", asked=asked).facts.name == H100.name
    assert process.closed


def test_the_process_ends_though_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess()
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    monkeypatch.setattr(facts, "FactsProcess", lambda index: process)
    with pytest.raises(pytest.UsageError), opening.asked("cuda:1"):
        raise pytest.UsageError("a mistake in the ini file")
    assert process.closed


@pytest.mark.parametrize(("choice", "missing"), [("sim", ""), ("sim:h200", ""), ("cuda", "cupy")])
def test_there_is_nothing_to_ask(
    monkeypatch: pytest.MonkeyPatch, choice: str, missing: str
) -> None:
    monkeypatch.setattr(facts, "_installed", lambda module: module != missing)
    monkeypatch.setattr(facts, "FactsProcess", lambda *_: pytest.fail("started"))
    with opening.asked(choice) as asked:
        assert asked is None


def test_the_door_imports_no_cuda() -> None:
    code = (
        "import sys, pytest_gpumem.devices.opening, pytest_gpumem.devices.cuda.facts\n"
        "print([m for m in ('cupy', 'cuda', 'cuda.bindings', 'pynvml', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", ("NVIDIA H100 80GB HBM3", None)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ("NVIDIA H100 80GB HBM3", "1g.10gb")),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", ("NVIDIA A100-SXM4-40GB", "1g.5gb+me")),
    ],
)
def test_a_mig_instance_is_split_from_its_gpu(name: str, expected: tuple[str, str | None]) -> None:
    assert split_mig(name) == expected


def test_on_a_machine_without_a_driver_the_real_bindings_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    pytest.importorskip("cupy")
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("this machine has a GPU")
    with pytest.raises(CudaUnavailable) as raised:
        read_facts(0)
    assert str(raised.value).startswith(
        ("no NVIDIA driver: ", "the driver sees no GPU", "the NVIDIA driver does not start: ")
    )
    assert "\n" not in str(raised.value)


def test_an_interpreter_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(
        CudaUnavailable,
        match=r"^'/no/python' cannot be started to ask the NVIDIA driver: No such file or directory$",
    ):
        read_facts(0)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SECONDS", 0.01)
    monkeypatch.setattr(facts, "_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(facts, "_installed", lambda module: True)
    with pytest.raises(CudaUnavailable, match=r"^the NVIDIA driver did not answer within 0 s$"):
        read_facts(0)
