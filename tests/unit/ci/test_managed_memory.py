"""The record of managed memory: every part on the simulated device, nsys by a stand-in, and claims that can fail."""

from __future__ import annotations

import copy
import json
import stat
import sys
from pathlib import Path
from typing import Any

import managed_memory
import pytest
from managed_memory import DEVICE_MEMORY, FAULTING, PREFETCHED, SIZE, claims, table, totals_of

from pytest_gpumem.devices.opening import choose

UM_TOTAL = """
Processing [/tmp/report.sqlite] with [um_total_sum.py]...

Total HtoD Migration Size (MB),Total DtoH Migration Size (MB),Total CPU Page Faults,Total GPU PageFaults,Min Virtual Address,Max
134.218,67.109,"1,192",1243,0x7F0000000000,0x7F0008000000
"""


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The answers of the workers, without the processes around them."""
    chosen = choose("sim")

    def answer(**job: Any) -> dict[str, Any]:
        return managed_memory.work(chosen, job)

    names = [DEVICE_MEMORY, FAULTING, PREFETCHED, managed_memory.INIT, managed_memory.INIT_PER_PAGE]
    first = answer(variants=names, budget=0.02, cost=True)
    programs = [
        {
            "name": name,
            "seconds": answer(program=name, count=False)["seconds"],
            "counted": [run["counts"]],
            "not_counted": None,
            "nsys": {"totals": {way: run["counts"][way] for way in ("to_device", "to_host", "cpu_faults", "gpu_faults")}, "error": None},
        }
        for name in managed_memory.PROGRAMS
        for run in [answer(program=name, count=True)]
    ]
    return {
        "kind": "managed_memory",
        "device": {"name": "H100", "simulated": True, "driver": None, "cuda": None, "uuid": None},
        "bytes": SIZE,
        "variants": first["variants"],
        "short": first["short"],
        "processes": [answer(variants=managed_memory.CLAIMED, budget=0.02, cost=False) for _ in range(2)],
        "programs": programs,
        "ended": "2026-11-21T00:00:00",
    }


def test_all_claims_hold_on_the_simulated_device_and_the_record_is_json(record: dict[str, Any]) -> None:
    assert [claim for claim in claims(record) if not claim["holds"]] == []
    assert json.loads(json.dumps(record)) == record
    assert "DOES NOT HOLD" not in table(record)
    assert all(len(line) <= 110 for line in table(record).splitlines())


@pytest.mark.parametrize(
    ("spoil", "fails"),
    [
        (lambda r: r["variants"][1].update(seconds=1e-6), "faulting over prefetched"),
        (lambda r: r["variants"][2].update(seconds=1.0), "prefetched over device memory"),
        (lambda r: r["variants"][2]["launch"].update(gpu_faults=1), "GPU page faults of one prefetched launch"),
        (lambda r: r["variants"][1]["launch"].update(gpu_faults=0), "GPU page faults of one faulting launch"),
        (lambda r: r["processes"][0]["variants"][2].update(seconds=1e-3), "spread of prefetched between processes"),
        (lambda r: r["short"]["after"].update(launch=1.0), "change of an idle launch once CUPTI has counted"),
        (lambda r: r["programs"][0]["nsys"]["totals"].update(to_host=1), "unified_memory: nsys and CUPTI differ in bytes to the host"),
        (lambda r: r["programs"][3]["nsys"]["totals"].update(gpu_faults=9), "unified_memory_prefetch: both or neither see GPU page faults"),
    ],
)
def test_each_claim_can_fail(spoil: Any, fails: str, record: dict[str, Any]) -> None:
    spoilt = copy.deepcopy(record)
    spoil(spoilt)
    assert fails in [claim["what"] for claim in claims(spoilt) if claim["holds"] is False]
    assert "DOES NOT HOLD" in table(spoilt)


def test_what_could_not_be_looked_at_is_no_claim_that_holds(record: dict[str, Any]) -> None:
    spoilt = copy.deepcopy(record)
    for one in spoilt["programs"]:
        one["nsys"] = {"totals": None, "error": "nsys is not on the PATH"}
    for one in spoilt["variants"]:
        one.update(launch=None, before=None, not_counted="no cupti-python")
    unseen = [claim["what"] for claim in claims(spoilt) if claim["holds"] is None]
    assert len(unseen) == 2 + 3 * len(managed_memory.PROFILED)
    assert "not counted: no cupti-python" in table(spoilt)


def test_nsys_is_run_on_the_program_and_its_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "um.csv").write_text(UM_TOTAL)
    nsys = tmp_path / "nsys"
    nsys.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, subprocess, sys\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if sys.argv[1] == 'stats':\n"
        "    print((folder / 'um.csv').read_text())\n"
        "else:\n"
        "    own = sys.argv[sys.argv.index('-o') + 2:]\n"
        "    sys.exit(subprocess.run(own).returncode)\n"
    )
    nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert managed_memory.nsys_totals("unified_memory", "sim") == {"totals": totals_of(UM_TOTAL), "error": None}
    failed = managed_memory.nsys_totals("unified_memory", "sim:no_such")
    assert failed["totals"] is None
    assert failed["error"].startswith("profile: ")
    nsys.unlink()
    assert managed_memory.nsys_totals("unified_memory", "sim")["error"] == "nsys is not on the PATH"
