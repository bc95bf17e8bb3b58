"""Settings: precedence, strictness, and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from cases import naming
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.options import MARKER_KEYWORDS, OPTIONS
from pytest_gpumem.runs.processes import switch_off
from pytest_gpumem.settings import (
    Settings,
    SettingsError,
    marker_keywords,
    marker_limits,
    merge_limits,
    of_marker,
    of_test,
    resolve,
)

ON = {"gpumem": True}


def settled(
    command_line: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    ini: dict[str, Any] | None = None,
) -> Settings:
    return resolve({**ON, **(command_line or {})}, environment or {}, ini or {}, "pytest.ini")


def test_defaults() -> None:
    settings = settled()
    assert (settings.device, settings.device_chosen) == ("auto", False)
    assert (settings.mode, settings.sampler, settings.placements, settings.precision) == (
        "clean-cold",
        "auto",
        8,
        0.001,
    )
    assert (settings.budget, settings.total_budget) == (1.0, None)
    assert set(settings.limits.values()) == {None}
    assert (settings.save, settings.baseline, settings.strict) == (False, None, False)
    assert settings.origins["mode"] == "default"
    assert set(settings.origins) == {option.name for option in OPTIONS}


def test_the_table_and_the_class_have_the_same_defaults() -> None:
    from_table = resolve(
        dict.fromkeys((option.key for option in OPTIONS), None), {}, {}, "pytest.ini"
    )
    assert from_table == Settings(origins=from_table.origins)


def test_precedence() -> None:
    everywhere: dict[str, Any] = {
        "command_line": {"gpumem_mode": "hot"},
        "environment": {"GPUMEM_MODE": "dirty-cold"},
        "ini": {"gpumem_mode": "clean-cold"},
    }
    assert settled(**everywhere).mode == "hot"
    assert settled(**everywhere).origins["mode"] == "--gpumem-mode"
    del everywhere["command_line"]
    assert settled(**everywhere).mode == "dirty-cold"
    assert settled(**everywhere).origins["mode"] == "GPUMEM_MODE"
    del everywhere["environment"]
    assert settled(**everywhere).mode == "clean-cold"
    assert settled(**everywhere).origins["mode"] == "gpumem_mode in pytest.ini"


def test_rare_options_are_ini_keys_alone() -> None:
    rare = {option.name for option in OPTIONS if option.ini_only}
    assert rare == {
        *("placements", "precision", "sampler", "adopt", "max_waits", "max_spill"),
        *("max_gpu_page_faults", "max_migrated", "max_kernels", "max_copies", "max_copied_bytes"),
    }
    assert settled({"gpumem_placements": 3}).placements == 8
    with pytest.raises(
        SettingsError,
        match="GPUMEM_PLACEMENTS is set in the environment, but there is no such setting",
    ):
        settled(environment={"GPUMEM_PLACEMENTS": "3"})
    once = resolve(
        ON,
        {"GPUMEM_MAX_LATENCY": "1 s"},
        {"gpumem_placements": "3", "gpumem_mode": "hot", "gpumem_max_latency": "1 us"},
        "pytest.ini",
        ["gpumem_placements", "gpumem_max_latency"],
    )
    assert (once.placements, once.origins["placements"]) == (3, "-o gpumem_placements")
    assert once.origins["mode"] == "gpumem_mode in pytest.ini"
    # It is typed on the command line, which wins over the environment.
    assert once.limits["max_latency"] == "1 us"


def test_an_empty_variable_is_not_set() -> None:
    """CI systems define variables that nobody filled in."""
    settings = settled(
        environment={"GPUMEM_DEVICE": ""},
        ini={"gpumem_device": "sim", "gpumem_mode": "", "gpumem_save": None},
    )
    assert (settings.device, settings.mode, settings.save) == ("sim", "clean-cold", False)


def test_switches_in_the_environment() -> None:
    for text, value in [
        ("1", True),
        ("Yes", True),
        ("on", True),
        ("TRUE", True),
        ("0", False),
        ("no", False),
    ]:
        assert resolve({}, {"GPUMEM": text}, {}, "pytest.ini").enabled is value, text
        assert settled(environment={"GPUMEM_STRICT": text}).strict is value, text


def test_mistakes_name_origin_value_and_what_is_accepted() -> None:
    for name, value, accepted in [
        ("device", "cuda:x", "cuda:N"),
        ("mode", "warm", "clean-cold, dirty-cold, hot"),
        ("sampler", "plain", "auto, blocked, graph, batched, host"),
        ("footprint", "trace", "accepted is auto, on or off; where tests follow"),
        ("sampler", "grap", "'grap' is not one of auto, blocked, graph, batched, host"),
        ("placements", "0", "whole number from 1 on"),
        ("precision", "0.1", '"0.1%"'),
        ("precision", "0%", "above 0"),
        ("budget", "10", '"10 min"'),
        ("max_regression", "1", '"1% + 0.2 us"'),
        ("max_regression", "0%", "accepted is a slow-down"),
        ("min_bandwidth", "0 GB/s", "demands nothing"),
        ("baseline", "  ", "a path such as"),
    ]:
        with naming(name, value, accepted):
            option = next(o for o in OPTIONS if o.name == name)
            in_ini = ({"ini": {option.key: value}}, f"{option.key} in pytest.ini")
            elsewhere = (
                ({"command_line": {option.key: value}}, option.flag),
                ({"environment": {option.variable: value}}, option.variable),
            )
            for where, origin in (in_ini, *(() if option.ini_only else elsewhere)):
                with pytest.raises(SettingsError) as mistake:
                    settled(**where)
                message = str(mistake.value)
                assert message.startswith(f"{origin}: ")
                assert repr(value) in message
                assert accepted in message
                assert "\n" not in message


def test_unknown_variables_are_mistakes() -> None:
    with pytest.raises(
        SettingsError, match=r"GPUMEM_MDOE is set in the environment.*did you mean GPUMEM_MODE\?"
    ):
        settled(environment={"GPUMEM_MDOE": "hot", "GPUMEMORY": "no business of ours"})
    with pytest.raises(
        SettingsError, match="gpumem_mode is set in the environment, but there is no such setting"
    ):
        settled(environment={"gpumem_mode": "hot"})


def test_off_means_inert() -> None:
    """No variable and no ini file breaks a session that does not measure."""
    settings = resolve(
        {}, {"GPUMEM_MODE": "?", "GPUMEM_GPUMEM": "1"}, {"gpumem_mode": "?"}, "pytest.ini"
    )
    assert settings == Settings(origins=settings.origins)
    with pytest.raises(SettingsError, match="--gpumem-mode"):
        resolve({"gpumem_mode": "?"}, {}, {}, "pytest.ini")


def test_the_marker_is_strict() -> None:
    with pytest.raises(
        SettingsError,
        match=r"marker: there is no keyword max_latncy \(did you mean max_latency\?\)",
    ):
        marker_limits({"max_latncy": "1 us"})
    with pytest.raises(SettingsError, match="there is no keyword save"):
        of_test(Settings(), {"save": True})
    with pytest.raises(SettingsError, match="marker: max_regression: 1 is not understood"):
        marker_limits({"max_regression": 1})
    for name, value in ("timeout", 5), ("budget", 1.0), ("max_latency", 2), ("min_bandwidth", 1e9):
        with pytest.raises(SettingsError, match=f"marker: {name}: {value} is .*accepted is"):
            of_test(Settings(), {name: value})
    # A mistake among the overrides is one for the limits too: nobody may look at only one of them and pass.
    with pytest.raises(SettingsError, match="call: mode"):
        marker_limits({"mode": "warm"}, origin="call")
    assert set(MARKER_KEYWORDS) == {
        *("min_bandwidth", "max_latency", "max_regression", "faster_than", "min_overlap"),
        *("max_gpu_page_faults", "max_migrated"),
        *("max_peak", "max_kept", "max_peak_regression"),
        *("max_kernels", "max_copies", "max_copied_bytes", "max_waits", "max_spill"),
        *("mode", "sampler", "placements", "precision", "budget", "timeout"),
        *("gpus", "oversubscribe", "warmups", "adopt", "allow_waits", "allow_kept"),
    }


def test_kept_memory_is_allowed_by_lines_and_warm_ups_are_counted() -> None:
    keywords = {"allow_kept": ("plans.py:*", "conftest.py:7")}
    assert of_test(Settings(), keywords).allow_kept == ("plans.py:*", "conftest.py:7")
    assert of_test(Settings(), {"allow_kept": "plans.py:*"}).allow_kept == ("plans.py:*",)
    for unknown in ("plans.py", 3):
        with pytest.raises(
            SettingsError,
            match=rf"marker: allow_kept: {unknown!r} names no line; accepted is a line such as",
        ):
            of_test(Settings(), {"allow_kept": unknown})
    assert of_marker({"warmups": 2}, "warmups") == 2
    for wrong in (0, True, "two", 1.5):
        with pytest.raises(
            SettingsError, match=r"marker: warmups: .* accepted is a whole number from 1 on"
        ):
            of_marker({"warmups": wrong}, "warmups")


def test_limits_against_others_are_strict() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"faster_than": "0.5 x a"},
            "marker: faster_than: '0.5 x a' claims less than no difference",
        ),
        ({"faster_than": ("a", 2)}, "marker: faster_than: .* is not understood"),
        ({"min_overlap": "0%"}, "marker: min_overlap: '0%' cannot be hidden"),
    ]
    for keywords, message in cases:
        with naming(keywords), pytest.raises(SettingsError, match=message):
            marker_limits(keywords)


@dataclass
class FakeMark:
    kwargs: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()


def test_the_closest_mark_wins() -> None:
    function, module = (
        FakeMark({"mode": "hot"}),
        FakeMark({"mode": "clean-cold", "max_latency": "1 ms"}),
    )
    assert marker_keywords([function, module]) == {"mode": "hot", "max_latency": "1 ms"}
    with pytest.raises(SettingsError, match="takes keywords only, got '1%'"):
        marker_keywords([FakeMark(args=("1%",))])


def test_limits_keep_their_origin() -> None:
    settings = settled(
        {"gpumem_max_regression": "1%"},
        {"GPUMEM_MAX_LATENCY": "5 ms"},
        {"gpumem_min_bandwidth": "1 GB/s"},
    )
    limits = merge_limits(
        marker_limits({"max_latency": "3 ms"}, origin="call"),
        marker_limits({"max_latency": "4 ms", "min_bandwidth": "85% of peak"}),
        settings,
    )
    assert (limits.max_latency, limits.min_bandwidth, limits.max_regression) == (
        "3 ms",
        "85% of peak",
        "1%",
    )
    assert limits.origin == {
        "max_latency": "call",
        "min_bandwidth": "marker",
        "max_regression": "--gpumem-max-regression",
    }
    plain = merge_limits(None, None, settings)
    assert plain.origin["max_latency"] == "GPUMEM_MAX_LATENCY"
    assert plain.origin["min_bandwidth"] == "gpumem_min_bandwidth in pytest.ini"
    assert merge_limits(None, None, settled()).origin == {}


def test_none_lifts_a_limit() -> None:
    settings = settled({"gpumem_max_regression": "1%"})
    limits = merge_limits(None, marker_limits({"max_regression": None}), settings)
    assert limits.max_regression is None
    again = merge_limits(
        marker_limits({"max_regression": "5%"}, "call"),
        marker_limits({"max_regression": None}),
        settings,
    )
    assert again.max_regression == "5%"


def test_a_limit_without_a_unit_is_refused_because_it_could_never_fail() -> None:
    cases: list[dict[str, float]] = [
        {"max_latency": 12},
        {"min_bandwidth": 2.4},
        {"max_regression": 1},
    ]
    for limit in cases:
        with naming(limit), pytest.raises(SettingsError, match="accepted is"):
            marker_limits(limit)


def test_a_marker_overrides_settings() -> None:
    session = settled({"gpumem_budget": "10 min"}, ini={"gpumem_sampler": "host"})
    settings = of_test(
        session,
        {"mode": "hot", "placements": 4, "budget": "3 s", "sampler": None, "max_latency": "1 ms"},
    )
    assert (settings.mode, settings.placements, settings.precision, settings.sampler) == (
        "hot",
        4,
        0.001,
        "host",
    )
    assert (settings.budget, settings.total_budget) == (3.0, None)
    assert (settings.origins["placements"], settings.origins["sampler"]) == (
        "marker",
        "gpumem_sampler in pytest.ini",
    )
    with pytest.raises(SettingsError, match="budget '10 min' is for the whole run"):
        of_test(session, {"budget": "10 min"})


@given(st.sampled_from([o for o in OPTIONS if not o.is_flag]), st.text(max_size=20))
def test_no_text_raises_anything_else(option: Any, text: str) -> None:
    message = ""
    try:
        settled(**{"ini" if option.ini_only else "command_line": {option.key: text}})
    except SettingsError as mistake:
        message = str(mistake)
    assert message == "" or message.startswith(option.key if option.ini_only else option.flag)


def test_what_a_command_switches_off_is_off_wherever_it_is_asked_for() -> None:
    environment = switch_off(
        switch_off({"GPUMEM_SAVE": "1", "GPUMEM_PROCESSES": "3"}, ["save"]), ["processes", "report"]
    )
    settings = settled(
        {"gpumem_save": True, "gpumem_report": "x.html"},
        environment,
        {"gpumem_save": "true", "gpumem_strict": "true"},
    )
    assert (settings.save, settings.processes, settings.report, settings.strict) == (
        False,
        1,
        None,
        True,
    )


@pytest.mark.parametrize("time", ["0 s", "-1 s", "5", "soon"])
def test_a_time_that_no_measurement_ends_in_is_no_time_out(time: str) -> None:
    assert settled({"gpumem_timeout": "none"}).timeout == 0
    with pytest.raises(SettingsError, match="is no time-out; accepted is a time"):
        settled({"gpumem_timeout": time})
