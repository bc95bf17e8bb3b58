"""Print the table of docs/measuring.md: one kernel in each state of the cache, from the record of peers.py."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).parent / "records/nvidia-h200/peers_nvbench.json"
WAYS = {
    "gpumem clean-cold": "clean-cold: flushed by reads",
    "gpumem dirty-cold": "dirty-cold: flushed by writes",
    "nvbench cold": "nvbench, cold",
    "gpumem hot": "hot: launched again and again",
}


def main() -> None:
    record = json.loads(RECORD.read_text())
    mean = {(row["way"], row["mib"]): row["mean"] for row in record["summary"]["rows"]}
    sizes = sorted(mib for way, mib in mean if way == "gpumem hot")
    print(
        f"{record['device']['name']}, driver {record['device']['driver']}, {record['ended'][:10]}\n"
    )
    print(f"{'triad, us':<34}" + "".join(f"3 x {mib} MiB".rjust(14) for mib in sizes))
    for way, words in WAYS.items():
        print(f"{words:<34}" + "".join(f"{1e6 * mean[way, mib]:>14.2f}" for mib in sizes))


if __name__ == "__main__":
    main()
