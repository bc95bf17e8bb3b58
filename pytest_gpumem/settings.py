"""The options: one table, from which the command line, the environment, ini files and the marker all derive.

Precedence: command line > environment > ini > default. Rare ones are ini keys alone. A mistake names where it was made, the value, and
what is accepted. Cheap to import (hence named tuples, not dataclasses): pytest reads this module in every session, also in those without
--gpumem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem import units
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT, YES
from pytest_gpumem.units import did_you_mean, refused

if TYPE_CHECKING:
    # records/ needs `statistics`, which a session without --gpumem does not.
    from pytest_gpumem.records.measurement import Limits

MODES = ("clean-cold", "dirty-cold", "hot")
SAMPLERS = ("auto", "blocked", "graph", "batched", "host")
FOOTPRINTS = ("auto", "on", "trace", "off")
"""What the option `footprint` takes: memory is watched in tests that use fixtures or have limits on it, in every test, in every test with
the place of each allocation, or in none."""
DEFAULT_BUDGET = 1.0  # default budget of a measurement, in seconds
DEFAULT_TIMEOUT = 120.0  # default time-out, in seconds
COMMAND_VARIABLES = (
    "GPUMEM_NCU",
    "GPUMEM_NSYS",
)  # environment variables that start with GPUMEM and are no options

WORKERS_RUN = "PYTEST_XDIST_TESTRUNUID"
"""Set by pytest-xdist in its workers, the same in all of a run; those of one GPU take turns."""

# Variables that a command or a run sets for its own processes. Their names start with _GPUMEM: another version of the plugin, which base
# of a duet may have, refuses unknown variables that start with GPUMEM.
FURTHER_PROCESS = "_GPUMEM_FURTHER_PROCESS"  # set in the further processes of a run
EXPERIMENT = "gpumem-experiment"  # name of the plugin of `plugin.experiment_process`, which is in every process of an experiment
SWITCHED_OFF = "_GPUMEM_SWITCHED_OFF"  # by a command, for the pytest that it runs: see `switch_off`
ACCEPTS = "_GPUMEM_ACCEPTS"
"""By a gate, for its screen: the accepted changes count that the change adds."""
BASELINE_OF = "_GPUMEM_BASELINE_OF"  # by a gate, for its screen: see `Settings.baseline_of`
SELECTION = "_GPUMEM_SELECTION"
"""By a gate: the file into which a session writes the tests that it selects."""
BASE_SELECTION = "_GPUMEM_BASE_SELECTION"
"""By a gate, for its screen: the file of the tests that BASE selects."""
ANNOUNCE = "announce"  # no option, but switched off as one: GitHub's job summary and annotations
EVIDENCE = "evidence"  # no option, but switched off as one: the record of what a launch ran, which one process of a run takes for all

_NO = ("0", "false", "no", "off")


class SettingsError(ValueError):
    """A setting that cannot be used: one line with its origin, the value, and the accepted values."""


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*YES, *_NO):
        return value.strip().lower() in YES
    raise refused(value, "1, true, yes, on or 0, false, no, off")


def _choice(accepted: tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: object) -> str:
        if value in accepted:
            return str(value)
        raise units.QuantityError(
            f"{value!r} is not one of {', '.join(accepted)}{did_you_mean(str(value), accepted)}"
        )

    return parse


def _footprint(value: object) -> str:
    if value in FOOTPRINTS:
        return str(value)
    try:
        return "on" if _flag(value) else "off"
    except units.QuantityError:
        raise units.QuantityError(
            f"{value!r} is not one of {', '.join(FOOTPRINTS)}; where tests follow, write --gpumem-footprint=on"
        ) from None


def device_choice(value: object) -> str:
    """A choice of a device, in small letters. Raises `QuantityError` if it is none."""
    if isinstance(value, str) and re.fullmatch(
        r"(?i)auto|cuda(:[0-9]+)?|sim(ulated)?(:[a-z0-9_]+)?", value
    ):
        return value.lower().replace("simulated", "sim")
    raise refused(
        value,
        'auto, cuda, cuda:N (such as "cuda:1"), simulated or sim, sim:NAME (such as "sim:h100")',
        "is not a device",
    )


def _count(value: object) -> int:
    count = (
        int(value) if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,6}\s*", value) else value
    )
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    raise refused(value, "a whole number from 1 on")


def _timeout(value: Any) -> float:
    try:
        return 0.0 if value == "none" else units.parse_time(value)
    except units.QuantityError:
        raise refused(value, f"{units.TIMES_ACCEPTED}, or none", "is no time-out") from None


def _path(kind: str, example: str) -> Callable[[Any], str]:
    def parse(value: object) -> str:
        if not (isinstance(value, str) and value.strip() and "\0" not in value):
            raise refused(value, f"a path such as {example}", f"is no {kind}")
        if value.startswith("~") and os.path.expanduser(value) == value:
            raise units.QuantityError(
                f"{value!r}: there is no user of that name; accepted is a path such as {example}"
            )
        return value

    return parse


def place(value: object) -> str:
    """A folder or a URL of fsspec, as written. Raises `QuantityError`: it is none, or a URL without anything behind its "://"."""
    text = _path("folder or URL", ".benchmarks or s3://bucket/baselines")(value)
    if one_slash := re.fullmatch(
        r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)(.*)", text, re.DOTALL
    ):  # C:/ is a drive of Windows
        shown, root = masked("://".join(one_slash.groups())), "/" if one_slash[1] == "file" else ""
        meant = shown.replace("://", f"://{root}", 1)
        raise units.QuantityError(
            f"{shown.replace('://', ':/', 1)!r} has one slash behind its colon (did you mean {meant}?)"
        )
    if "://" in text and not text.partition("://")[2].strip("/"):
        raise refused(
            masked(text),
            ".benchmarks, file:///srv/baselines or s3://bucket/baselines",
            "is a URL without a place",
        )
    return text


def masked(place: str) -> str:
    """A place without the credentials of a URL: "sftp://***@host/path"."""
    return re.sub(r"(?<=://)[^/@]+@", "***@", place)


def _lines_of_code(value: Any) -> tuple[str, ...]:
    found = tuple(
        line.strip()
        for line in (value.splitlines() if isinstance(value, str) else value)
        if line.strip()
    )
    if not found or any(not re.fullmatch(r"[^:]+:([0-9]+|\*)", line) for line in found):
        raise refused(
            value, 'a line such as "conftest.py:*" or "tests/test_a.py:12"', "names no line"
        )
    return found


class OptionRole(Enum):
    """The purpose of an option. Commands derive from it which options they refuse, switch off or set."""

    SWITCH = "switch"  # turns the plugin on
    MEASURING = "measuring"  # how a row is measured
    JUDGING = "judging"  # the limits of a row, and the baseline that it is compared with
    PROCESSES = "processes"  # in how many processes a run measures
    STRICTNESS = "strictness"  # which verdicts fail a run
    SAVING = "saving"  # changes the baseline
    OUTPUT = "output"  # writes the run's results into a file

    @property
    def of_a_run(self) -> bool:
        """True if it belongs to a whole run: the processes that a command starts have the default."""
        return self not in (OptionRole.SWITCH, OptionRole.MEASURING, OptionRole.JUDGING)


class Option(NamedTuple):
    """One option, wherever it may be set."""

    name: str  # its field in `Settings`
    role: OptionRole  # its purpose
    parse: Callable[[Any], Any]  # from the written value to the field's; raises `QuantityError`
    help: str  # for `pytest --help` and the documentation
    metavar: str | None = None  # the placeholder of the value in the help; None for a flag
    on_marker: bool = False  # also a keyword of `@pytest.mark.gpumem`
    repeats: bool = False  # an ini file gives a value a line
    ini_only: bool = False  # no option of the command line and no variable: `-o gpumem_placements=4` sets it for one run
    bare: str | None = None
    """The value that the option has on the command line if none follows it; None: it needs one."""

    @property
    def default(self) -> Any:
        """The field's value if the option is not set; None of a limit."""
        return Settings._field_defaults.get(self.name)

    @property
    def needs_results(self) -> bool:
        """True if a session that measures nothing cannot do it, such as hold a limit: without `--gpumem` it is a usage error."""
        return self.name in LIMITS or self.role in (
            OptionRole.STRICTNESS,
            OptionRole.SAVING,
            OptionRole.OUTPUT,
        )

    @property
    def is_flag(self) -> bool:
        """True if the command line gives it without a value."""
        return self.metavar is None

    @property
    def key(self) -> str:
        """Name in ini files and of the command line's destination: "gpumem_mode"; "gpumem" for the switch itself."""
        return "gpumem" if self.name == "enabled" else f"gpumem_{self.name}"

    @property
    def flag(self) -> str:
        """Command-line spelling: "--gpumem-max-regression"; "-o gpumem_placements" of an ini key."""
        return f"-o {self.key}" if self.ini_only else "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable: "GPUMEM_MODE"."""
        return self.key.upper()


OPTIONS: tuple[Option, ...] = (
    Option(
        "enabled",
        OptionRole.SWITCH,
        _flag,
        "Measure on a GPU, or on a simulated one; without it the plugin is inert.",
    ),
    Option(
        "device",
        OptionRole.MEASURING,
        device_choice,
        "auto (a GPU, else the simulated device), cuda, cuda:N, simulated (or sim), sim:NAME. Default: auto.",
        "DEVICE",
    ),
    *(
        Option(
            name,
            OptionRole.MEASURING,
            _choice(known),
            f"{what}: {', '.join(known)}. Default: {usual}.",
            name.upper(),
            on_marker=True,
            ini_only=rare,
        )
        for name, known, usual, what, rare in (
            ("mode", MODES, "clean-cold", "State of the L2 cache before each sample", False),
            ("sampler", SAMPLERS, "auto", "How samples are taken", True),
        )
    ),
    Option(
        "placements",
        OptionRole.MEASURING,
        _count,
        "Buffer placements to average over. Default: 8.",
        "N",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "precision",
        OptionRole.MEASURING,
        lambda value: units.parse_part(value, "is no half-width", whole=False),
        "Half-width of the 95% interval, as a share, at which measuring stops. Default: 0.1%.",
        "SHARE",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "budget",
        OptionRole.MEASURING,
        units.parse_budget,
        'Time for each measurement such as "1 s", or for the whole run such as "10 min" or "90 s total". Default: 1 s.',
        "TIME",
        on_marker=True,
    ),
    Option(
        "timeout",
        OptionRole.MEASURING,
        _timeout,
        "Time that a measurement may take beyond its budget. Then its process ends; with --gpumem-isolate, its test alone fails. "
        "none: no limit. Default: 120 s.",
        "TIME",
        on_marker=True,
    ),
    *(
        Option(
            limit.name,
            OptionRole.JUDGING,
            limit.parse,
            f"{limit.help} Default: none.",
            limit.metavar,
            on_marker=True,
            ini_only=limit.ini_only,
        )
        for limit in LIMITS.values()
        if limit.metavar is not None
    ),
    Option(
        "count_pages",
        OptionRole.MEASURING,
        _flag,
        "Count page faults and migrations of managed memory in an untimed pass of each measurement (needs cupti-python on a GPU).",
        on_marker=True,
    ),
    Option(
        "footprint",
        OptionRole.MEASURING,
        _footprint,
        "How much memory tests take, keep and reserve: on (without a value), of every test that touches the GPU; trace, with the places of "
        "allocations; auto, of tests with fixtures of gpumem or with a limit on it; off. Default: auto.",
        "WHAT",
        bare="on",
    ),
    Option(
        "adopt",
        OptionRole.MEASURING,
        _flag,
        "Measure the GPU too where a test calls pytest-benchmark's benchmark. Default: true.",
        on_marker=True,
        ini_only=True,
    ),
    Option(
        "waits",
        OptionRole.MEASURING,
        _flag,
        "Count the lines at which the host waits for the device, of every test that measures nothing (needs cupti-python on a GPU).",
    ),
    Option(
        "allow_waits",
        OptionRole.JUDGING,
        _lines_of_code,
        'Lines whose waits max_waits does not count in the body of a test, such as "conftest.py:*". Default: none.',
        "LINE",
        on_marker=True,
        repeats=True,
        ini_only=True,
    ),
    Option(
        "allow_kept",
        OptionRole.JUDGING,
        _lines_of_code,
        'Lines whose memory max_kept does not count, such as "plans.py:*". Default: none.',
        "LINE",
        on_marker=True,
        repeats=True,
        ini_only=True,
    ),
    Option(
        "no_what_ran",
        OptionRole.MEASURING,
        _flag,
        "Do not record what a launch runs. A noisy row then never passes by the same machine code, and a failure does not say what ran "
        "differently.",
    ),
    Option(
        "processes",
        OptionRole.PROCESSES,
        _count,
        "Fresh processes to measure in, one after another; comparisons are over all of them. Default: 1.",
        "M",
    ),
    Option(
        "isolate",
        OptionRole.PROCESSES,
        _flag,
        "Run the tests in a worker of pytest-xdist, which is replaced if a test crashes it, hangs, or loses the CUDA context.",
    ),
    Option("save", OptionRole.SAVING, _flag, "Accept this run's passing rows into the baseline."),
    Option(
        "baseline",
        OptionRole.JUDGING,
        place,
        "Folder of the baselines, or URL of fsspec such as s3://bucket/baselines. Default: pytest-benchmark's storage.",
        "PLACE",
    ),
    Option(
        "strict",
        OptionRole.STRICTNESS,
        _flag,
        "A missing GPU, a skip, a lost measurement, NEW and UNDECIDED fail.",
    ),
    Option(
        "report",
        OptionRole.OUTPUT,
        _path("file", "gpumem.html"),
        "Write the results as one HTML file. Default: none.",
        "FILE",
    ),
)

_BY_NAME = {option.name: option for option in OPTIONS}
_OF_ONE_TEST: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"gpus": _count, "oversubscribe": _flag, "warmups": _count}
)
"""Keywords of a marker that are no options, with their parsers: how many GPUs the test has for itself, whether it may take more managed
memory than its GPU has free, and how often its function is called before its memory counts."""
_NO_SETTINGS = (*LIMITS, *_OF_ONE_TEST)  # keywords of a marker that are no fields of `Settings`
MARKER_KEYWORDS = tuple(
    dict.fromkeys((*(option.name for option in OPTIONS if option.on_marker), *_NO_SETTINGS))
)
"""Keywords of `@pytest.mark.gpumem`."""


def of_role(*roles: OptionRole) -> tuple[Option, ...]:
    """The options of these roles, in the order of `OPTIONS`."""
    return tuple(option for option in OPTIONS if option.role in roles)


OF_A_RUN = (*(option.name for option in OPTIONS if option.role.of_a_run), ANNOUNCE)
"""Names of the options of a whole run; in the processes that a command starts for it they have their defaults."""

_NO_LIMITS: Mapping[str, str | None] = MappingProxyType(
    {name: None for name, limit in LIMITS.items() if limit.metavar is not None}
)


class Settings(NamedTuple):
    """The settings of a session: the options by their names, which `Option.help` describes. Files are as written."""

    enabled: bool = False
    device: str = "auto"
    device_chosen: bool = False  # the command line, the environment or the ini file names a device
    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001  # share of the latency
    budget: float | None = DEFAULT_BUDGET
    """Seconds for each measurement; None where the budget is for the whole run."""
    total_budget: float | None = None
    """Seconds for all measurements together; None where the budget is for each."""
    timeout: float = DEFAULT_TIMEOUT  # seconds; 0: no limit
    limits: Mapping[str, str | None] = _NO_LIMITS  # defaults by name, as written
    count_pages: bool = False
    footprint: str = "auto"
    adopt: bool = True
    waits: bool = False
    allow_waits: tuple[str, ...] = ()  # "file:line" or "file:*"
    allow_kept: tuple[str, ...] = ()  # "file:line" or "file:*"
    no_what_ran: bool = False
    processes: int = 1
    isolate: bool = False
    save: bool = False
    baseline: str | None = None  # as written; None: pytest-benchmark's storage
    baseline_of: str | None = None
    """In a gate, its BASE: only runs of the history that HEAD shares with it count."""
    strict: bool = False
    report: str | None = None
    origins: Mapping[str, str] = MappingProxyType({})
    """Where each option came from: "--gpumem-mode", "-o gpumem_mode", "GPUMEM_MODE", "gpumem_mode in pytest.ini", "marker" or "default"."""

    def to_json(self) -> dict[str, object]:
        """Plain values for a JSON document: everything but the origins, and the credentials of a URL."""
        plain = {
            name: value
            for name, value in self._asdict().items()
            if name not in ("origins", "limits")
        }
        return (
            plain
            | {"baseline": None if self.baseline is None else masked(self.baseline)}
            | dict(self.limits)
        )


def switch_off(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Variables for a pytest that a command starts: these options have their defaults, whatever its arguments, the ini file and the
    environment say. So a command that judges saves nothing, even if `addopts` asks for it.
    `names`: of options, or `ANNOUNCE`.
    """
    return {**environment, SWITCHED_OFF: ",".join(sorted({*switched_off(environment), *names}))}


def switched_off(environment: Mapping[str, str]) -> frozenset[str]:
    """Names that a command switched off for this process with `switch_off`."""
    return frozenset(name for name in environment.get(SWITCHED_OFF, "").split(",") if name)


def flag_of(name: str) -> str:
    """How the command line sets a field of `Settings`."""
    return _BY_NAME["budget" if name == "total_budget" else name].flag


def _refuse_variables(environment: Mapping[str, str]) -> None:
    """Refuse variables that are no setting. `environment`: as of `resolve`."""
    names = (
        name
        for name in environment
        if re.match(r"(?i)GPUMEM(_|$)", name) and name not in COMMAND_VARIABLES
    )
    _refuse_unknown(
        names,
        [option.variable for option in OPTIONS if not option.ini_only],
        "{} is set in the environment, but there is no such setting",
    )


def resolve(
    command_line: Mapping[str, object | None],
    environment: Mapping[str, str],
    ini: Mapping[str, object],
    ini_file: str,
    overrides: Collection[str] = (),
) -> Settings:
    """The settings of a session.

    While the switch is off, only the command line is read besides it: other names may be somebody else's.
    `command_line`: by `Option.key` ("gpumem_mode"); None where the command line says nothing.
    `environment`: variables that start with `GPUMEM` are read. An empty one counts as not set.
    `ini`: by `Option.key`; None or an empty text where the file says nothing. Other keys that start with `gpumem` are refused.
    `ini_file`: how messages name the ini file, such as "pytest.ini".
    `overrides`: keys of `ini` whose value comes from pytest's `-o`.
    Raises `SettingsError`: one line with the origin, the value and the accepted values.
    """
    off = switched_off(environment)
    enabled = _resolve_one(
        _BY_NAME["enabled"], command_line, environment, ini, f"gpumem in {ini_file}"
    )[0]
    if enabled:
        _refuse_variables(environment)
    else:
        environment, ini = {}, {}
    keys = [option.key for option in OPTIONS]
    for name in sorted(ini):
        if re.match(r"(?i)gpumem(_|$)", name):
            where = (
                "-o {}: there is no such setting"
                if name in overrides
                else f"{{}} is set in {ini_file}, but there is no such setting"
            )
            _refuse_unknown([name], keys, where)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        where = f"-o {option.key}" if option.key in overrides else f"{option.key} in {ini_file}"
        given = (
            (option.default, "default")
            if option.name in off
            else _resolve_one(option, command_line, environment, ini, where)
        )
        values[option.name], origins[option.name] = given
    _refuse_contradictions({name: values[name] for name in OF_FOOTPRINT}, origins)
    _refuse_unwatched(values, origins)
    if isinstance(budget := values["budget"], units.Budget):
        values |= {"budget": budget.each, "total_budget": budget.total}
    return Settings(
        **{name: value for name, value in values.items() if name not in LIMITS},
        limits={name: value for name, value in values.items() if name in LIMITS},
        device_chosen=origins["device"] != "default",
        origins=origins,
    )


def _refuse_unwatched(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Refuse what needs footprints, where they are off."""
    if values["footprint"] == "off" and (
        limited := next((name for name in OF_FOOTPRINT if values[name] is not None), None)
    ):
        raise SettingsError(
            f"{origins[limited]}: {limited} {values[limited]} limits what {origins['footprint']} off does not watch"
        )


def marker_keywords(marks: Iterable[Any]) -> dict[str, Any]:
    """The keywords of several `gpumem` marks of one test, the closest mark (first, as `iter_markers` gives them) winning.
    Raises `SettingsError`: a mark has positional arguments.
    """
    merged: dict[str, Any] = {}
    for mark in marks:
        if mark.args:
            raise SettingsError(
                f"@pytest.mark.gpumem takes keywords only, got {mark.args[0]!r}; accepted are {', '.join(MARKER_KEYWORDS)}"
            )
        merged = {**mark.kwargs, **merged}
    return merged


def of_marker(keywords: Mapping[str, Any], name: str) -> Any:
    """The value of a keyword that is no option: such as "gpus" or "oversubscribe"; None if the marker does not say.
    Raises `SettingsError`: an unknown keyword or value.
    """
    return _parsed_keywords(keywords, "marker").get(name)


def marker_limits(keywords: Mapping[str, Any], origin: str = "marker") -> Limits:
    """The limits among the keywords of a marker or of a single measurement (`origin="call"`).

    A limit that is given as None is lifted: it stands in `origin` with the value None, and no default takes its place.
    Numbers are taken as seconds and bytes per second.
    Raises `SettingsError`: an unknown keyword, or a value that cannot be read.
    """
    from pytest_gpumem.records.measurement import Limits

    given = {
        name: value for name, value in _parsed_keywords(keywords, origin).items() if name in LIMITS
    }
    _refuse_contradictions(given, dict.fromkeys(given, origin))
    return Limits(**given, origin=dict.fromkeys(given, origin))


def _refuse_contradictions(limits: Mapping[str, str | None], origins: Mapping[str, str]) -> None:
    """Refuse a limit on kept memory that a limit on the peak makes impossible to reach."""
    kept, peak = limits.get("max_kept"), limits.get("max_peak")
    if kept is not None and peak is not None and units.parse_bytes(kept) > units.parse_bytes(peak):
        raise SettingsError(
            f"{origins['max_kept']}: max_kept {kept} contradicts max_peak {peak} ({origins['max_peak']}): the peak includes kept "
            "memory; accepted is a max_kept of max_peak or less"
        )


def of_test(settings: Settings, keywords: Mapping[str, Any]) -> Settings:
    """The settings of a test, whose marker has these keywords; its limits are those of the session still.
    Raises `SettingsError`: an unknown keyword, a value that cannot be read, or a budget for the whole run.
    """
    given = {
        name: value
        for name, value in _parsed_keywords(keywords, "marker").items()
        if name not in _NO_SETTINGS and value is not None
    }
    origins = {**settings.origins, **dict.fromkeys(given, "marker")}
    if (budget := given.get("budget")) is not None:
        if budget.each is None:
            raise SettingsError(
                f"marker: budget {keywords['budget']!r} is for the whole run; accepted here is a time for one "
                f'measurement such as "1 s" or "2 min each"'
            )
        given |= {"budget": budget.each, "total_budget": None}
    return settings._replace(**given, origins=origins)


def merge_limits(
    call: Limits | None,
    marker: Limits | None,
    settings: Settings,
    names: Iterable[str] = OF_MEASUREMENT,
) -> Limits:
    """The limits of one measurement, each with its origin: the call's win over the marker's, these over the settings'.
    `call`, `marker`: what they set.
    `names`: the limits that apply.
    """
    from pytest_gpumem.records.measurement import Limits

    values: dict[str, str | None] = {}
    origin: dict[str, str] = {}
    for name in names:
        for level in (call, marker):
            # Being named there decides, not having a value: None lifts a default.
            if level is not None and name in level.origin:
                values[name], origin[name] = getattr(level, name), level.origin[name]
                break
        else:
            if (value := settings.limits.get(name)) is not None:
                values[name], origin[name] = value, settings.origins.get(name, "settings")
    return Limits(**values, origin=origin)


def by_marker(limits: Limits, name: str) -> bool:
    """True if a limit comes from a marker: the test's own, or in a gate that of BASE."""
    return limits.origin.get(name, "").partition(" of ")[0] == "marker"


def both_limits(of_measurement: Limits, of_footprint: Limits) -> Limits:
    """The limits of a row with a measurement and a footprint."""
    from msgspec.structs import replace

    taken = {name: getattr(of_footprint, name) for name in OF_FOOTPRINT}
    return replace(of_measurement, **taken, origin={**of_measurement.origin, **of_footprint.origin})


def loosened(
    limits: Limits, settings: Settings, names: Iterable[str] = OF_MEASUREMENT
) -> list[str]:
    """One sentence for each limit of the command line or the environment that a test or a call loosens."""
    sentences = []
    for name, default in ((name, settings.limits.get(name)) for name in names):
        here, origin, asked = (
            getattr(limits, name),
            limits.origin.get(name, "limit"),
            settings.origins.get(name, "default"),
        )
        # A test may adjust the default of the ini file; a limit for this run is meant for every test.
        if default is None or here == default or not asked.startswith(("-", "GPUMEM")):
            continue
        if here is None:
            sentences.append(f"{name} {default} ({asked}) is lifted ({origin})")
        elif LIMITS[name].looser(here, default):
            sentences.append(f"{name} {here} ({origin}) is looser than {default} ({asked})")
    return sentences


def _resolve_one(
    option: Option,
    command_line: Mapping[str, object | None],
    environment: Mapping[str, str],
    ini: Mapping[str, object],
    in_ini: str,
) -> tuple[Any, str]:
    """Value and origin of one option; `in_ini` is the origin of a value of `ini`."""
    places = [(ini.get(option.key), in_ini)]
    if not option.ini_only:
        places = [
            (command_line.get(option.key), option.flag),
            (environment.get(option.variable), option.variable),
            *places,
        ]
    for written, origin in places:
        # Empty means not set, except on the command line.
        if written is not None and (written not in ("", []) or origin == option.flag):
            return _parse(option.parse, written, origin), origin
    return option.default, "default"


def _parse(parse: Callable[[Any], Any], written: object, origin: str) -> Any:
    try:
        return parse(written)
    except units.QuantityError as error:
        raise SettingsError(f"{origin}: {error}") from None


def _parsed_keywords(keywords: Mapping[str, Any], origin: str) -> dict[str, Any]:
    if not keywords:  # as of most tests of an existing suite
        return {}
    _refuse_unknown(keywords, MARKER_KEYWORDS, f"{origin}: there is no keyword {{}}")
    parsers: dict[str, Callable[[Any], Any]] = {
        name: option.parse for name, option in _BY_NAME.items()
    }
    parsers |= {**{name: limit.parse for name, limit in LIMITS.items()}, **_OF_ONE_TEST}
    return {
        name: None if value is None else _parse(parsers[name], value, f"{origin}: {name}")
        for name, value in keywords.items()
    }


def _refuse_unknown(names: Iterable[str], known: Iterable[str], sentence: str) -> None:
    known = tuple(known)
    for name in sorted(names):
        if name not in known:
            remedy = did_you_mean(name, known) or f"; accepted are {', '.join(known)}"
            raise SettingsError(sentence.replace("{}", name) + remedy)
