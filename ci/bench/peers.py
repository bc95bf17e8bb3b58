"""Measure one triad side by side: this project, nvbench (cuda-bench), Triton, PyTorch and CuPy, each in fresh processes.

    python ci/bench/peers.py --processes 12 --json peers.json --seconds 560
    python ci/bench/peers.py --processes 4 --json peers.json --append --babelstream ./cuda-stream --peers stream,babelstream --sizes 1024
    python ci/keep_record.py peers.json ci/records/nvidia-h200/peers_nvbench.json

a = b + 3 c in float32, on arrays of the given sizes, by the same compiled kernel. A round runs every peer once, in an order drawn anew,
each in a process of its own with the GPU to itself and the same allocations; the next workers import their libraries meanwhile.

The peers "stream" and "babelstream" are copy, mul, add, triad and dot on doubles, by this project and by BabelStream's own program. It is
built of github.com/UoB-HPC/BabelStream, v5.0, in `src`: `nvcc -O3 -std=c++17 -arch=sm_90 -DCUDA -I. -Icuda main.cpp cuda/CUDAStream.cu`.

The record is written after every round and holds whole rounds only. Exits with 1 if a worker failed; its error is in the record.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import Outcome, one_after_another
from peers_summary import summary, table
from record_file import chosen_device, installed, record_parser, utc_now, write_record

from pytest_gpumem.kernels.sources import fingerprint
from pytest_gpumem.records.device import DeviceFacts

PEERS = ("gpumem", "nvbench", "triton", "cupy")
STREAM_PEERS = ("stream", "babelstream")
PACKAGES = (
    "pytest-gpumem",
    "cuda-bench",
    "triton",
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "numpy",
)
WORKER = Path(__file__).resolve().parent / "peer_workers.py"
AHEAD = 6
"""Workers that import while another measures: PyTorch takes longer to import than most peers to measure."""
WORKER_SECONDS = 180.0
"""A worker is ended after this long: nvbench may take its time-out of 15 s at each size."""
Job = dict[str, Any]


def jobs_of_round(
    round_number: int,
    *,
    seed: int,
    peers: Sequence[str],
    mib: Sequence[int],
    device: str,
    **more: Any,
) -> list[Job]:
    """Every peer once, in an order of this round's own; each job gets `more` besides."""
    order = np.random.default_rng([seed, round_number]).permutation(len(peers))
    job = {"round": round_number, "device": device, "mib": list(mib), **more}
    return [{**job, "order": place, "peer": peers[i]} for place, i in enumerate(order)]


def command(job: Job) -> list[str]:
    """The command line of a job's worker."""
    return [sys.executable, str(WORKER), json.dumps(job)]


def run_of(outcome: Outcome, card: str | None) -> dict[str, Any]:
    """One worker's part of the record."""
    job = outcome.job
    run = {name: job[name] for name in ("round", "order", "peer")}
    run |= {"card": card, "seconds": outcome.seconds, "error": outcome.error, "cases": []}
    if outcome.answer is not None:
        run |= outcome.answer
    return run


def measure(
    record: dict[str, Any],
    rounds: Sequence[int],
    jobs: Callable[[int], list[Job]],
    *,
    seconds: float,
    after_round: Callable[[dict[str, Any]], None],
    command: Callable[[Job], list[str]] = command,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run whole rounds and add them to the record.

    Args:
        record: gets `runs`; its `card` names the GPU.
        rounds: their numbers.
        jobs: the jobs of a round.
        seconds: no round is begun that would end after this long if it took as long as the longest yet.
        after_round: called with the record after every round.
        command: the command line of a worker.
        now: seconds on a clock.
    """
    begun = now()
    longest = 0.0

    def every_job() -> Iterator[Job]:
        for number in rounds:
            yield from jobs(number)

    workers = one_after_another(every_job(), command, ahead=AHEAD, timeout=WORKER_SECONDS)
    try:
        for number in rounds:
            started = now()
            if started - begun + longest > seconds:
                print(
                    f"stopping before round {number}: {started - begun:.0f} s of {seconds:g} s are used",
                    flush=True,
                )
                break
            runs = [run_of(next(workers), record["card"]) for _ in jobs(number)]
            longest = max(longest, now() - started)
            record["runs"] += runs
            for run in runs:
                if run["error"] is not None:
                    print(
                        f"round {number}, {run['peer']}: {run['error']}",
                        file=sys.stderr,
                        flush=True,
                    )
            print(
                f"round {number}: {now() - started:.1f} s; "
                + ", ".join(f"{r['peer']} {r['seconds']:.1f} s" for r in runs),
                flush=True,
            )
            after_round(record)
    finally:
        workers.close()


def new_record(facts: DeviceFacts) -> dict[str, Any]:
    """A record without runs."""
    return {
        "kind": "peers",
        "device": {
            "name": facts.name,
            "simulated": facts.simulated,
            "driver": facts.driver,
            "cuda": facts.cuda,
            "sm_count": facts.sm_count,
            "l2_bytes": facts.l2_bytes,
            "peak_bandwidth": facts.dram_peak,
        },
        "python": platform.python_version(),
        "versions": installed(*PACKAGES),
        "kernel": {"source": "stream.cu", "sha256": fingerprint("stream.cu")},
        "runs": [],
    }


def write(record: dict[str, Any], path: Path | None) -> None:
    """Write the record with its summary, whole."""
    record["ended"] = utc_now()
    record["summary"] = summary(record)
    if path is not None:
        write_record(path, record)


def _several(what: str, accepted: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        wrong = [name for name in names if name not in accepted]
        if wrong or len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(
                f"{text!r}: {what} are {', '.join(accepted)}, each at most once"
            )
        return names

    return parse


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: sizes are whole numbers of MiB such as 2,32,256, each at most once"
        )
    return sizes


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument(
        "--processes", type=_positive, default=30, help="fresh processes of each peer (default 30)"
    )
    parser.add_argument(
        "--append", action="store_true", help="add the rounds to the record that FILE holds"
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=[2, 32, 256], help="MiB of each array (default 2,32,256)"
    )
    accepted = _several("peers", (*PEERS, *STREAM_PEERS))
    parser.add_argument(
        "--peers",
        type=accepted,
        default=list(PEERS),
        help=f"of these and stream,babelstream (default {','.join(PEERS)})",
    )
    parser.add_argument(
        "--babelstream",
        type=Path,
        metavar="FILE",
        help="BabelStream's program for CUDA, for the peer babelstream",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no round that would end after this long",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the orders (default 1)")
    chosen = parser.parse_args()
    facts = chosen_device(parser, chosen.device).facts
    if facts.simulated and not {"gpumem", "stream"}.issuperset(chosen.peers):
        parser.error(
            f"--device {chosen.device}: on the simulated device there are --peers gpumem,stream only"
        )
    if "babelstream" in chosen.peers and not (chosen.babelstream and chosen.babelstream.is_file()):
        parser.error(
            f"--peers babelstream needs --babelstream FILE, its program; it is {chosen.babelstream}"
        )
    record = new_record(facts)
    if chosen.append:
        if chosen.json is None or not chosen.json.exists():
            parser.error("--append needs --json FILE with a record in it")
        held = json.loads(chosen.json.read_text())
        for name in ("kind", "device", "versions", "kernel"):
            if held.get(name) != record[name]:
                parser.error(
                    f"--append: {chosen.json} holds {name} {held.get(name)!r}, here it is {record[name]!r}"
                )
        cards = {run["card"] for run in held["runs"]}
        if cards - {facts.uuid}:
            parser.error(
                f"--append: {chosen.json} is of another card, {', '.join(map(str, cards))}"
            )
        record["runs"] = held["runs"]
    record["card"] = facts.uuid
    first = 1 + max((run["round"] for run in record["runs"]), default=0)

    def jobs(number: int) -> list[Job]:
        return jobs_of_round(
            number,
            seed=chosen.seed,
            peers=chosen.peers,
            mib=chosen.sizes,
            device=chosen.device,
            executable=None if chosen.babelstream is None else str(chosen.babelstream.resolve()),
        )

    measure(
        record,
        range(first, first + chosen.processes),
        jobs,
        seconds=chosen.seconds,
        after_round=lambda current: write(current, chosen.json),
    )
    if not record["runs"]:
        parser.error(f"--seconds {chosen.seconds:g}: no round was run")
    print(table(record))
    contexts = [run for run in record["runs"] if run.get("context_before_go")]
    if contexts:
        print(
            f"{len(contexts)} workers had a context before their turn: {', '.join(sorted({run['peer'] for run in contexts}))}"
        )
    return 1 if any(run["error"] is not None for run in record["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
