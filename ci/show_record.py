"""Print the table of a recorded run, or put it into a Markdown file behind its marker.

    python ci/show_record.py ci/records/nvidia-h200/suite.json
    python ci/show_record.py --write README.md

A marker is `<!-- record: FILE -->` on a line of its own, followed by a ```text block, which is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from pytest_gpumem.records.schema import document_from_json
from pytest_gpumem.reporting.table import table

ROOT = Path(__file__).parents[1]
WIDTH = 100
BLOCK = re.compile(r"(<!-- record: (\S+) -->\n```text\n).*?^```$", re.DOTALL | re.MULTILINE)


def drawn(record: str) -> str:
    """The device, the day and the table of a record, a path below the repository."""
    run = json.loads((ROOT / record).read_text())
    document = document_from_json(run["gpumem"])
    device = document.device
    head = f"{device.name}, driver {device.driver}, {run['datetime'][:10]}"
    return f"{head}\n\n{table(document.rows, device, width=WIDTH, colour=False, notes=False)}"


def renewed(text: str) -> str:
    """Markdown with every marked block drawn anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{drawn(block[2])}\n```", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", help="pytest-benchmark JSON below the repository")
    parser.add_argument("--write", type=Path, help="Markdown file to renew")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(renewed(arguments.write.read_text()))
    elif arguments.record:
        print(drawn(arguments.record))
    else:
        parser.error("name a record or a file to write")
    return 0


if __name__ == "__main__":
    sys.exit(main())
