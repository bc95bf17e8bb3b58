"""Plant a fault in a run of forty tests, and see what it costs: one of them breaks, hangs, or is interrupted by Ctrl-C.

    python ci/bench/planted_faults.py --json ci/records/nvidia-h100/planted_faults.json
    python ci/bench/planted_faults.py --device sim

Each fault is planted in a session without workers and in one with `-n 2`. On a GPU the illegal access and the endless kernel are real; the
simulated device loses its context by a call that fails, and hangs in C. Ctrl-C comes while the culprit hangs: it is the worst moment.

Prints the record with what was lost. Exits with 1 where a promise is broken: more than the culprit is lost with workers, a row of a test
that ended is not in the results, the GPU stays locked, Ctrl-C takes too long, or a traceback follows the summary.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from filelock import FileLock, Timeout
from record_file import chosen_device, head, record_parser, utc_now, write_record

from pytest_gpumem.plugin.exclusive import lock_file

TESTS = 40
CULPRIT = "test_13"
FAULTS = ("illegal access", "endless kernel", "Ctrl-C", "segfault", "out of memory", "sys.exit")
MODES: dict[str, tuple[str, ...]] = {"no workers": (), "-n 2": ("-n", "2")}
SURVIVED = ("out of memory", "sys.exit")
"""Faults that cost the culprit alone without workers too."""
CTRL_C_SECONDS = 2.0
LIMIT = "3 s"
"""Time-out of the endless kernel's test."""
TIMEOUT = 120.0
"""Seconds for one session."""

SUITE = '''
"""Forty tests: half of them measure, a quarter uses the device, a quarter is of the host."""

import faulthandler, os, sys
from pathlib import Path

import pytest
from planted import endless, illegal_access

FAULT = os.environ["PLANTED_FAULT"]


def measure(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("1 MiB"), device_buffer("1 MiB"))


@pytest.mark.gpumem(timeout="{limit}" if FAULT == "endless kernel" else "none")
def {culprit}(gpu_benchmark, gpu_kernels, device_buffer, gpu_device):
    Path("begun").touch()
    if FAULT == "illegal access":
        illegal_access(gpu_device)
    elif FAULT in ("endless kernel", "Ctrl-C"):
        endless(gpu_benchmark, gpu_device)
    elif FAULT == "out of memory":
        device_buffer("1000 GiB")
    elif FAULT == "sys.exit":
        sys.exit(0)
    elif FAULT == "segfault":
        faulthandler._sigsegv()
'''
BODIES = (
    "def {}(gpu_benchmark, gpu_kernels, device_buffer): measure(gpu_benchmark, gpu_kernels, device_buffer)",
    "def {}(gpu_device): assert gpu_device.facts.name",
    "def {}(gpu_benchmark, gpu_kernels, device_buffer): measure(gpu_benchmark, gpu_kernels, device_buffer)",
    "def {}(): pass",
)
ON_A_GPU = r"""
import cupy
import numpy as np

BAD = cupy.RawKernel('extern "C" __global__ void bad(unsigned long long at) { *(volatile int*)at = 1; }', "bad")
ENDLESS = cupy.RawKernel('extern "C" __global__ void endless(volatile int* go) { while (!*go) {} }', "endless")


def illegal_access(device):
    BAD((1,), (1,), (np.uint64(0x10),))


def endless(gpu_benchmark, device):
    go = cupy.zeros(1, "i4")
    gpu_benchmark(lambda: ENDLESS((1,), (1,), (go,)))
"""
SIMULATED = """
import hashlib

from pytest_gpumem.devices.protocol import ContextLost


def illegal_access(device):
    def lost(*arguments, **options):
        raise ContextLost("waiting for the device: cudaErrorIllegalAddress. The CUDA context is lost.")
    for facet in (device.streams, device.l2, device.content, device.kernels, device.graphs):
        for name in dir(facet):
            if not name.startswith("_") and name not in ("close", "clear") and callable(getattr(facet, name)):
                setattr(facet, name, lost)
    device.memory.allocate = device.memory.scatter = device.memory.make_room = device.conditions = device.close = lost


def endless(gpu_benchmark, device):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def project(folder: Path, *, simulated: bool) -> list[str]:
    """Write the suite; the names of the tests that measure."""
    (folder / "planted.py").write_text(SIMULATED if simulated else ON_A_GPU)
    names = [f"test_{number:02}" for number in range(TESTS)]
    before = "\n\n\n".join(BODIES[at % 4].format(name) for at, name in enumerate(names) if name < CULPRIT)
    after = "\n\n\n".join(BODIES[at % 4].format(name) for at, name in enumerate(names) if name > CULPRIT)
    head, mark, culprit = SUITE.format(limit=LIMIT, culprit=CULPRIT).partition("@pytest.mark")
    (folder / "test_suite.py").write_text(f"{head}{before}\n\n\n{mark}{culprit}\n\n{after}\n")
    return [name for at, name in enumerate(names) if at % 2 == 0 and name != CULPRIT]


def session(folder: Path, device: str, fault: str, arguments: tuple[str, ...], uuid: str | None) -> dict[str, Any]:
    """Run the suite with one fault; what became of its tests."""
    begun, results, junit = folder / "begun", folder / "results.json", folder / "junit.xml"
    for file in (begun, results, junit):
        file.unlink(missing_ok=True)
    own = ["--gpumem", "--gpumem-device", device, "--gpumem-budget", "50 ms", "-v", "-p", "no:cacheprovider", "--rootdir=."]
    command = [sys.executable, "-m", "pytest", *own, f"--benchmark-json={results.name}", f"--junitxml={junit.name}", *arguments, "."]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of a session around this one
    environment = {**inherited, "PLANTED_FAULT": fault}
    start = time.monotonic()
    # A session of its own: Ctrl-C reaches the whole group of processes, as a terminal's does.
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    interrupted = None
    try:
        if fault == "Ctrl-C":
            while not begun.exists() and process.poll() is None and time.monotonic() - start < TIMEOUT:
                time.sleep(0.05)
            time.sleep(1.5)  # by now its kernel runs
            interrupted = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += "\nplanted_faults: ended after its time"
    ended = time.monotonic()
    verdicts = _verdicts(junit)
    passed = [name for name, outcome in verdicts.items() if outcome == "passed"]
    return {
        "exit_code": process.returncode,
        "seconds": round(ended - start, 2),
        "seconds_from_ctrl_c": None if interrupted is None else round(ended - interrupted, 2),
        "passed": sorted(passed),
        "failed": sorted(name for name, outcome in verdicts.items() if outcome == "failed"),
        "lost": sorted({f"test_{number:02}" for number in range(TESTS)} - verdicts.keys()),
        "rows": sorted(_rows(results)),
        "printed_as_passed": sorted(_printed(output)),
        "locked": _locked(uuid),
        "noise": _noise(output),
        "last_words": output[-600:],
    }


def _printed(output: str) -> set[str]:
    return {first or second for first, second in re.findall(r"PASSED.*?::(test_\d\d)\b|::(test_\d\d) PASSED", output)}


def _verdicts(junit: Path) -> dict[str, str]:
    if not junit.exists():
        return {}
    found: dict[str, str] = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        broken = any(case.find(tag) is not None for tag in ("failure", "error"))
        found[case.get("name", "").rpartition("::")[2]] = "failed" if broken else "passed"
    found.pop("", None)  # a test that was interrupted
    return found


def _rows(results: Path) -> list[str]:
    """Tests with a measurement in the results."""
    if not results.exists():
        return []
    rows = json.loads(results.read_text())["gpumem"]["rows"]
    return [row["nodeid"].rpartition("::")[2] for row in rows if row["measurement"] is not None]


def _locked(uuid: str | None) -> bool:
    """True if a process still has the GPU."""
    if uuid is None:
        return False
    try:
        with FileLock(lock_file(uuid)).acquire(timeout=5):
            return False
    except Timeout:
        return True


def _noise(output: str) -> int:
    """Lines after pytest's last one."""
    lines = output.rstrip().splitlines()
    last = next((at for at in reversed(range(len(lines))) if re.fullmatch(r"=+ .* in [0-9.]+s.* =+", lines[at])), len(lines))
    return len(lines) - last - 1


def broken(fault: str, mode: str, seen: dict[str, Any], measuring: list[str]) -> list[str]:
    """The promises that a session broke."""
    why = []
    names = [f"test_{number:02}" for number in range(TESTS)]
    ended = [name for name in names if name < CULPRIT]
    host = [name for at, name in enumerate(names) if at % 4 == 3 and name > CULPRIT]
    if seen["exit_code"] == 0 or (fault != "segfault" and seen["exit_code"] != (2 if fault == "Ctrl-C" else 1)):
        why.append(f"exit code {seen['exit_code']}")
    if missing := sorted(set(seen["printed_as_passed"]).intersection(measuring) - set(seen["rows"])):
        why.append(f"rows of tests that passed are lost: {missing}")
    if fault == "Ctrl-C":
        if seen["seconds_from_ctrl_c"] > CTRL_C_SECONDS:
            why.append(f"{seen['seconds_from_ctrl_c']} s from Ctrl-C to the end")
        if not seen["rows"] or (mode == "no workers" and not set(seen["passed"]).issuperset(ended)):
            why.append("tests that had ended are lost")
    elif mode != "no workers" or fault in SURVIVED:
        if seen["failed"] != [CULPRIT] or seen["lost"]:
            why.append(f"failed: {seen['failed']}, lost: {seen['lost']}")
    else:
        more = host if fault == "illegal access" else []
        if seen["passed"] != sorted(ended + more) or CULPRIT not in seen["failed"]:
            why.append(f"passed: {seen['passed']}, failed: {seen['failed']}")
    if seen["locked"]:
        why.append("the GPU stays locked")
    if seen["noise"]:
        why.append(f"{seen['noise']} lines after the summary")
    return why


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = record_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS, help="faults to plant (default: all)")
    asked = parser.parse_args()
    facts = chosen_device(parser, asked.device).facts
    record: dict[str, Any] = {
        "kind": "planted_faults",
        "device": {"name": facts.name, "simulated": facts.simulated, "driver": facts.driver, "cuda": facts.cuda},
        "tests": TESTS,
        "culprit": CULPRIT,
        "sessions": {},
        "broken": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        measuring = project(Path(folder), simulated=facts.simulated)
        for fault in asked.only:
            for mode, arguments in MODES.items():
                seen = session(Path(folder), asked.device, fault, arguments, facts.uuid)
                record["sessions"].setdefault(fault, {})[mode] = seen
                if why := broken(fault, mode, seen, measuring):
                    record["broken"][f"{fault}, {mode}"] = why
                record["ended"] = utc_now()
                if asked.json:
                    write_record(asked.json, record, indent=1)
    print(table(record))
    return int(bool(record["broken"]))


def table(record: dict[str, Any]) -> str:
    """The record as text: what became of the forty tests."""
    lines = [head(record), ""]
    lines.append(f"{'fault':<16}{'':<12}{'passed':>7}{'failed':>7}{'lost':>6}{'rows':>6}{'exit code':>11}{'seconds':>9}")
    for fault, modes in record["sessions"].items():
        for mode, seen in modes.items():
            seconds = seen["seconds"] if seen["seconds_from_ctrl_c"] is None else seen["seconds_from_ctrl_c"]
            counts = "".join(f"{len(seen[name]):>{width}}" for name, width in (("passed", 7), ("failed", 7), ("lost", 6), ("rows", 6)))
            lines.append(f"{fault:<16}{mode:<12}{counts}{seen['exit_code']:>11}{seconds:>9.1f}")
    lines += ["", f"of {record['tests']} tests, the fault is in number 13; seconds: of the session, after Ctrl-C from there to its end"]
    lines += [f"BROKEN: {name}: {'; '.join(why)}" for name, why in record["broken"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
