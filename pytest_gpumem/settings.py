"""The settings of a session and of a test: the values of the options, and where each came from.

Precedence: command line, environment, ini file, default. pytest imports this module and
those that it needs in every session: they are cheap to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem import units
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT
from pytest_gpumem.options import BY_NAME, KEYWORD_PARSERS, MARKER_KEYWORDS, OPTIONS, Option
from pytest_gpumem.units import ShownError, did_you_mean

if TYPE_CHECKING:
    # A session without --gpumem does not need records/.
    from pytest_gpumem.records.limits import Limits

COMMAND_VARIABLES = ("GPUMEM_NCU", "GPUMEM_NSYS")  # of commands: no options

WORKERS_RUN = "PYTEST_XDIST_TESTRUNUID"
"""Set by pytest-xdist in its workers, the same in all of a run; those of a GPU take turns."""

# Variables that a command or a run sets for its processes. Their names start with _GPUMEM: another
# version of the plugin, which BASE may have, refuses unknown variables that start with GPUMEM.
FURTHER_PROCESS = "_GPUMEM_FURTHER_PROCESS"  # set in the further processes of a run
SWITCHED_OFF = "_GPUMEM_SWITCHED_OFF"  # see `runs.processes.switch_off`
ACCEPTS = "_GPUMEM_ACCEPTS"  # by a gate, for its screen: changes count that the change accepts
BASELINE_OF = "_GPUMEM_BASELINE_OF"  # by a gate, for its screen: see `Settings.baseline_of`
SELECTION = "_GPUMEM_SELECTION"  # by a gate: file into which a session writes the tests it selects
BASE_SELECTION = "_GPUMEM_BASE_SELECTION"  # by a gate: file of the tests that BASE selects
EXPERIMENT = "gpumem-experiment"  # name of the plugin of `plugin.experiment_process`

# Names that are no options, but switched off as such.
ANNOUNCE = "announce"  # GitHub's job summary and annotations
EVIDENCE = "evidence"  # the record of what a launch ran, which a process of a run takes for all
OF_A_RUN = ("processes", "isolate", "save", "strict", "report", ANNOUNCE)
"""What a whole run does once: switched off in its processes."""


class SettingsError(ShownError, ValueError):
    """A setting that cannot be used: a line with origin, value and what is accepted."""


_NO_LIMITS: Mapping[str, str | None] = MappingProxyType(
    dict.fromkeys(name for name in LIMITS if name in BY_NAME)
)


class Settings(NamedTuple):
    """The settings of a session or a test by the names of the options. Files are as written."""

    enabled: bool = False
    device: str = "auto"
    device_chosen: bool = False  # the command line, the environment or the ini file names a device
    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001  # share of the latency
    budget: float | None = 1.0
    """Seconds for each measurement; None where the budget is for the whole run."""
    total_budget: float | None = None
    """Seconds for all measurements together; None where the budget is for each."""
    timeout: float = 120.0  # seconds; 0: no limit
    limits: Mapping[str, str | None] = _NO_LIMITS  # defaults by name, as written
    footprint: str = "auto"
    adopt: bool = True
    waits: bool = False
    allow_waits: tuple[str, ...] = ()  # "file:line" or "file:*"; of a test
    allow_kept: tuple[str, ...] = ()  # "file:line" or "file:*"; of a test
    processes: int = 1
    isolate: bool = False
    save: bool = False
    baseline: str | None = None  # as written; None: pytest-benchmark's storage
    baseline_of: str | None = None
    """In a gate, its BASE: only runs of the history that HEAD shares with it count."""
    strict: bool = False
    report: str | None = None
    origins: Mapping[str, str] = MappingProxyType({})
    """Where each option came from: "--gpumem-mode", "-o gpumem_sampler", "GPUMEM_MODE",
    "gpumem_mode in pytest.ini", "marker" or "default"."""

    def to_json(self) -> dict[str, object]:
        plain = self._asdict()
        del plain["origins"], plain["limits"]
        return plain | dict(self.limits)


def switched_off(environment: Mapping[str, str]) -> frozenset[str]:
    return frozenset(environment.get(SWITCHED_OFF, "").split(",")) - {""}


def flag_of(name: str) -> str:
    return BY_NAME["budget" if name == "total_budget" else name].flag


def resolve(
    command_line: Mapping[str, object | None],
    environment: Mapping[str, str],
    ini: Mapping[str, object],
    ini_file: str,
    overrides: Collection[str] = (),
) -> Settings:
    """Return the settings of a session. While the switch is off, only the command line counts.

    `command_line`, `ini`: by `Option.key`; None, in `ini` also an empty text, says nothing.
    `overrides`: keys of `ini` whose value comes from pytest's `-o`.
    """

    off = switched_off(environment)

    def value_of(option: Option) -> tuple[Any, str]:
        value, origin = ini.get(option.key), f"{option.key} in {ini_file}"
        if option.key in overrides:
            origin = f"-o {option.key}"
        if not option.ini_only:
            if environment.get(option.variable) and option.key not in overrides:
                value, origin = environment[option.variable], option.variable
            if command_line.get(option.key) is not None:
                value, origin = command_line[option.key], option.flag
        if option.name in off or value is None or (value == "" and origin != option.flag):
            return Settings._field_defaults.get(option.name), "default"
        return _parse(option.parse, value, origin), origin

    if value_of(BY_NAME["enabled"])[0]:
        variables = [option.variable for option in OPTIONS if not option.ini_only]
        keys = [option.key for option in OPTIONS]
        _refuse_unknown(environment, [*variables, *COMMAND_VARIABLES], "in the environment")
        _refuse_unknown(overrides, keys, "by -o")
        _refuse_unknown(ini, keys, f"in {ini_file}")
    else:
        environment, ini = {}, {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        values[option.name], origins[option.name] = value_of(option)
    limits = {name: values.pop(name) for name in _NO_LIMITS}
    for name in OF_FOOTPRINT:
        if values["footprint"] == "off" and limits[name] is not None:
            raise SettingsError(
                f"{origins[name]}: {name} {limits[name]} limits what {origins['footprint']} off "
                "does not watch"
            )
    _split_budget(values)
    chosen = origins["device"] != "default"
    return Settings(**values, limits=limits, device_chosen=chosen, origins=origins)


def _split_budget(values: dict[str, Any]) -> None:
    if isinstance(values.get("budget"), tuple):
        values["budget"], values["total_budget"] = values["budget"]


def _refuse_unknown(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in sorted(names):
        if re.match(r"(?i)GPUMEM(_|$)", name) and name not in known:
            text = f"{name} is set {where}, but there is no such setting"
            raise SettingsError(text + _remedy(name, known))


def _remedy(name: str, known: Collection[str]) -> str:
    return did_you_mean(name, known) or f"; accepted are {', '.join(known)}"


def _parse(parse: Callable[[Any], Any], value: object, origin: str) -> Any:
    try:
        return parse(value)
    except units.QuantityError as error:
        raise SettingsError(f"{origin}: {error}") from None


def marker_keywords(marks: Iterable[Any]) -> dict[str, Any]:
    """Return the keywords of the `gpumem` marks of a test, given the closest first, which wins."""
    keywords: dict[str, Any] = {}
    for mark in marks:
        if mark.args:
            text = f"@pytest.mark.gpumem takes keywords only, got {mark.args[0]!r}"
            raise SettingsError(f'{text}; write such as max_regression="5%"')
        keywords = {**mark.kwargs, **keywords}
    return keywords


def _parsed_keywords(keywords: Mapping[str, Any], origin: str) -> dict[str, Any]:
    values = dict(keywords)
    for name, value in keywords.items():
        if name not in KEYWORD_PARSERS:
            text = f"{origin}: there is no keyword {name}"
            raise SettingsError(text + _remedy(name, MARKER_KEYWORDS))
        if value is not None:
            values[name] = _parse(KEYWORD_PARSERS[name], value, f"{origin}: {name}")
    return values


def of_marker(keywords: Mapping[str, Any], name: str) -> Any:
    return _parsed_keywords(keywords, "marker").get(name)


def of_test(settings: Settings, keywords: Mapping[str, Any]) -> Settings:
    """Return the settings of a test; its limits are still the session's."""
    values = {}
    for name, value in _parsed_keywords(keywords, "marker").items():
        if value is not None and name in Settings._fields:
            values[name] = value
    origins = {**settings.origins, **dict.fromkeys(values, "marker")}
    _split_budget(values)
    if values.get("total_budget") is not None:
        raise SettingsError(
            f"marker: budget {keywords['budget']!r} is for the whole run; accepted is a time "
            'for one measurement such as "1 s" or "2 min each"'
        )
    return settings._replace(**values, origins=origins)


def marker_limits(keywords: Mapping[str, Any], origin: str = "marker") -> Limits:
    """Return the limits among the keywords of a marker or of a call (`origin="call"`). None lifts a
    limit: it stands in `Limits.origin`, and no default takes its place."""
    from pytest_gpumem.records.limits import Limits

    parsed = _parsed_keywords(keywords, origin)
    limits = {name: value for name, value in parsed.items() if name in LIMITS}
    return Limits(**limits, origin=dict.fromkeys(limits, origin))


def merge_limits(
    call: Limits | None,
    marker: Limits | None,
    settings: Settings,
    names: Iterable[str] = OF_MEASUREMENT,
) -> Limits:
    """Return the limits of the call, else of the marker, else of the settings."""
    from pytest_gpumem.records.limits import Limits

    values: dict[str, str | None] = {}
    origin: dict[str, str] = {}
    for name in names:
        if settings.limits.get(name) is not None:
            values[name], origin[name] = settings.limits[name], settings.origins[name]
        for closer in (marker, call):
            # None lifts a default: being named decides, not having a value.
            if closer is not None and name in closer.origin:
                values[name], origin[name] = getattr(closer, name), closer.origin[name]
    return Limits(**values, origin=origin)


def both_limits(of_measurement: Limits, of_footprint: Limits) -> Limits:
    from msgspec.structs import replace

    values = {name: getattr(of_footprint, name) for name in OF_FOOTPRINT}
    origin = {**of_measurement.origin, **of_footprint.origin}
    return replace(of_measurement, **values, origin=origin)
