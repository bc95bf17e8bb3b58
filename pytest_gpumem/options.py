"""The options: a table, from which command line, environment, ini file and marker derive."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pytest_gpumem import units
from pytest_gpumem.limits import LIMITS, Limit
from pytest_gpumem.units import did_you_mean, refused

MODES = ("clean-cold", "dirty-cold", "hot")
SAMPLERS = ("auto", "blocked", "graph", "batched", "host")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise refused(value, "1, true, yes, on or 0, false, no, off")


def _choice(*accepted: str) -> Callable[[Any], str]:
    def parse(value: object) -> str:
        if value not in accepted:
            hint = did_you_mean(str(value), accepted)
            raise units.QuantityError(f"{value!r} is not one of {', '.join(accepted)}{hint}")
        return str(value)

    return parse


def _footprint(value: object) -> str:
    if value in ("auto", "on", "off"):
        return str(value)
    raise refused(value, "auto, on or off; where tests follow, write --gpumem-footprint=on")


def device_choice(value: object) -> str:
    """Return the choice of a device in small letters."""
    pattern = r"(?i)auto|cuda(:[0-9]+)?|sim(ulated)?(:[a-z0-9_]+)?"
    if isinstance(value, str) and re.fullmatch(pattern, value):
        return value.lower().replace("simulated", "sim")
    accepted = 'auto, cuda, cuda:N (such as "cuda:1"), simulated or sim, sim:NAME'
    raise refused(value, f'{accepted} (such as "sim:h100")', "is not a device")


def _count(value: object) -> int:
    if isinstance(value, (int, str)) and re.fullmatch(r"\s*[0-9]{1,6}\s*", str(value)):
        number = int(value)
        if number >= 1:
            return number
    raise refused(value, "a whole number from 1 on")


def _precision(value: Any) -> float:
    return units.parse_part(value, "is no half-width", whole=False)


def _timeout(value: Any) -> float:
    if value == "none":
        return 0.0
    try:
        seconds = units.parse_time(value)
    except units.QuantityError:
        seconds = 0
    if seconds > 0:
        return seconds
    raise refused(value, f"{units.TIMES_ACCEPTED}, or none", "is no time-out")


def _path(value: object, kind: str, example: str) -> str:
    accepted = f"a path such as {example}"
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise refused(value, accepted, f"is no {kind}")
    if value.startswith("~") and os.path.expanduser(value) == value:
        raise refused(value, accepted, "names no user of this machine")
    return value


def _report(value: object) -> str:
    return _path(value, "file", "gpumem.html")


def _baseline(value: object) -> str:
    folder = _path(value, "folder", ".benchmarks")
    scheme, colon, _ = folder.partition("://")
    if colon:  # the rest may hold credentials
        copies = "a folder such as .benchmarks, which aws s3 sync or actions/cache copies"
        raise refused(f"{scheme}://...", copies, "is a URL")
    return folder


def _lines_of_code(value: Any) -> tuple[str, ...]:
    lines = tuple(value) if isinstance(value, (list, tuple)) else tuple(str(value).split())
    for line in lines or ("",):
        if not re.fullmatch(r"[^:]+:([0-9]+|\*)", str(line)):
            accepted = 'a line such as "conftest.py:*" or "tests/test_a.py:12"'
            raise refused(value, accepted, "names no line")
    return lines


class Option(NamedTuple):
    name: str  # its field in `Settings`
    parse: Callable[[Any], Any]  # from the written value to the field's; raises `QuantityError`
    help: str  # for `pytest --help` and the documentation
    metavar: str | None = None  # the placeholder of the value in the help; None for a flag
    on_marker: bool = False  # also a keyword of `@pytest.mark.gpumem`
    ini_only: bool = False  # no option of the command line and no variable
    bare: str | None = None  # value on the command line if none follows; None: it needs a value

    @property
    def is_flag(self) -> bool:
        """True if the command line gives it without a value."""
        return self.metavar is None

    @property
    def key(self) -> str:
        """Name in ini files and of the command line's destination: "gpumem_mode"."""
        return "gpumem" if self.name == "enabled" else f"gpumem_{self.name}"

    @property
    def flag(self) -> str:
        """Command-line spelling: "--gpumem-max-regression"; "-o gpumem_sampler" of an ini key."""
        return f"-o {self.key}" if self.ini_only else "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable: "GPUMEM_MODE"."""
        return self.key.upper()


def _of_limit(limit: Limit) -> Option:
    text = f"{limit.help} Default: none."
    return Option(limit.name, limit.parse, text, limit.metavar, True, limit.ini_only)


OPTIONS: tuple[Option, ...] = (
    Option(
        "enabled",
        _flag,
        "Measure on a GPU, or on a simulated device; without it the plugin is inert.",
    ),
    Option(
        "device",
        device_choice,
        "auto (a GPU, else the simulated device), cuda, cuda:N, simulated (or sim), sim:NAME. "
        "Default: auto.",
        "DEVICE",
    ),
    Option(
        "mode",
        _choice(*MODES),
        f"State of the L2 cache before each sample: {', '.join(MODES)}. Default: clean-cold.",
        "MODE",
        on_marker=True,
    ),
    Option(
        "sampler",
        _choice(*SAMPLERS),
        f"How samples are taken: {', '.join(SAMPLERS)}. Default: auto.",
        "SAMPLER",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "placements",
        _count,
        "Buffer placements to average over. Default: 8.",
        "N",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "precision",
        _precision,
        "Half-width of the 95% interval, as a share, at which measuring stops. Default: 0.1%.",
        "SHARE",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "budget",
        units.parse_budget,
        'Time for each measurement such as "1 s", or for the whole run such as "10 min" or '
        '"90 s total". Default: 1 s.',
        "TIME",
        on_marker=True,
    ),
    Option(
        "timeout",
        _timeout,
        "Time that a measurement may take beyond its budget. Then its process ends; with "
        "--gpumem-isolate, its test alone fails. none: no limit. Default: 120 s.",
        "TIME",
        on_marker=True,
    ),
    *(_of_limit(limit) for limit in LIMITS.values() if limit.metavar is not None),
    Option(
        "footprint",
        _footprint,
        "How much memory tests take, keep and reserve: on (without a value), of every test that "
        "touches the GPU; auto, of tests with fixtures of gpumem or with a limit on it; off. "
        "Default: auto.",
        "WHAT",
        bare="on",
    ),
    Option(
        "adopt",
        _flag,
        "Measure the GPU too where a test calls pytest-benchmark's benchmark. Default: true.",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "waits",
        _flag,
        "Count the lines at which the host waits for the device, of every test that measures "
        "nothing (needs cupti-python on a GPU).",
    ),
    Option(
        "processes",
        _count,
        "Fresh processes to measure in, in turn; comparisons are over all of them. Default: 1.",
        "M",
    ),
    Option(
        "isolate",
        _flag,
        "Run the tests in a worker of pytest-xdist, which is replaced if a test crashes it, hangs, "
        "or loses the CUDA context.",
    ),
    Option("save", _flag, "Store this run's passing rows in the baseline."),
    Option(
        "baseline",
        _baseline,
        "Folder of the baselines. Default: pytest-benchmark's storage.",
        "PLACE",
    ),
    Option("strict", _flag, "A missing GPU, a skip, a lost measurement, NEW and UNDECIDED fail."),
    Option("report", _report, "Write the results as an HTML file. Default: none.", "FILE"),
)

BY_NAME = {option.name: option for option in OPTIONS}
NEEDS_RESULTS = (*LIMITS, "save", "strict", "report")
"""Options that a session without --gpumem refuses: it measures nothing."""
KEYWORD_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    **{option.name: option.parse for option in OPTIONS if option.on_marker},
    **{name: limit.parse for name, limit in LIMITS.items()},
    # Of the marker alone:
    "gpus": _count,  # GPUs that the test has for itself
    "oversubscribe": _flag,  # it may take more managed memory than its GPU has free
    "warmups": _count,  # calls of its function before its memory counts
    "allow_kept": _lines_of_code,  # lines whose memory max_kept does not count
    "allow_waits": _lines_of_code,  # lines whose waits max_waits does not count in its body
}
MARKER_KEYWORDS = tuple(KEYWORD_PARSERS)
"""Keywords of `@pytest.mark.gpumem`."""
