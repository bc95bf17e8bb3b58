"""GPU suites of other projects, unchanged, without this plugin and with `--gpumem-existing=adopt,watch`.

    python ci/bench/foreign_gpu_suites.py --suites FOLDER --json foreign_gpu_suites.json

FOLDER has the sources in folders with these names:

    pybench    github.com/pentschev/pybench, revision 89d65a6c: CuPy and NumPy by pytest-benchmark
    liger      github.com/linkedin/Liger-Kernel, revision ead96b61: kernels of Triton beside PyTorch

Runs each suite three times: once to fill the caches of kernels, then without the plugin, then with it. Records how the tests end, the wall
times, the benchmarks that were measured on the GPU and why others were not, and the lines that wait. A test that ends otherwise is run
again on both sides. Exits with 1 if it does so twice, or if a suite has no row.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign_suites import different, session
from record_file import installed, record_parser, write_record

SUITES = {
    # Those of NumPy, and the largest arrays, take minutes.
    "pybench": ("-o", "pythonpath=.", "pybench/benchmarks/benchmark_array.py", "-k", "cupy and not shape2"),
    "liger": tuple(f"test/transformers/test_{name}.py" for name in ("layer_norm", "softmax", "dyt")),
}
"""By folder: the options of its session."""
PLAIN = ("-p", "no:gpumem")
OURS = ("--gpumem", "--gpumem-existing=adopt,watch", "--gpumem-footprint=auto")
SAID = re.compile(r"\d+ benchmarks? .*")
MOST = 10  # lines that wait


def suite(source: Path, options: tuple[str, ...], device: str) -> dict[str, Any]:
    """What a suite shows."""
    ours, seconds = (*OURS, f"--gpumem-device={device}"), dict[str, float]()
    session(source, (*PLAIN, *options))
    with tempfile.TemporaryDirectory() as folder:
        results, ends = Path(folder, "results.json"), []
        for side, more in (("without", PLAIN), ("with", (*ours, f"--benchmark-json={results}"))):
            begun = time.perf_counter()
            ends.append(session(source, (*more, *options)))
            seconds[side] = time.perf_counter() - begun
        document = (
            json.loads(results.read_text())["gpumem"] if results.exists() and results.stat().st_size else {"rows": [], "device": None}
        )
    (before, _), (after, printed) = ends
    if changed := different(before, after):
        changed &= different(session(source, (*PLAIN, *options))[0], session(source, (*ours, *options))[0])
    measured = [row for row in document["rows"] if row["measurement"] is not None]
    calls = [row["footprint"]["calls"] for row in document["rows"] if (row["footprint"] or {}).get("calls") is not None]
    lines = Counter[str]()
    for one in calls:
        for wait in one["waiting"]:
            lines[f"{wait['file']}:{wait['line']} {wait['call']}" + ("" if wait["sure"] else " (may)")] += wait["count"]
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
        "counted": sum(one["not_counted"] is None for one in calls),
        "not_counted": sorted({one["not_counted"] for one in calls if one["not_counted"] is not None}),
        "kernels": sum(one["kernels"] for one in calls),
        "waits": sum(wait["count"] for one in calls for wait in one["waiting"] if wait["sure"]),
        "waiting": dict(lines.most_common(MOST)),
    }


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = record_parser(__doc__)
    parser.add_argument("--suites", type=Path, required=True, metavar="FOLDER", help="the sources")
    options = parser.parse_args()
    found = {name: suite((options.suites / name).resolve(), arguments, options.device) for name, arguments in SUITES.items()}
    device, *_ = [one.pop("device") for one in found.values()]
    for name, one in found.items():
        print(f"{name}: {one['tests']} tests {one['ends']}, {len(one['changed'])} end otherwise {one['changed'] or ''}")
        print(f"  {one['wall_seconds']['without']:.1f} s without, {one['wall_seconds']['with']:.1f} s with")
        for row in one["adopted"]:
            host = "" if row["host_seconds"] is None else f", pytest-benchmark {1e6 * row['host_seconds']:.1f} us"
            print(f"  {row['test']}: {1e6 * row['seconds']:.1f} us ({row['sampler']}){host}")
        print(*(f"  {line}" for line in one["said"]), sep="\n")
        print(f"  {one['counted']} tests counted, {one['kernels']} kernels, {one['waits']} waits {one['not_counted'] or ''}")
        print(*(f"  {count} x {line}" for line, count in one["waiting"].items()), sep="\n")
    if options.json:
        record = {"kind": "foreign_gpu_suites", "device": device, "suites": found}
        versions = installed("pytest-gpumem", "pytest-benchmark", "cupy-cuda13x", "torch", "triton")
        write_record(options.json, {**record, "versions": versions}, indent=1)
    return 1 if any(one["changed"] or not (one["adopted"] or one["counted"]) for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
