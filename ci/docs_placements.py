"""Print the table of docs/measuring.md: what placements of buffers and processes differ by, from the record of peers.py."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).parent / "records/nvidia-h200/peers_nvbench.json"


def main() -> None:
    record = json.loads(RECORD.read_text())
    print(
        f"{record['device']['name']}, driver {record['device']['driver']}, {record['ended'][:10]}\n"
    )
    print(
        f"{'arrays of triad':<18}{'between placements':>20}{'of a mean over all':>20}{'between processes':>19}"
    )
    for part in sorted(
        record["summary"]["clean_cold_spread_is_made_of"], key=lambda part: part["mib"]
    ):
        print(
            f"{part['mib']:>7} MiB       {100 * part['between_placements']:>18.2f} %"
            f"{100 * part['expected']:>18.2f} %{100 * part['found']:>17.2f} %"
        )


if __name__ == "__main__":
    main()
