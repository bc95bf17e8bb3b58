"""Before a fixture of ours needs the device, a session makes no CUDA call: forked children can."""

from __future__ import annotations

import pytest

DRIVER = """
    import os
    from types import SimpleNamespace

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NO_DEVICE=100)


    class Attributes:
        def __getattr__(self, name):
            return name


    CUdevice_attribute = Attributes()
    ANSWERS = dict(
        cuDeviceGetCount=1, cuDeviceGet=0, cuDeviceGetName=b"Fake GPU", cuDeviceGetPCIBusId=b"0000:00:00.0", cuDeviceTotalMem=1 << 34,
        cuDeviceGetUuid=SimpleNamespace(bytes=bytes(16)), cuDriverGetVersion=13000, cuDeviceGetAttribute=9,
    )

    def __getattr__(name):
        if name == "cuDeviceGetUuid_v2" or not name.startswith("cu"):
            raise AttributeError(name)
        def call(*arguments):
            with open("calls.txt", "a") as calls:
                calls.write(f"{os.getpid()} {name}\\n")
            return (0,) if name == "cuInit" else (0, ANSWERS[name])
        return call
"""
"""`cuda.bindings.driver` that notes who calls it."""
RUNTIME = """
    from types import SimpleNamespace

    cudaError_t = SimpleNamespace(cudaErrorMemoryAllocation=2)
"""


@pytest.fixture
def fake_cuda(pytester: pytest.Pytester, new_interpreters: None) -> None:
    pytester.makepyfile(
        **{
            "cuda/__init__": "",
            "cuda/bindings/__init__": "",
            "cuda/bindings/driver": DRIVER,
            "cuda/bindings/runtime": RUNTIME,
            "cupy/__init__": "",
            "cupy/cuda/__init__": "from cupy.cuda import runtime",
            "cupy/cuda/runtime": "def runtimeGetVersion(): return 13000",
        }
    )
    # A module of the project's tests with a name of the standard library.
    pytester.makepyfile(
        **{"lib/uuid": "raise AssertionError('this is not the uuid that was meant')"}
    )
    pytester.makeconftest(
        "import os, sys\nsys.path.insert(0, 'lib')\nopen('pid.txt', 'w').write(str(os.getpid()))"
    )


def test_a_session_without_our_fixtures_makes_no_cuda_call_and_no_thread(
    pytester: pytest.Pytester, fake_cuda: None
) -> None:
    """Neither before a test nor in it, also where the test forks and waits are read."""
    pytester.makepyfile(
        """
        import os
        import sys
        import threading

        def threads():
            return [thread.name for thread in threading.enumerate()]

        def test_cpu():
            assert threads() == ["MainThread"]
            assert not {"cupy", "cupy_backends", "pynvml", "torch"} & set(sys.modules)
            child = os.fork()
            if child == 0:
                os._exit(threads() != ["MainThread"])
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    others = ("-p", "no:cacheprovider", "-p", "no:rerunfailures")
    options = ("--gpumem", "--gpumem-device", "cuda", *others, "--gpumem-waits")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*Fake GPU*"])
    calls = [line.split() for line in (pytester.path / "calls.txt").read_text().splitlines()]
    assert "cuInit" in {name for _, name in calls}
    in_session = {name for pid, name in calls if pid == (pytester.path / "pid.txt").read_text()}
    assert in_session <= {"cuCtxGetCurrent"}  # before the fork: makes no context


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("return (100,)", "no CUDA device 0: the driver sees no GPU"),
        (
            "raise SystemExit('broken')",
            "no CUDA device 0: the process that asks the NVIDIA driver ended with 1: broken",
        ),
    ],
)
def test_a_driver_that_does_not_answer_is_one_line(
    pytester: pytest.Pytester, fake_cuda: None, init: str, message: str
) -> None:
    with (pytester.path / "cuda" / "bindings" / "driver.py").open("a") as driver:
        driver.write(f"\ndef cuInit(flags):\n    {init}\n")
    result = pytester.runpytest_subprocess("--gpumem", "--gpumem-device", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        f"ERROR: gpumem: device 'cuda' (--gpumem-device): {message}; "
        "choose --gpumem-device sim if the simulated device is meant; `gpumem doctor` says what is missing"
    ]
