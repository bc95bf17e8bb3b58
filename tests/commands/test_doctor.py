"""The checks of `gpumem doctor` as functions of what the machine says, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import known_devices
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pytest_gpumem.cli import main
from pytest_gpumem.doctor import (
    FAILURE,
    OK,
    WARNING,
    Fact,
    find,
    gpu_checks,
    package_checks,
    tool_checks,
)
from pytest_gpumem.records.device import Card, CardProcess

H100 = replace(known_devices.H100, driver="580.95.05", cuda="13.0")
CARD = Card(name="NVIDIA H100", throttle_reasons=(), processes=())
INSTALLED = {
    "cupy-cuda13x": "14.2.0",
    "cuda-bindings": "13.0.1",
    "nvidia-ml-py": "13.580",
    "nvtx": "0.2.17",
    "cupti-python": "13.0.1",
}


def by_name(checks: object) -> dict[str, Fact]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def test_a_whole_machine_is_fine(tmp_path: Path) -> None:
    for name in ("nsys", "ncu"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    checks = [
        *gpu_checks(H100, "", CARD, ""),
        *package_checks(INSTALLED),
        *tool_checks({"PATH": str(tmp_path)}),
    ]
    named = [check for check in checks if check.name != "counters"]
    assert all(check.status == OK and not check.remedy for check in named), checks
    assert by_name(checks)["ncu"].detail == str(tmp_path / "ncu")


def test_a_tool_that_is_missing_is_named_as_it_was_looked_for(tmp_path: Path) -> None:
    wrong = str(tmp_path / "ncu")
    check = by_name(tool_checks({"PATH": str(tmp_path), "GPUMEM_NCU": wrong}))["ncu"]
    assert (check.status, check.detail) == (WARNING, f"{wrong} was not found")
    assert check.remedy.endswith("or give its path in GPUMEM_NCU")


def test_what_disturbs_a_measurement_is_named_with_who_else_has_the_gpu() -> None:
    process = CardProcess(41, "python", 2 << 30)
    card = replace(
        CARD,
        throttle_reasons=("sw_power_cap",),
        processes=(process,),
    )
    checks = by_name(gpu_checks(replace(H100, mps=True), "", card, ""))
    assert "pid 41 (python, 2 GiB)" in checks["other processes"].detail
    assert "sw_power_cap" in checks["throttling"].detail
    assert checks["MPS"].status == WARNING


def test_without_a_gpu_the_next_step_is_named() -> None:
    for card, remedy in [
        (None, "install the driver"),
        (CARD, "the lines below"),
        (replace(CARD, mig=True), "CUDA_VISIBLE_DEVICES"),
    ]:
        check = by_name(gpu_checks(None, "no CUDA device 0", card, "no library"))["GPU"]
        assert check.status == FAILURE, card
        assert check.detail.startswith("no CUDA device 0"), card
        assert remedy in check.remedy, card


def test_a_missing_package_has_the_command_that_brings_it() -> None:
    cases: list[tuple[dict[str, str | None], str, str, str]] = [
        (
            {"cupy-cuda13x": None},
            "CuPy",
            "no GPU",
            "in the clone: pip install -e '.[cuda13]' (driver",
        ),
        ({"cupy-cuda12x": "14"}, "CuPy", "overwrite each other", "pip uninstall -y cupy-cuda13x"),
        ({"cuda-bindings": "12.9"}, "cuda-bindings", "not for CUDA 13", "[cuda13]"),
    ]
    for changes, name, detail, remedy in cases:
        versions = {key: value for key, value in (INSTALLED | changes).items() if value is not None}
        check = by_name(package_checks(versions))[name]
        assert check.status != OK, changes
        assert detail in check.detail, changes
        assert remedy in check.remedy, changes


def test_a_device_that_is_not_there_or_not_understood_is_a_reason() -> None:
    for device in ("cuda:nine", "simple", "sim:nothing"):
        assert find(device)[1].startswith(f"GPUMEM_DEVICE={device}: "), device


def test_a_device_whose_name_only_begins_as_that_of_the_simulated_one_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUMEM_DEVICE", "simple")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "'simple' is not a device" in result.stdout


def test_the_version_of_a_package_is_that_of_the_first_folder_of_the_path(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        folder = tmp_path / version / "nvtx.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: nvtx\nVersion: {version}\n")
    program = "from pytest_gpumem.doctor import examine; print(*examine().checks, sep='\\n')"
    path = os.pathsep.join(str(tmp_path / version) for version in ("2.0", "1.0"))
    text = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, text=True
    )
    assert "Fact(name='nvtx', status='OK', detail='2.0'" in text


@pytest.mark.parametrize(
    ("device", "code"),
    [("sim", 0), ("", 1), ("cuda:97", 1), ("SIM", 0), ("Simulated:h100", 0), ("AUTO", 1)],
)
def test_the_exit_code_is_1_where_nothing_can_be_measured(
    device: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_DEVICE", device)
    result = CliRunner().invoke(main, ["doctor", "--json", "-"])
    report = json.loads(result.stdout)
    if not report["simulated_only"] and device != "cuda:97":
        pytest.skip("this machine has a GPU")
    assert result.exit_code == code
    assert report["device"] is None
    assert {"name", "status", "detail", "remedy"} == set(report["checks"][0])
    assert report["summary"].startswith("Nothing can be measured here")


def test_the_doctor_imports_no_cuda_library_where_no_driver_is_loaded() -> None:
    program = """
import sys
from pytest_gpumem import doctor
doctor.examine()
assert not {"torch", "numba", "nvtx"} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ))
