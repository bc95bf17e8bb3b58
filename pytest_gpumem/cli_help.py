"""What `gpumem --help` and the help of each command show besides their own texts: a line for each, and examples to copy."""

from __future__ import annotations

from collections.abc import Iterator

import click

SUMMARIES = {
    "accept": "Begin a new baseline of a test, with a reason.",
    "compare": "Compare result files, without a GPU.",
    "completion": "Print what completes this command in a shell.",
    "doctor": "Say what this machine can measure, and what is amiss.",
    "duet": "Decide between base and head in alternating processes.",
    "explain": "Say why tests got slower.",
    "gate": "Hold a pull request to its base, in a pipeline.",
    "l2-sweep": "Find a test's best set-aside and hit ratio.",
    "profile": "Profile tests with Nsight Systems or Nsight Compute.",
    "ranges": "List the NVTX ranges of tests.",
    "read": "Say what Nsight's tools recorded of each test.",
    "report": "Make an HTML report of result files.",
    "schema": "Print the JSON Schema of results.",
    "traffic": "Compare declared bytes with counted ones.",
}
"""By command, what stands beside it in the list of all; click would cut its first sentence."""

EXAMPLES = {
    "accept": ('gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"',),
    "compare": (
        "gpumem compare base.json head.json --max-regression 1%",
        "gpumem compare 'base-*.json' 'head-*.json'    # several processes a side",
    ),
    "completion": ("gpumem completion bash >> ~/.bashrc", "gpumem completion fish > ~/.config/fish/completions/gpumem.fish"),
    "doctor": ("gpumem doctor", "gpumem doctor --json > machine.json"),
    "duet": (
        "gpumem duet main                              # the working tree against main",
        "gpumem duet main --test tests/test_a.py::test_triad",
        "gpumem duet v1.2 --flagged run.json -- -k 'not slow'",
    ),
    "explain": (
        "gpumem explain --base main tests/test_a.py::test_triad",
        "gpumem explain base.json head.json            # without a GPU",
    ),
    "gate": (
        "gpumem gate origin/main                       # in a pull request's pipeline",
        "gpumem gate origin/main --strict -- tests/gpu # only PASS of every row is green",
        "gpumem gate origin/main --screen-only         # without the duet",
    ),
    "l2-sweep": ("gpumem l2-sweep tests/test_table.py::test_lookup --map l2.png",),
    "profile ncu": ("gpumem profile ncu --test tests/test_a.py::test_triad --set full",),
    "profile nsys": ("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep",),
    "ranges": ("gpumem ranges -- tests/test_a.py",),
    "read": ("gpumem read triad.nsys-rep", "gpumem read triad.ncu-rep --results out.json"),
    "report": ("gpumem report out.json",),
    "schema": ("gpumem schema > gpumem.schema.json",),
    "traffic": ("gpumem traffic --test tests/test_a.py::test_triad", "gpumem traffic --json traffic.json -- -k 'not slow'"),
}
"""By command, calls that work as they stand."""


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands below a group, with what is typed for them."""
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


def dress(group: click.Group) -> None:
    """Give every command its line in the list and its examples."""
    for path, command in commands(group):
        if path in SUMMARIES:
            command.short_help = SUMMARIES[path]
        if path in EXAMPLES:
            # click fills paragraphs up, but not those that begin so.
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[path])
