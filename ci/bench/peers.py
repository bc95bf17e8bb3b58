"""Measure one triad side by side: this project, nvbench (cuda-bench), Triton, PyTorch and CuPy, each in fresh processes.

    python ci/bench/peers.py --processes 12 --json peers.json --seconds 560
    python ci/keep_record.py peers.json ci/records/nvidia-h200/peers_nvbench.json

a = b + 3 c in float32, on arrays of the given sizes, by the same compiled kernel. A round runs every peer once, in an order drawn anew,
each in a process of its own with the GPU to itself and the same allocations.

The record is written after every round and holds whole rounds only. Exits with 1 if a worker failed; its error is in the record.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from peers_summary import summary, table
from record_file import chosen_device, device_of, installed, record_parser, utc_now, write_record

from pytest_gpumem.kernels.kernel import fingerprint
from pytest_gpumem.records.device import DeviceFacts

PEERS = ("gpumem", "nvbench", "triton", "cupy")
PACKAGES = "pytest-gpumem cuda-bench triton torch cupy-cuda13x cupy-cuda12x cuda-bindings numpy"
WORKER = Path(__file__).resolve().parent / "peer_workers.py"
WORKER_SECONDS = 180.0
"""A worker is ended after this long: nvbench may take its time-out of 15 s at each size."""
SHOWN = 2000
"""Characters of a failed worker's last words that are kept."""
Job = dict[str, Any]


def command(job: Job) -> list[str]:
    """The command line of a job's worker."""
    return [sys.executable, str(WORKER), json.dumps(job)]


def round_of(number: int, common: Job, peers: Sequence[str], card: str | None) -> list[Job]:
    """Run every peer once, in an order of this round's own; their parts of the record."""
    runs = []
    for order, i in enumerate(np.random.default_rng([1, number]).permutation(len(peers))):
        run: Job = {"round": number, "order": order, "peer": peers[i]}
        began, words = time.monotonic(), ""
        try:
            done = subprocess.run(
                command({**common, **run}),
                capture_output=True,
                text=True,
                timeout=WORKER_SECONDS,
                check=False,
            )
            words = f"exit status {done.returncode}: {done.stderr[-SHOWN:].strip()}"
            answer = {"error": None, **json.loads(done.stdout)}
        except (subprocess.TimeoutExpired, ValueError) as error:
            answer = {"error": words or str(error), "cases": []}
            print(f"round {number}, {run['peer']}: {answer['error']}", file=sys.stderr, flush=True)
        runs.append({**run, "card": card, "seconds": time.monotonic() - began, **answer})
    return runs


def new_record(facts: DeviceFacts) -> dict[str, Any]:
    """A record without runs."""
    figures = {
        "sm_count": facts.sm_count,
        "l2_bytes": facts.l2_bytes,
        "peak_bandwidth": facts.dram_peak,
    }
    return {
        "kind": "peers",
        "device": {**device_of(facts), **figures},
        "python": platform.python_version(),
        "versions": installed(*PACKAGES.split()),
        "kernel": {"source": "stream.cu", "sha256": fingerprint("stream.cu")},
        "runs": [],
    }


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument(
        "--processes", type=int, default=30, help="fresh processes of each peer (default 30)"
    )
    parser.add_argument("--sizes", default="2,32,256", help="MiB of each array (default 2,32,256)")
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        help=f"of these (default {','.join(PEERS)})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no round that would end after this long",
    )
    chosen = parser.parse_args()
    peers = chosen.peers.split(",")
    facts = chosen_device(parser, chosen.device).facts
    if wrong := {*peers} - {*PEERS}:
        parser.error(f"--peers: there is no {', '.join(sorted(wrong))}")
    if facts.simulated and peers != ["gpumem"]:
        parser.error(f"--device {chosen.device}: there is --peers gpumem only")
    record = {**new_record(facts), "card": facts.uuid}
    common = {
        "device": chosen.device,
        "mib": [int(size) for size in chosen.sizes.split(",")],
    }
    begun, longest = time.monotonic(), 0.0
    for number in range(1, 1 + chosen.processes):
        started = time.monotonic()
        if started - begun + longest > chosen.seconds:
            print(f"stopping before round {number}", flush=True)
            break
        record["runs"] += round_of(number, common, peers, record["card"])
        longest = max(longest, time.monotonic() - started)
        print(f"round {number}: {time.monotonic() - started:.1f} s", flush=True)
        record["ended"] = utc_now()
        record["summary"] = summary(record)
        if chosen.json is not None:
            write_record(chosen.json, record)
    if "summary" not in record:
        parser.error("no round was run")
    print(table(record))
    return 1 if any(run["error"] is not None for run in record["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
