"""Which tests pytest would run, and the names of their NVTX ranges: collected in a process of its own, without a device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.nsight.tools import filters
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable
from pytest_gpumem.runs.child import for_a_part, pytest_command, run


class BadCall(Exception):
    """A call that cannot be carried out as it stands: one line that names what is wrong with it."""


@dataclass(frozen=True)
class Selected:
    """A test that would run."""

    nodeid: str
    name: str
    """Name of its range in the domain `gpumem`, unique among the tests that run."""
    measures: bool
    """It uses `gpu_benchmark`."""
    managed: bool
    """It uses a fixture that allocates managed memory."""


def named_device(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The device that a call names, and in which words; None where it names none.

    An option of pytest wins over GPUMEM_DEVICE, and the last of several; an ini file's device is none that a call names.
    """
    for position in range(len(arguments) - 1, -1, -1):
        name, equals, value = arguments[position].partition("=")
        if name == "--gpumem-device":
            device = value if equals else next(iter(arguments[position + 1 :]), "")
            return device, f"--gpumem-device {device}"
    device = environment.get("GPUMEM_DEVICE", "")
    return (device, f"GPUMEM_DEVICE={device}") if device else None


def gpu(environment: Mapping[str, str]) -> list[str]:
    """Options of pytest that choose the GPU of GPUMEM_DEVICE, else any: nothing else can be profiled, whatever an ini file says."""
    chosen = environment.get("GPUMEM_DEVICE", "")
    return ["--gpumem-device", chosen if chosen.startswith("cuda") else "cuda"]


def select(
    arguments: Sequence[str], tests: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], object]
) -> tuple[Selected, ...]:
    """The tests that pytest would run, in its order.

    Args:
        arguments: pytest's.
        tests: node ids, as on its command line; empty for all that the arguments select.
        environment: all environment variables.
        echo: takes each line of what pytest said, where it failed.

    Raises:
        BadCall: pytest does not accept its arguments, a module cannot be imported, or no test is selected.
    """
    for test in tests:
        if test.startswith("-"):
            raise BadCall(f"--test takes a pytest node id such as tests/test_table.py::test_lookup, not {test!r}")
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = Path(folder, "ranges.json")
        command = pytest_command(arguments, options=["--collect-only", "-q", f"--gpumem-ranges-file={file}"], tests=tests)
        done = run(command, for_a_part(environment), lambda _: None)
        plain = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if done.exit_code not in (Exit.FINE, Exit.NO_TESTS):
        for line in done.output.splitlines():
            echo(line)
        raise BadCall(f"pytest could not collect the tests ({done.how}); what it said is above")
    found = tuple(Selected(**one) for one in plain)
    if not found:
        chosen = " ".join([*arguments, *tests])
        raise BadCall(f"no test is selected by {chosen!r}" if chosen else "no test is selected: pytest found none here")
    return found


def listing(found: Sequence[Selected]) -> str:
    """What `gpumem ranges` prints: each test with its range's name and the filter of each tool."""
    lines: list[str] = []
    for one in printable(list(found)):
        lines += [one.nodeid, f"  range       {one.name}"]
        lines += [f"  {tool:10}  {text}" for tool, text in filters(one.name, measures=one.measures).items()]
    return "\n".join(lines)


def to_json(found: Sequence[Selected]) -> list[dict[str, object]]:
    """The same as plain values."""
    return [
        {"nodeid": one.nodeid, "range": one.name, "measures": one.measures, "filters": filters(one.name, measures=one.measures)}
        for one in found
    ]
