"""Persisting L2, the granules of a set-aside and resets: the cases, the claims, and the script on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import l2_persistence
import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")

SCRIPT = Path(l2_persistence.__file__)


def record(*cases: dict[str, Any]) -> dict[str, Any]:
    device = {
        "name": "NVIDIA H200",
        "simulated": False,
        "driver": "580",
        "l2_bytes": 62914560,
        "persisting_l2_max_bytes": 39321600,
    }
    return {
        "device": device,
        "ended": "2026-11-21T00:00:00",
        "planned": len(cases),
        "placements": list(cases),
    }


def failed(said: dict[str, Any]) -> list[str]:
    return [claim for claim, holds in l2_persistence.checks(said) if not holds]


def placed(off: int, **microseconds: int) -> dict[str, Any]:
    """A table of 8 MiB on an H200 with 3, 4 and 5 granules set aside: "fit" takes the first."""
    found = {
        name: {"set_aside": (3 + more) * 3932160, "medians": [1000 * us] * 8}
        for more, (name, us) in enumerate(microseconds.items())
    }
    found = {"+" + name[1:]: one for name, one in found.items()}
    whole = {"off": {"set_aside": "off", "medians": [1000 * off] * 8}, **found}
    return {
        "kernel": "gather",
        "blocks": None,
        "mib": 8,
        "out_mib": 512,
        "granules": 3,
        "placements": 8,
        "found": whole,
    }


@pytest.mark.parametrize(
    ("case", "missed"),
    [
        (placed(300, n0=200, n1=205, n2=250), []),
        (
            placed(300, n0=210, n1=200, n2=250),
            ["fitted within 3% of the best of the set-asides: +5.00 %, gather, 8 MiB"],
        ),
        (
            placed(190, n0=200, n1=205, n2=250),
            ["fitted never slower than off beyond its interval: lower end +5.26 %, gather, 8 MiB"],
        ),
    ],
)
def test_a_fitted_set_aside_that_is_beaten_is_a_miss(
    case: dict[str, Any], missed: list[str]
) -> None:
    said = record(case)
    assert failed(said) == missed
    assert ("*200.0" in l2_persistence.table(said)) is (case["found"]["+0"]["medians"][0] == 200000)
    assert "1 of 22 cases; for the others there was no time" in l2_persistence.table(
        {**said, "planned": 22}
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_resets_and_two_windows_on_the_simulated_device(tmp_path: Path) -> None:
    file = tmp_path / "l2_windows.json"
    done = run("--device", "sim:h200", "--json", str(file), "--parts", "resets,streams")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(file.read_text())
    assert said["device"]["simulated"]
    assert [len(said[part]) for part in ("resets", "streams", "placements")] == [11, 6, 0]
    assert all(
        set(one["found"]) == {"never", "none", "window", "context"} for one in said["resets"]
    )
    assert l2_persistence.table(said) in done.stdout


def test_placements_of_each_kernel_on_tables_up_to_half_of_l2(tmp_path: Path) -> None:
    file = tmp_path / "l2_placements.json"
    done = run(
        "--device", "sim:h100", "--json", str(file), "--parts", "placements", "--placements", "2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(file.read_text())["placements"]
    assert {(one["kernel"], one["blocks"]) for one in said} == {
        ("reset_data", None),
        ("sliding_window", None),
        ("reset_data", 32),
    }
    assert {one["mib"] for one in said if "set_aside" not in one} == {1, 2, 4, 6, 8, 12, 16, 24}
    texts = [one for one in said if "set_aside" in one]
    assert [one["mib"] for one in texts] == [1, 2, 3, 4, 5, 6]
    assert all(
        set(one["found"]) == {"off", "ratio 1", "fitted", "fitted, else normal"} for one in texts
    )
    eight = next(one for one in said if one["mib"] == 8)
    assert {name: found["set_aside"] for name, found in eight["found"].items()} == {
        "off": "off",
        **{f"+{more}": (3 + more) * 3276800 for more in (0, 1, 2)},
    }
    assert all(len(found["medians"]) == 2 for found in eight["found"].values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--device", "sim:gtx"), "--device sim:gtx"),
        (("--device", "sim", "--parts", "placement"), "'placement'"),
        (("--device", "sim", "--placements", "1"), "--placements 1"),
        (("--device", "sim", "--json", "/no/such/folder/x.json"), "there is no folder"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
