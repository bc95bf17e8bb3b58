"""Print the table of docs/explanation/placement.md: what placements of buffers and processes differ by, from the records of peers.py."""

from __future__ import annotations

import json
from pathlib import Path

RECORDS = Path(__file__).parent / "records" / "nvidia-h200"
CONDITIONS = {"same": "the same allocations in every process", "random": "other allocations first"}


def main() -> None:
    for name in ("peers.json", "peers_random.json"):
        record = json.loads((RECORDS / name).read_text())
        parts = record["summary"]["clean_cold_spread_is_made_of"]
        print(
            f"{record['device']['name']}, driver {record['device']['driver']}, {record['ended'][:10]}; {CONDITIONS[parts[0]['condition']]}"
        )
        print(f"{'arrays of triad':<18}{'between placements':>20}{'of a mean over all':>20}{'between processes':>19}")
        for part in sorted(parts, key=lambda part: part["mib"]):
            print(
                f"{part['mib']:>7} MiB       {100 * part['between_placements']:>18.2f} %"
                f"{100 * part['expected']:>18.2f} %{100 * part['found']:>17.2f} %"
            )
        print()


if __name__ == "__main__":
    main()
