"""Persisting L2 is as found after every way out of a test, and what somebody else leaves is put back and named."""

from __future__ import annotations

import re

import pytest
from sessions import SIMULATED, Run


@pytest.fixture(autouse=True)
def _state(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(STATE)


STATE = """
    import pytest
    from pytest_gpumem.devices.protocol import WindowSpec

    MiB = 1 << 20
    DEFAULT, MOST = int(9.375 * MiB), int(31.25 * MiB)

    def state(device):
        return device.l2.set_aside(), [device.l2.window(stream) for stream in device.streams.visible() if device.l2.window(stream)]

    def lines(device):
        return device.roofline.persisting

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(config):
        session = config.pluginmanager.getplugin("gpumem-session")
        device = None if session is None else session.device
        if device is not None:
            print("at the end:", state(device) == (DEFAULT, []), lines(device))
    """
"""A conftest: what the tests compare, and the state when the session is over."""

AT_THE_END = "at the end: True False"

WAYS_IN = """
    import os, signal
    import pytest
    from conftest import DEFAULT, lines, state
    from pytest_gpumem import Case, MiB

    @pytest.fixture
    def table(device_buffer):
        return device_buffer(8 * MiB, "i4")

    @pytest.fixture
    def out(device_buffer):
        return device_buffer(64 * MiB, "i4")

    def persist(where):
        def body(gpu_benchmark, gpu_kernels, persisting_stream, out, table, leave):
            with persisting_stream(table, where=where) as stream:
                gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream)
                leave()
        return body

    def sample(gpu_benchmark, gpu_kernels, persisting_stream, out, table, leave):
        with persisting_stream(table) as stream:
            gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="before")
            gpu_benchmark.case(lambda memory: while_sampled(memory, table, leave))

    def case(gpu_benchmark, gpu_kernels, persisting_stream, out, table, leave):
        gpu_benchmark.case(lambda memory: while_sampled(memory, memory.device(8 * MiB), leave, window=True))

    def while_sampled(memory, x, leave, window=False):
        calls = []
        def work():
            calls.append(1)
            if len(calls) == 20:
                leave()
        return Case(lambda: None, reads=[x], window=x if window else None, reference=work)
    """


def way_out(body: str) -> str:
    """A module: every way in, left in the way that `body` says, each before a test that looks at what it finds."""
    return (
        WAYS_IN
        + f"""
    def leave():
        {body}

    WAYS = {{"stream": persist("stream"), "graph": persist("graph"), "launch": persist("launch"),
            "sample": sample, "case": case}}

    @pytest.mark.parametrize("way", list(WAYS))
    @pytest.mark.timeout(600, method="signal")
    def test_leaves(way, gpu_device, gpu_benchmark, gpu_kernels, persisting_stream, out, table):
        assert (state(gpu_device), lines(gpu_device)) == ((DEFAULT, []), 0)
        WAYS[way](gpu_benchmark, gpu_kernels, persisting_stream, out, table, leave)
        assert (state(gpu_device), lines(gpu_device)) == ((DEFAULT, []), 0)
    """
    )


TIMEOUT = "signal.raise_signal(signal.SIGALRM)  # as pytest-timeout's timer does"
CTRL_C = "signal.raise_signal(signal.SIGINT)"
MANY_SAMPLES = ("--gpumem-device", "sim:h100", "--gpumem-budget", "5 ms")


@pytest.mark.parametrize(
    ("body", "outcomes"),
    [
        ("pass", {"passed": 5}),
        ("raise ValueError('in the body')", {"failed": 5}),
        ("pytest.skip('in the body')", {"skipped": 5}),
        (TIMEOUT, {"failed": 5}),
    ],
    ids=["success", "failure", "skip", "time-out"],
)
def test_all_is_as_found_after(
    pytester: pytest.Pytester, gpumem: Run, body: str, outcomes: dict[str, int]
) -> None:
    pytester.makepyfile(way_out(body))
    result = gpumem(*MANY_SAMPLES, "-W", "ignore:Benchmark fixture was not used")
    # No warning: nothing was left that the session had to put back.
    result.assert_outcomes(**outcomes, warnings=0)
    result.stdout.fnmatch_lines([AT_THE_END])
    if body == TIMEOUT:
        result.stdout.fnmatch_lines(["*Timeout (>600.0s) from pytest-timeout*"])


@pytest.mark.parametrize("way", ["stream", "graph", "launch", "sample", "case"])
def test_all_is_as_found_after_ctrl_c(pytester: pytest.Pytester, way: str) -> None:
    pytester.makepyfile(way_out(CTRL_C))
    arguments = (*SIMULATED, *MANY_SAMPLES, "-W", "default", "-k", way)
    result = pytester.runpytest_inprocess(*arguments, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*"])
    result.stdout.fnmatch_lines([AT_THE_END])
    result.stdout.no_fnmatch_line("*LeftoverWarning*")


NEIGHBOUR = """
    import pytest
    from conftest import DEFAULT, MOST, WindowSpec, lines, state

    MiB = 1 << 20
    seen = {}

    @pytest.fixture
    def victim(gpu_benchmark, gpu_kernels, device_buffer):
        "A saturated write stream, which a large set-aside slows."
        out, table = device_buffer(1024 * MiB, "i4"), device_buffer(1 * MiB, "i4")
        return lambda label: gpu_benchmark(gpu_kernels.reset_data, out, table, label=label).latency

    def misbehave(device, launch=None, table=None):
        device.l2.request_set_aside(MOST)
        stream = device.streams.create()
        if table is not None:
            device.l2.set_window(stream, WindowSpec(table.address, table.nbytes, 1.0))
            device.kernels.launch(launch, stream)
            device.streams.synchronize(stream)
        return stream
    """


AFTER = """
    def test_after(gpu_device):
        assert (state(gpu_device), lines(gpu_device)) == ((DEFAULT, []), 0)
    """
LEFT = "*LeftoverWarning: *::test_neighbour left an L2 set-aside of 31.25 MiB*"


@pytest.fixture
def beside(pytester: pytest.Pytester, gpumem: Run) -> Run:
    """Runs tests beside a neighbour."""

    def run(body: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(NEIGHBOUR + body)
        return gpumem("--gpumem-device", "sim:h100", *arguments)

    return run


def test_the_next_test_is_measured_as_before(beside: Run) -> None:
    result = beside(
        """
    def test_before(victim):
        seen["before"] = victim("before")

    def test_neighbour(gpu_device, gpu_kernels, device_buffer, victim):
        out, table = device_buffer(16 * MiB), device_buffer(16 * MiB)
        misbehave(gpu_device, gpu_kernels.copy.launch({"c": out, "a": table}, {}), table)
        assert lines(gpu_device) > 0
        victim("beside")
    """
        + AFTER
        + """
    def test_victim(victim):
        seen["after"] = victim("after")
        assert seen["after"] == pytest.approx(seen["before"], rel=0.01)
    """
    )
    result.assert_outcomes(passed=4, warnings=1)
    result.stdout.re_match_lines(
        [
            r".*LeftoverWarning: test_the_next_test_is_measured_as_before\.py::test_neighbour left an L2 set-aside of 31\.25 MiB "
            r"\(found: 9\.375 MiB\); the window on stream 0x\w+: 16 MiB at hit ratio 1 \(found: none\); put back as found, "
            r"and persisting lines reset$"
        ]
    )


@pytest.mark.parametrize(
    ("body", "arguments", "outcomes"),
    [
        ("pass", ("--gpumem-strict",), {"passed": 2}),  # strict is satisfied with what was put back
        ("raise ValueError('in the body')", (), {"passed": 1, "failed": 1}),
        ("pytest.skip('in the body')", (), {"passed": 1, "skipped": 1}),
        (TIMEOUT, (), {"passed": 1, "failed": 1}),
    ],
    ids=["strict", "failure", "skip", "time-out"],
)
def test_a_neighbour_is_named_however_it_ends(
    beside: Run, body: str, arguments: tuple[str, ...], outcomes: dict[str, int]
) -> None:
    neighbour = f"""
    import signal

    @pytest.mark.timeout(600, method="signal")
    def test_neighbour(gpu_device):
        misbehave(gpu_device)
        {body}
    """
    result = beside(neighbour + AFTER, *arguments)
    result.assert_outcomes(**outcomes, warnings=1)
    result.stdout.fnmatch_lines([LEFT])


def test_a_neighbour_without_our_fixtures(beside: Run) -> None:
    """Once a test has opened the device; before that nothing is looked at, and nothing opened."""
    result = beside(
        """

    def test_early(pytestconfig):
        assert pytestconfig.pluginmanager.getplugin("gpumem-session")._device is None

    def test_opens(gpu_device):
        seen["device"] = gpu_device

    def test_neighbour():
        misbehave(seen["device"])

    def test_after():
        assert state(seen["device"]) == (DEFAULT, [])
    """
    )
    result.assert_outcomes(passed=4, warnings=1)
    result.stdout.fnmatch_lines([LEFT])


def test_what_a_wider_fixture_changed_is_its_own_until_it_ends(beside: Run) -> None:
    result = beside(
        """
    @pytest.fixture(scope="class", params=["restores", "does not"])
    def wide(request):
        device = seen["device"]
        stream = device.streams.create()
        device.l2.request_set_aside(MOST)
        device.l2.set_window(stream, WindowSpec(4096, 8 * MiB, 1.0))
        yield MOST, [WindowSpec(4096, 8 * MiB, 1.0)]
        if request.param == "restores":
            device.l2.request_set_aside(DEFAULT)
            device.l2.set_window(stream, None)

    def test_opens(gpu_device):
        seen["device"] = gpu_device

    class TestWide:
        def test_first(self, gpu_device, wide):
            assert state(gpu_device) == wide

        def test_second(self, gpu_device, wide):
            assert state(gpu_device) == wide
            gpu_device.l2.request_set_aside(0)

        def test_third(self, gpu_device, wide):
            assert state(gpu_device) == wide
    """
        + AFTER,
        "-v",
    )
    result.assert_outcomes(passed=8, warnings=3)
    said = re.findall(
        r"LeftoverWarning: [^:]*::TestWide::(.*?) left an L2 set-aside of (.*?) \(found: (.*?)\)",
        result.stdout.str(),
    )
    assert sorted(said) == [
        ("test_second[does not]", "0 B", "31.25 MiB"),
        ("test_second[restores]", "0 B", "31.25 MiB"),
        ("test_third[does not]", "31.25 MiB", "9.375 MiB"),
    ]


def test_a_fixture_of_one_test_that_restores_leaves_nothing(beside: Run) -> None:
    result = beside(
        """
    @pytest.fixture
    def restoring(gpu_device):
        misbehave(gpu_device)
        yield
        gpu_device.l2.request_set_aside(DEFAULT)

    @pytest.fixture
    def leaving(gpu_device):
        misbehave(gpu_device)

    def test_first(gpu_device): pass
    def test_restoring(restoring): pass
    def test_neighbour(leaving): pass
    """
        + AFTER
    )
    result.assert_outcomes(passed=4, warnings=1)
    result.stdout.fnmatch_lines([LEFT])


@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_be_put_back_is_an_error_under_strict(beside: Run, strict: bool) -> None:
    result = beside(
        """
    def test_neighbour(gpu_device):
        misbehave(gpu_device)
        gpu_device.l2.request_set_aside = lambda nbytes: MOST
    """,
        *(["--gpumem-strict"] if strict else []),
    )
    result.assert_outcomes(passed=1, errors=strict, warnings=not strict)
    said = "gpumem: --gpumem-strict: " if strict else "*LeftoverWarning: "
    result.stdout.fnmatch_lines(
        [f"{said}*::test_neighbour left an L2 set-aside of 31.25 MiB*; except the set-aside"]
    )


def test_the_warning_can_be_made_an_error(beside: Run) -> None:
    result = beside(
        """
    def test_neighbour(gpu_device):
        misbehave(gpu_device)

    @pytest.fixture
    def failing(gpu_device):
        yield
        raise ValueError("in the teardown")

    def test_both(gpu_device, failing):
        misbehave(gpu_device)
    """
        + AFTER,
        "-W",
        "error::pytest_gpumem.memory.l2.LeftoverWarning",
    )
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(
        [LEFT[1:], "*ValueError: in the teardown", "LeftoverWarning: *::test_both left*"]
    )
