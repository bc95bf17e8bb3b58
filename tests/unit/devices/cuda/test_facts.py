"""Facts without a GPU: why there is none, in one line; and what is computed from what the driver says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_gpumem.devices.cuda import facts
from pytest_gpumem.devices.cuda.facts import read_facts, split_mig
from pytest_gpumem.devices.errors import NoDevice


def test_the_door_imports_no_cuda() -> None:
    code = (
        "import sys, pytest_gpumem.devices.opening, pytest_gpumem.devices.cuda.facts\n"
        "print([m for m in ('cupy', 'cuda', 'cuda.bindings', 'pynvml', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_mig_instance_is_split_from_its_gpu() -> None:
    for name, expected in [
        ("NVIDIA H100 80GB HBM3", ("NVIDIA H100 80GB HBM3", None)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ("NVIDIA H100 80GB HBM3", "1g.10gb")),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", ("NVIDIA A100-SXM4-40GB", "1g.5gb+me")),
    ]:
        assert split_mig(name) == expected, name


def test_on_a_machine_without_a_driver_the_real_bindings_say_so() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    pytest.importorskip("cupy")
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("this machine has a GPU")
    with pytest.raises(NoDevice) as raised:
        read_facts(0)
    assert str(raised.value).startswith(
        ("no NVIDIA driver: ", "the driver sees no GPU", "the NVIDIA driver does not start: ")
    )
    assert "\n" not in str(raised.value)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = {"SECONDS": 0.01, "_PROGRAM": "import time; time.sleep(600)", "_installed": bool}
    for name, value in hangs.items():  # no driver can be made to
        monkeypatch.setattr(facts, name, value)
    with pytest.raises(NoDevice, match=r"^the NVIDIA driver did not answer within 0 s$"):
        read_facts(0)
