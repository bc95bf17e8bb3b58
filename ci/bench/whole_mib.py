"""Lists of sizes on a command line."""

from __future__ import annotations

import argparse


def whole_mib(text: str) -> tuple[int, ...]:
    """Whole numbers of MiB such as "2,32", each once: a `type` of argparse."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of MiB such as 2,32, each once")
    return tuple(int(part) for part in parts)
