"""Options: where they come from, and what a mistake in one says."""

from __future__ import annotations

import sys

import pytest
from sessions import SIMULATED, TRIAD, Run, results_in

from pytest_gpumem.devices import cuda, opening
from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.options import BY_NAME

SHOW = """
def test_it(request):
    settings = request.config.pluginmanager.getplugin("gpumem-session").settings
    print("mode", settings.mode, "from", settings.origins["mode"])
    print("placements", settings.placements, "from", settings.origins["placements"])
    print("timeout", settings.timeout, "from", settings.origins["timeout"])
    print("device", settings.device, "from", settings.origins["device"])
"""


def only_line(result: pytest.RunResult) -> str:
    """The one line of a usage error: exit 4, no traceback."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.stderr.lines if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("ERROR: gpumem: ")
    return lines[0]


def test_command_line_over_environment_over_ini(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(SHOW)
    pytester.makeini(
        "[pytest]\ngpumem_mode = hot\ngpumem_placements = 3\ngpumem_device = sim:h200\ngpumem_timeout = 1 min"
    )
    monkeypatch.setenv("GPUMEM_TIMEOUT", "2 min")
    result = gpumem("-s", "--gpumem-device", "sim:h200", "-o", "gpumem_placements=4")
    result.stdout.fnmatch_lines(
        [
            "*mode hot from gpumem_mode in tox.ini",
            "*placements 4 from -o gpumem_placements",
            "*timeout 120.0 from GPUMEM_TIMEOUT",
            "*device sim:h200 from --gpumem-device",
        ]
    )


def test_an_ini_key_for_one_run_reaches_the_workers(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    gpumem(
        "-n1", "-o", "gpumem_sampler=host", "--gpumem-budget=5 ms", "--benchmark-json=out.json"
    ).assert_outcomes(passed=1)
    assert results_in(pytester.path)["rows"][0]["measurement"]["sampler"] == "host"


def test_an_ini_key_is_no_option_and_no_variable(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert (
        "unrecognized arguments: --gpumem-sampler=host"
        in gpumem("--gpumem-sampler=host").stderr.str()
    )
    monkeypatch.setenv("GPUMEM_SAMPLER", "host")
    assert "GPUMEM_SAMPLER is set in the environment, but there is no such setting" in only_line(
        gpumem()
    )


@pytest.mark.parametrize("switch", ["command line", "environment", "ini"])
def test_the_switch(
    pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    pytester.makepyfile("def test_it(gpu_device): assert gpu_device.facts.simulated")
    pytester.makeini(
        "[pytest]\ngpumem_device = sim\n" + ("gpumem = true" if switch == "ini" else "")
    )
    if switch == "environment":
        monkeypatch.setenv("GPUMEM", "1")
    session(*(["--gpumem"] if switch == "command line" else [])).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--gpumem-mode", "lukewarm"],
            ["--gpumem-mode", "'lukewarm'", "clean-cold, dirty-cold, hot"],
        ),
        (["-o", "gpumem_placements=0"], ["-o gpumem_placements", "'0'", "from 1"]),
        (["-o", "gpumem_placement=2"], ["by -o", "did you mean gpumem_placements?"]),
        (["--gpumem-device", "sim:nothing"], ["--gpumem-device", "'sim:nothing'", "h100"]),
    ],
)
def test_a_mistake_is_one_line(
    pytester: pytest.Pytester, gpumem: Run, arguments: list[str], named: list[str]
) -> None:
    pytester.makepyfile("def test_it(): pass")
    line = only_line(gpumem(*arguments))
    for text in named:
        assert text in line


def test_a_misspelt_ini_key_is_an_error(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    pytester.makeini("[pytest]\ngpumem_max_regresion = 5%")
    assert (
        "gpumem_max_regresion is set in tox.ini, but there is no such setting "
        "(did you mean gpumem_max_regression?)" in only_line(gpumem())
    )


@pytest.mark.parametrize("option", ["--gpumem-baseline", "--gpumem-report"])
def test_a_path_after_a_space_is_no_test(
    pytester: pytest.Pytester, gpumem: Run, option: str
) -> None:
    """pytest would take it for tests, and another folder for rootdir, without its ini file."""
    pytester.makepyfile("def test_it(): pass")
    path = pytester.mkdir("kept")
    assert f"write {option}={path}: after a space" in only_line(gpumem(option, str(path)))


def test_cuda_without_a_gpu(pytester: pytest.Pytester, without_gpu: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    line = only_line(without_gpu("--gpumem", "--gpumem-device", "cuda"))
    assert "--gpumem-device" in line
    assert "the driver is broken" in line
    assert "--gpumem-device sim" in line


@pytest.fixture
def without_gpu(session: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """As `session`, with the machine's GPU taken away, if it has one."""

    def no_gpu(index: int) -> None:
        raise NoDevice(f"no CUDA device {index}: the driver is broken")

    # CUDA keeps its GPUs once it is initialised.
    monkeypatch.setattr(opening, "_cuda", no_gpu)
    return session


def test_auto_without_a_gpu_says_simulated(pytester: pytest.Pytester, without_gpu: Run) -> None:
    pytester.makepyfile("def test_it(gpu_device): assert gpu_device.facts.simulated")
    result = without_gpu("--gpumem")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*SIMULATED*the driver is broken*"])


def test_ci_without_a_choice_needs_a_gpu(
    pytester: pytest.Pytester,
    without_gpu: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile("def test_it(): pass")
    line = only_line(without_gpu("--gpumem"))
    assert "CI" in line
    assert "the driver is broken" in line
    assert "--gpumem-device sim" in line


@pytest.mark.parametrize(
    "where",
    [
        "environment",
        "ini",
    ],
)
def test_ci_with_a_choice_runs(
    pytester: pytest.Pytester, without_gpu: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("CI", "true")
    if where == "environment":
        monkeypatch.setenv("GPUMEM_DEVICE", "auto")
    if where == "ini":
        pytester.makeini("[pytest]\ngpumem_device = auto")
    pytester.makepyfile("def test_it(gpu_device): assert gpu_device.facts.simulated")
    arguments = ["--gpumem-device", "auto"] if where == "command line" else []
    without_gpu("--gpumem", *arguments).assert_outcomes(passed=1)


def test_ci_with_a_baseline_of_a_gpu_needs_one_unless_sim_is_chosen(
    pytester: pytest.Pytester, without_gpu: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile("def test_it(): pass")
    (pytester.path / "stored").mkdir()
    for key in ("simulated-NVIDIA-A100-sm80-80GiB", "NVIDIA-H100-80GB-HBM3-sm90-80GiB-ecc"):
        without_gpu("--gpumem", "--gpumem-device=auto", "--gpumem-baseline=stored").assert_outcomes(
            passed=1
        )
        (pytester.path / "stored" / key / "gpumem").mkdir(parents=True)
        (pytester.path / "stored" / key / "gpumem" / "a.json").write_text("{}")
    line = only_line(without_gpu("--gpumem", "--gpumem-device=auto", "--gpumem-baseline=stored"))
    assert "NVIDIA-H100-80GB-HBM3-sm90-80GiB-ecc" in line
    assert "--gpumem-device sim" in line
    without_gpu("--gpumem", "--gpumem-device=sim", "--gpumem-baseline=stored").assert_outcomes(
        passed=1
    )
    monkeypatch.delenv("CI")
    without_gpu("--gpumem", "--gpumem-device=auto", "--gpumem-baseline=stored").assert_outcomes(
        passed=1
    )


def test_strict_needs_the_gpu(pytester: pytest.Pytester, without_gpu: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert "--gpumem-strict" in only_line(without_gpu("--gpumem", "--gpumem-strict"))


@pytest.mark.parametrize(
    ("name", "value"), [("save", ""), ("strict", ""), ("report", "=out"), ("max_peak", "=4 GiB")]
)
def test_an_option_that_needs_results_is_a_usage_error_without_the_switch(
    pytester: pytest.Pytester, name: str, value: str
) -> None:
    """A pipeline that forgets --gpumem must not pass and write nothing."""
    pytester.makepyfile("def test_it(): pass")
    option = BY_NAME[name]
    argument = option.flag + value
    line = only_line(pytester.runpytest_inprocess("-p", "no:cacheprovider", argument))
    assert f"{option.flag} without --gpumem: nothing would be measured" in line


@pytest.mark.parametrize(
    "name",
    [
        "junitxml",
        "terminal",
    ],
)
def test_without_a_plugin_of_pytest(pytester: pytest.Pytester, gpumem: Run, name: str) -> None:
    pytester.makepyfile(TRIAD)
    assert gpumem("-p", f"no:{name}", "--benchmark-json=out.json").ret == pytest.ExitCode.OK
    assert results_in(pytester.path)["rows"][0]["verdict"]["outcome"] == "MEASURED"


def test_without_pytest_benchmark(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    assert "pytest-benchmark" in only_line(gpumem("-p", "no:benchmark"))


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ("max_latncy='1 ms'", "did you mean max_latency?"),
        ("'1 ms'", "keywords only"),
    ],
)
def test_a_mistake_in_a_marker_stops_a_session_that_measures_and_fails_its_test_in_another(
    pytester: pytest.Pytester, session: Run, gpumem: Run, keywords: str, named: str
) -> None:
    pytester.makepyfile(
        test_it=f"import pytest\n@pytest.mark.gpumem({keywords})\ndef test_it(): raise AssertionError('ran')\ndef test_cpu(): pass"
    )
    line = only_line(gpumem())
    assert "test_it.py::test_it" in line
    assert named in line
    result = session()
    result.assert_outcomes(errors=1, passed=1)
    assert named in result.stdout.str()


def test_all_mistakes_in_markers_are_listed(
    pytester: pytest.Pytester,
    gpumem: Run,
) -> None:
    pytester.makepyfile(
        "".join(
            f"import pytest\n@pytest.mark.gpumem(max_latncy=1)\ndef test_{n}(): pass\n"
            for n in range(12)
        )
    )
    assert "::test_0 and 11 more: marker: there is no keyword max_latncy" in only_line(gpumem())


MISTAKEN = "import pytest\n@pytest.mark.gpumem(max_latncy=1)\n"


def test_a_conftest_that_deselects_a_test_or_marks_one_hides_no_mistake(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(f"{MISTAKEN}def test_it(): pass\ndef test_sound(): pass")
    pytester.makeconftest("def pytest_collection_modifyitems(items): del items[0]")
    assert "test_it: marker: there is no keyword max_latncy" in only_line(gpumem())
    assert "test_it: marker: there is no keyword max_latncy" in only_line(gpumem("-k", "sound"))
    pytester.makeconftest(
        "import pytest\ndef pytest_collection_modifyitems(items):\n    del items[0]\n"
        "    items[0].add_marker(pytest.mark.gpumem(max_ltency=1))"
    )
    assert "test_sound: marker: there is no keyword max_ltency" in gpumem().stderr.str()


def test_an_option_that_is_none_is_refused_by_pytest(
    pytester: pytest.Pytester,
) -> None:
    word = "--gpumem-max-regresion=5%"
    result = pytester.runpytest("--gpumem", word)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"unrecognized arguments: {word}" in result.stderr.str()


def test_help_shows_the_options(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--help")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*--gpumem-max-regression=MARGIN*"])


def test_without_nvidia_ml_py_the_simulated_device_says_why(
    pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as on macOS, for which it is no dependency
    monkeypatch.delitem(sys.modules, "pytest_gpumem.devices.cuda.nvml", raising=False)
    monkeypatch.delattr(cuda, "nvml", raising=False)
    pytester.makepyfile("def test_it(gpu_device): assert gpu_device.facts.simulated")
    result = session("--gpumem")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*SIMULATED*nvidia-ml-py cannot be imported*"])
    assert "nvidia-ml-py" in only_line(session("--gpumem", "--gpumem-device", "cuda"))


def test_an_option_that_could_do_nothing_is_refused(
    pytester: pytest.Pytester,
    gpumem: Run,
) -> None:
    pytester.makepyfile("def test_it(): pass")
    line = only_line(gpumem("--gpumem-baseline=s3://ada:SECRET@bucket/base"))
    assert "--gpumem-baseline: 's3://...' is a URL; accepted is a folder such as .benchm" in line
    assert "aws s3 sync" in line
    assert "SECRET" not in line


@pytest.mark.parametrize(
    "where",
    [
        "command line",
        "ini",
    ],
)
def test_a_baseline_that_is_named_and_not_there_is_refused(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its rows would be NEW, and fail nothing. A session that saves makes it, and one that collects needs none."""
    pytester.makepyfile(TRIAD)
    assert gpumem("--gpumem-baseline=baseline", "--gpumem-save").ret == pytest.ExitCode.OK
    if where == "environment":
        monkeypatch.setenv("GPUMEM_BASELINE", "basline")
    if where == "ini":
        pytester.makeini("[pytest]\ngpumem_baseline = basline")
    words = ("--gpumem-baseline=basline",) if where == "command line" else ()
    line = only_line(gpumem(*words))
    assert "there is no folder " in line
    assert "did you mean baseline?" in line
    assert "--gpumem-save" in line
    for fine in (("--collect-only",), ("--gpumem-save",), ()):
        assert gpumem(*words, *fine).ret == pytest.ExitCode.OK
    (file,) = pytester.path.glob("test_*.py")
    line = only_line(gpumem(f"--gpumem-baseline={file.name}", "--gpumem-save"))
    assert line.endswith(f"--gpumem-baseline: {file} is a file, not a folder")


def test_a_limit_without_the_switch_is_refused(
    pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(TRIAD)
    assert "--gpumem-max-regression without --gpumem: " in only_line(
        session("--gpumem-max-regression", "5%")
    )
    monkeypatch.setenv(
        "GPUMEM_MAX_REGRESSION", "5%"
    )  # where nobody measures, a machine may have it
    session().assert_outcomes(skipped=1)


def test_forked_tests_are_refused(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(
        "def pytest_addoption(parser): parser.addoption('--forked', action='store_true')"
    )
    pytester.makepyfile(TRIAD)
    assert "--forked runs each test in a copy of this process" in only_line(gpumem("--forked"))


@pytest.mark.skipif(
    int(pytest.__version__.partition(".")[0]) < 9, reason="native TOML is of pytest 9"
)
def test_native_toml_takes_texts(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makepyfile(TRIAD)
    toml = pytester.path / "pyproject.toml"
    lines = ["[tool.pytest]", 'gpumem = "true"', 'gpumem_device = "sim"']
    toml.write_text("\n".join([*lines, 'gpumem_placements = "4"']))
    session("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert results_in(pytester.path)["settings"]["placements"] == 4
    toml.write_text("\n".join([*lines, "gpumem_placements = 4"]))
    result = session()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "'gpumem_placements' expects a string, got int: 4" in result.stderr.str()


@pytest.mark.usefixtures("new_interpreters")
def test_pytest_benchmark_is_found_however_it_is_loaded(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TRIAD)
    loaded = ("-p", "pytest_benchmark.plugin", "-p", "pytest_gpumem.plugin.hooks")
    done = pytester.runpytest_subprocess(*loaded, *SIMULATED)
    done.assert_outcomes(passed=1)
