from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from click.testing import CliRunner

from pytest_gpumem import doctor
from pytest_gpumem.cli import main
from pytest_gpumem.doctor import Check, Report, Status

REPORT = Report((Check("GPU", Status.FAILURE, "none", "get one"),), True, "Simulated only.")


@pytest.fixture(autouse=True)
def _examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: REPORT)


def test_doctor_on_a_simulated_only_machine_exits_with_0_and_says_so() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert result.output.splitlines() == ["failure  GPU  none -> get one", "", "Simulated only."]


def test_doctor_as_json() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json", "-"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "schema": 2,
        "simulated_only": True,
        "summary": "Simulated only.",
        "checks": [{"name": "GPU", "status": "failure", "detail": "none", "remedy": "get one"}],
        "device": None,
        "card": None,
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Missing command. Try '"),
        (["profile"], "Missing command. Try '"),
        (["docter"], "docter"),
        (["doctor", "--jsn"], "--json"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_4(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 4
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpumem: ")
    assert named in line


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"gpumem {version('pytest-gpumem')}\n")


def test_the_doctor_of_this_machine_imports_no_cuda_library_of_its_own() -> None:
    # The device's own door is closed here: whatever is imported then, the doctor imported.
    program = """
import sys
from pytest_gpumem import doctor
from pytest_gpumem.devices.opening import NoDevice
def none(_):
    raise NoDevice("none")
doctor.examine(doctor.Machine(choose=none, look=none))
assert not {"cupy", "cuda", "pynvml", "torch", "numba", "nvtx"} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
