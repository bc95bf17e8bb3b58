"""GPU suites of other projects, unchanged, without this plugin and with `--gpumem`.

    python ci/bench/foreign_gpu_suites.py --suites FOLDER --json foreign_gpu_suites.json

FOLDER has the sources in folders with these names:

    kornia     github.com/kornia/kornia, revision b4f5a78a: PyTorch by pytest-benchmark; it needs the package kornia_rs
    liger      github.com/linkedin/Liger-Kernel, revision ead96b61: tests of Triton kernels

Runs each suite three times: once to fill the caches of kernels, then without the plugin, then with it. Records how the tests end, the wall
times, and the benchmarks that were measured on the GPU and why others were not; the record is written after each suite. Exits with 1 if a
test ends otherwise, or a suite has no test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import installed, record_parser, write_record

# pytest-benchmark takes a second for each test by default. Of the sizes and channels some: a measurement takes up to a second.
SUITES = {
    "kornia": (
        *("benchmarks/color/gray_test.py", "benchmarks/color/yuv_test.py"),
        *("benchmarks/augmentation/2d_geometric_test.py", "--device=cuda", "--optimizer="),
        *("--benchmark-max-time=0.1", "-k", "not 237 and not 256 and not 5- and not 1-3-"),
    ),
    "liger": ("test/transformers/test_softmax.py",),
}
"""By the folder: the options of its session."""
PLAIN = ("-p", "no:gpumem")
OURS = ("--gpumem",)
SAID = re.compile(r"\d+ benchmarks? .*")


def session(source: Path, arguments: Sequence[str]) -> tuple[Mapping[str, str], str]:
    """The outcome of each test, by its name, and what the session printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command = [*pytest, f"--junitxml={report}", *arguments]
        # The sessions that the tests start get the variables too. A CI asks for a GPU where none was chosen.
        environment = {}
        for name, value in os.environ.items():
            if name != "CI" and not name.startswith(("GPUMEM", "PYTEST_")):
                environment[name] = value
        done = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.is_file():
            sys.exit(
                f"foreign_gpu_suites: {' '.join(command)} in {source.name} wrote no report:\n{done.stdout}{done.stderr}"
            )
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = [
                kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None
            ]
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = (*kinds, "passed")[0]
        return outcomes, done.stdout


def suite(name: str, folder: Path, device: str) -> dict[str, Any]:
    """What a suite shows."""
    source, options = folder / name, SUITES[name]
    ours, seconds = (*OURS, f"--gpumem-device={device}"), dict[str, float]()

    def run(what: str, *more: str) -> tuple[Mapping[str, str], str]:
        begun = time.perf_counter()
        print(f"{name}: {what} ...", flush=True)
        found = session(source, (*more, *options))
        seconds[what] = time.perf_counter() - begun
        print(f"{name}: {what}: {len(found[0])} tests, {seconds[what]:.1f} s", flush=True)
        return found

    if not run("to fill the caches", *PLAIN)[0]:
        sys.exit(f"foreign_gpu_suites: {name} has no test: is {source} whole?")
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results.json")
        before, _ = run("without", *PLAIN)
        after, printed = run("with", *ours, f"--benchmark-json={results}")
        document = (
            json.loads(results.read_text())["gpumem"]
            if results.exists() and results.stat().st_size
            else {"rows": [], "device": None}
        )
    changed = {one for one in before.keys() | after.keys() if before.get(one) != after.get(one)}
    measured = [row for row in document["rows"] if row["measurement"] is not None]
    return {
        "device": document["device"],
        "tests": len(before),
        "ends": dict(Counter(before.values())),
        "changed": {name: [before.get(name), after.get(name)] for name in sorted(changed)},
        "wall_seconds": seconds,
        "adopted": [
            {
                "test": row["nodeid"].partition("::")[2],
                "seconds": row["measurement"]["latency"],
                "host_seconds": row["extra"].get("host s"),
                "sampler": row["measurement"]["sampler"],
            }
            for row in measured
        ],
        "said": [line for line in printed.splitlines() if SAID.fullmatch(line)],
    }


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = record_parser(__doc__)
    parser.add_argument("--suites", type=Path, required=True, metavar="FOLDER", help="the sources")
    options = parser.parse_args()
    device, found, failed = None, dict[str, dict[str, Any]](), False
    for name in SUITES:
        one = found[name] = suite(name, options.suites.resolve(), options.device)
        device = one.pop("device") or device
        failed |= bool(one["changed"])
        print(f"{name}: {one['tests']} tests {one['ends']}, {len(one['adopted'])} measured")
        print(*one["said"], f"end otherwise: {one['changed']}", sep="\n", flush=True)
        if options.json:
            record = {"kind": "foreign_gpu_suites", "device": device, "suites": found}
            versions = installed(
                "pytest-gpumem", "pytest-benchmark", "cupy-cuda13x", "torch", "triton"
            )
            write_record(options.json, {**record, "versions": versions}, indent=1)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
