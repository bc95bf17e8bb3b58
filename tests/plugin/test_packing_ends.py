"""Packed sessions that end early, that share a GPU with another session, or that run beside other options and plugins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import QUICKLY, Run
from test_packing import PACK, known, learnt, said

from pytest_gpumem.packing import leases
from pytest_gpumem.packing.leases import ALONE, Gpu
from pytest_gpumem.plugin import packed, packing

pytest.importorskip("xdist")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

ROOM = (80 << 30) - (80 << 30) // packing.SPARED  # of the simulated GPU
SHARED = """
    import json
    from pathlib import Path
    from pytest_gpumem.packing import leases
    from pytest_gpumem.plugin import packed, packing

    def write(file, found, write=leases._write):
        write(file, found)
        with open(Path({folder!r}, "leases.jsonl"), "a") as log:
            log.write(json.dumps([[*lease.process, lease.held + lease.share, lease.state] for lease in found]) + "\\n")

    packed.leases_file = packing.leases_file = lambda uuid, folder: Path({folder!r}, "shared.leases")
    leases._write = write
"""
"""A conftest: the simulated GPU has a file of leases that sessions share, and a log of what it holds, written under its lock."""


@pytest.fixture(autouse=True)
def _shared(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((packed, "leases_file"), (packing, "leases_file"), (leases, "_write")):
        monkeypatch.setattr(
            module, name, getattr(module, name)
        )  # the conftest changes them for good
    pytester.makeconftest(SHARED.format(folder=str(pytester.path)))


def fits(folder: Path) -> list[list[tuple[int, int, int, str]]]:
    """The leases after each change. Never are there more than the GPU has; one that is alone has no test beside it."""
    log = [
        [*map(tuple, json.loads(line))]
        for line in (folder / "leases.jsonl").read_text().splitlines()
    ]
    for those in log:
        assert sum(lease[2] for lease in those) <= ROOM
        states = [lease[3] for lease in those if lease[3] not in ("idle", "waits")]
        assert ALONE not in states or len(states) == 1
    return log


def kept(folder: Path) -> list[str]:
    """What stands in the file of leases, whether its processes live or not."""
    return (folder / "shared.leases").read_text().split()


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A session in a process group of its own."""
    command = [sys.executable, "-m", "pytest", *QUICKLY, "-W", "default", *PACK, *options]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True, **pipes
    )  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def pipe(pytester: pytest.Pytester) -> Path:
    os.mkfifo(pytester.path / "pipe")
    return pytester.path / "pipe"


def test_ctrl_c_gives_back_the_shares_and_keeps_the_results(
    pytester: pytest.Pytester, pipe: Path
) -> None:
    pytester.makepyfile(
        test_it="""
        import os, signal, pytest

        def test_done(device_buffer):
            device_buffer(1 << 30, "u1")

        @pytest.mark.parametrize("number", range(2))
        def test_endless(device_buffer, number):
            device_buffer(20 << 30, "u1")
            with open("pipe", "w") as file:
                file.write(f"{os.getpid()}\\n")
            signal.pause()
        """
    )
    known(
        pytester.path,
        test_done={"grown": [1], "seconds": 9.0},
        **{f"test_endless[{n}]": {"grown": [20]} for n in range(2)},
    )
    process = start(pytester.path, "-n", "2", "--benchmark-json=out.json")
    pids: list[int] = []
    while len(pids) < 2:
        pids += [int(line) for line in pipe.read_text().splitlines()]
    assert sum(int(words) for words in kept(pytester.path)[3::6]) >= 40 << 30
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, printed
    assert kept(pytester.path) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "1 passed" in printed
    assert {name for name, one in learnt(pytester.path).items() if len(one["grown"]) == 2} == {
        "test_it.py::test_done"
    }
    rows = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert "test_it.py::test_done" in [row["nodeid"] for row in rows]
    fits(pytester.path)


def test_workers_that_die_and_tests_that_time_out_give_back_their_shares(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytest.importorskip("pytest_timeout")
    pytester.makepyfile(
        test_it="""
        import os, signal, threading, pytest

        @pytest.fixture(autouse=True)
        def held(device_buffer):
            device_buffer(35 << 30, "u1")

        def test_killed():
            os.kill(os.getpid(), signal.SIGKILL)

        @pytest.mark.timeout(1, method="signal")
        def test_signal():
            threading.Event().wait()

        @pytest.mark.timeout(1, method="thread")
        def test_thread():
            threading.Event().wait()

        @pytest.mark.parametrize("number", range(4))
        def test_fine(number):
            pass
        """
    )
    names = (
        "test_killed",
        "test_signal",
        "test_thread",
        *(f"test_fine[{number}]" for number in range(4)),
    )
    known(pytester.path, **{name: {"grown": [35]} for name in names})
    result = session(*PACK, "-n", "3")
    result.assert_outcomes(passed=4, failed=3)
    result.stdout.fnmatch_lines(["*Timeout (>1.0s) from pytest-timeout*"])
    assert Gpu(pytester.path / "shared.leases").leases() == []
    assert any(sum(lease[3] == "runs" for lease in those) == 2 for those in fits(pytester.path))


def test_two_sessions_share_a_gpu(pytester: pytest.Pytester, pipe: Path) -> None:
    pytester.makepyfile(
        test_it="""
        import os, pytest

        def test_meet(device_buffer):  # opening one end of a pipe waits for the other end
            device_buffer(1 << 30, "u1")
            open("pipe", os.environ["END"]).close()

        @pytest.mark.parametrize("number", range(3))
        def test_large(device_buffer, number):
            device_buffer(30 << 30, "u1")
        """
    )
    known(
        pytester.path,
        test_meet={"grown": [1], "seconds": 9.0},
        **{f"test_large[{n}]": {"grown": [30]} for n in range(3)},
    )
    sessions = []
    for end in "rw":
        os.environ["END"] = end
        sessions.append(start(pytester.path, "-n", "2"))
    del os.environ["END"]
    for process in sessions:
        printed, _ = process.communicate(timeout=200)
        assert process.returncode == 0, printed
        assert "4 passed" in printed
    log = fits(pytester.path)
    assert any(len({lease[0] for lease in those}) == 4 for those in log), (
        "the sessions did not run at once"
    )
    assert Gpu(pytester.path / "shared.leases").leases() == []


def test_options_and_plugins_beside_packing(pytester: pytest.Pytester, session: Run) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest
        from pathlib import Path

        @pytest.mark.parametrize("number", range(4))
        def test_buffer(device_buffer, number):
            device_buffer(20 << 30, "u1")

        @pytest.mark.flaky(reruns=2)
        def test_flaky(device_buffer, request):
            device_buffer(20 << 30, "u1")
            mark = Path(request.config.rootpath, "mark")
            if not mark.exists():
                mark.touch()
                raise ValueError

        def test_write(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
        """
    )
    first = session(*PACK, "-n", "2", "--gpumem-existing=watch", "--gpumem-isolate")
    assert {**first.parseoutcomes(), "warnings": 0} == {"passed": 6, "rerun": 1, "warnings": 0}
    second = session(*PACK, "-n", "2", "--gpumem-existing=watch", "--gpumem-isolate", "--maxfail=1")
    assert {**second.parseoutcomes(), "warnings": 0} == {"passed": 6, "warnings": 0}
    assert any("1 measures" in line for line in said(second))
    fits(pytester.path)
