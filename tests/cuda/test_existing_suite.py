"""Suites that exist on a GPU: the lines that wait, tests that do not, and the shapes of benchmarks that are measured.

Run it without --gpumem: it starts sessions of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.usefixtures("free_gpu")

CUPY, TORCH, NUMBA, BINDINGS = "cupy", "torch", "numba.cuda", "cuda.bindings.runtime"


class Spelling(NamedTuple):
    """A way to make the host wait."""

    name: str
    library: str
    line: str


SPELLINGS = (
    Spelling("item", TORCH, "t.sum().item()"),
    Spelling("cpu", TORCH, "t.cpu()"),
    Spelling("bool", TORCH, "bool(t.any())"),
    Spelling("nonzero", TORCH, "t.nonzero()"),
    Spelling("print", TORCH, "str(t)"),
    Spelling("index", TORCH, "t[t > 0]"),
    Spelling("tolist", TORCH, "t.tolist()"),
    Spelling("torch_synchronize", TORCH, "torch.cuda.synchronize()"),
    Spelling("torch_stream", TORCH, "torch.cuda.current_stream().synchronize()"),
    Spelling("torch_event", TORCH, "event.synchronize()"),
    Spelling("asnumpy", CUPY, "cupy.asnumpy(a)"),
    Spelling("get", CUPY, "a.get()"),
    Spelling("cupy_item", CUPY, "float(a.sum())"),
    Spelling("boolean_index", CUPY, "a[a > 0]"),
    Spelling("cupy_nonzero", CUPY, "cupy.nonzero(a)"),
    Spelling("device_synchronize", CUPY, "cupy.cuda.Device().synchronize()"),
    Spelling("stream_synchronize", CUPY, "cupy.cuda.get_current_stream().synchronize()"),
    Spelling("event_synchronize", CUPY, "event.synchronize()"),
    Spelling("free", CUPY, "cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(64))"),
    Spelling(
        "pageable_copy",
        CUPY,
        "cupy.cuda.runtime.memcpy(host.ctypes.data, a.data.ptr, host.nbytes, 2)",
    ),
    Spelling("copy_to_host", NUMBA, "d.copy_to_host()"),
    Spelling("numba_synchronize", NUMBA, "cuda.synchronize()"),
    Spelling("bindings_synchronize", BINDINGS, "runtime.cudaDeviceSynchronize()"),
    Spelling(
        "bindings_memcpy",
        BINDINGS,
        "runtime.cudaMemcpy(host.ctypes.data, a.data.ptr, host.nbytes, kind)",
    ),
)
BEFORE = {
    CUPY: (
        "a, host = cupy.ones(1024), numpy.ones(1024)",
        "event = cupy.cuda.Event()",
        "event.record()",
    ),
    TORCH: ("t = torch.ones(1024, device='cuda')", "event = torch.cuda.Event()", "event.record()"),
    NUMBA: ("from numba import cuda", "d = cuda.to_device(numpy.ones(1024))"),
    BINDINGS: (
        "import cupy",
        "from cuda.bindings import runtime",
        "a, host = cupy.ones(1024), numpy.ones(1024)",
        "kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost",
    ),
}
"""By library: what comes before a line that uses it."""


def suite_of_spellings() -> tuple[str, dict[str, int]]:
    """The suite, and the line of each spelling by the name of its test. Each line runs twice."""
    text, lines = ["import numpy", "import pytest"], {}
    for one in SPELLINGS:
        module = "" if one.library in (NUMBA, BINDINGS) else f"{one.library} = "
        text += ["", f"def test_{one.name}():", f"    {module}pytest.importorskip({one.library!r})"]
        text += [f"    {line}" for line in BEFORE[one.library]]
        text += ["    for _ in range(2):", f"        {one.line}"]
        lines[f"test_{one.name}"] = len(text)
    return "\n".join(text) + "\n", lines


def rows(folder: Path) -> Mapping[str, Any]:
    """The rows of `out.json`, by the name of the test."""
    found = json.loads((folder / "out.json").read_text())["gpumem"]["rows"]
    return {row["nodeid"].partition("::")[2]: row for row in found}


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(
        "--gpumem",
        "--gpumem-device=cuda",
        "-p",
        "no:cacheprovider",
        "--benchmark-json=out.json",
        *options,
    )


def test_each_spelling_of_a_wait_is_named_with_its_line(pytester: pytest.Pytester) -> None:
    text, lines = suite_of_spellings()
    pytester.makepyfile(test_waits=text)
    result = run(pytester, "--gpumem-waits", "-q")
    assert result.parseoutcomes().get("failed", 0) == 0
    wrong = []
    for one in SPELLINGS:
        row = rows(pytester.path).get(f"test_{one.name}")
        if row is None:
            assert result.parseoutcomes().get("skipped"), one
            continue
        waits = row["footprint"]["waits"]
        assert waits["not_read"] is None, waits
        there = [
            wait
            for wait in waits["lines"]
            if wait["line"] == lines[f"test_{one.name}"] and wait["file"] == "test_waits.py"
        ]
        seen = [(wait["call"], wait["count"]) for wait in waits["lines"]]
        print(one.name, "named" if there else "MISSED", seen)
        if not there:
            wrong.append((one.name, seen))
    assert not wrong


def test_no_line_is_named_in_300_tests_that_do_not_wait(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cupy")
    pytester.makepyfile(
        test_quiet="""
        import cupy
        import pytest

        @pytest.mark.parametrize("number", range(300))
        def test_quiet(number):
            a = cupy.arange(1024 + number % 7, dtype="f4")
            b = cupy.sqrt(a * 2) + a[::-1]
            cupy.matmul(b[:1024].reshape(32, 32), b[:1024].reshape(32, 32))
            b.sum(axis=0)
        """
    )
    for order in ((), ("-p", "no:randomly", "-n2")):
        run(pytester, "--gpumem-waits", "-q", *order).assert_outcomes(passed=300)
        written = pytester.path / "out.json"
        found = rows(pytester.path) if written.exists() and written.stat().st_size else {}
        # The first test of each process has the first use of libraries, which may wait.
        assert len(found) <= (2 if order else 1), found


def test_the_shapes_of_a_suite_are_measured(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cupy")
    pytester.makepyfile(
        test_shapes="""
        import cupy
        import pytest

        torch = pytest.importorskip("torch")

        @pytest.fixture
        def x():
            return cupy.ones(1 << 24, dtype="f4")

        @pytest.fixture
        def t():
            return torch.ones(1 << 24, device="cuda")

        def test_current_stream(benchmark, x):
            with cupy.cuda.Stream():
                assert benchmark(lambda: 2 * x).shape == x.shape

        def test_own_stream(benchmark, x):
            stream = cupy.cuda.Stream(non_blocking=True)
            def work():
                with stream:
                    cupy.sqrt(x)
            benchmark(work)

        def test_own_stream_waits(benchmark, x):
            stream = cupy.cuda.Stream(non_blocking=True)
            def work():
                with stream:
                    cupy.sqrt(x)
                stream.synchronize()
            benchmark(work)

        def test_item(benchmark, t):
            benchmark(lambda: t.sum().item())

        def test_get(benchmark, x):
            benchmark(lambda: x[:1024].get())

        def test_synchronize(benchmark, t):
            def work():
                torch.sqrt(t)
                torch.cuda.synchronize()
            benchmark(work)

        def test_in_place(benchmark, t):
            benchmark(lambda: t.mul_(1.0001))

        def test_allocating(benchmark, x):
            benchmark(lambda: x + x)

        def test_setup(benchmark):
            benchmark.pedantic(cupy.sort, setup=lambda: ((cupy.random.random(1 << 20),), {}), rounds=5)

        def test_training(benchmark):
            model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)).cuda()
            optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
            batch = torch.randn(256, 512, device="cuda")
            def step():
                optimiser.zero_grad()
                model(batch).square().mean().backward()
                optimiser.step()
            benchmark(step)

        def test_graph(benchmark, t):
            graph = torch.cuda.CUDAGraph()
            torch.sqrt(t)
            with torch.cuda.graph(graph):
                torch.sqrt(t)
            benchmark(graph.replay)

        def test_large_result(benchmark, t):
            assert benchmark(lambda: t.repeat(8)).numel() == 8 * t.numel()

        def test_late_exception(benchmark, t):
            calls = []
            def work():
                calls.append(torch.sqrt(t))
                if len(calls) > 3:
                    raise ValueError("too often")
            benchmark.pedantic(work, rounds=2)

        def test_host(benchmark):
            benchmark(sorted, [2, 1])
        """
    )
    result = run(pytester, "--benchmark-max-time=0.05", "--benchmark-min-rounds=3")
    result.assert_outcomes(passed=14)
    found = rows(pytester.path)
    for name, row in found.items():
        measured = row["measurement"]
        print(
            name,
            f"{measured['latency'] * 1e6:.1f} us",
            measured["sampler"],
            f"host {row['extra']['host s'] * 1e6:.1f} us",
        )
    shapes = {
        "current_stream",
        "own_stream",
        "own_stream_waits",
        "item",
        "get",
        "synchronize",
        "in_place",
        "allocating",
        "setup",
        "training",
    }
    shapes |= {"graph", "large_result"}
    assert len({f"test_{name}" for name in shapes} & set(found)) >= 10
    assert "test_host" not in found
    document = json.loads((pytester.path / "out.json").read_text())
    stored = {entry["name"] for entry in document["benchmarks"]}
    assert {f"{name}[gpu]" for name in found} <= stored
    assert "ValueError: too often" in result.stdout.str()


def test_a_context_of_the_tests_own_is_named(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cuda.bindings")
    pytester.makepyfile(
        """
        from cuda.bindings import driver

        def test_launch(benchmark):
            driver.cuInit(0)
            _, context = driver.cuCtxCreate(None, 0, 0)
            _, address = driver.cuMemAlloc(1 << 20)
            benchmark(driver.cuMemsetD8, address, 1, 1 << 20)
            driver.cuCtxSynchronize()
            driver.cuCtxDestroy(context)
        """
    )
    result = run(pytester, "--benchmark-max-time=0.05", "--benchmark-min-rounds=3")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["1 benchmark not measured on the GPU: it runs in a context of the test's own: *"]
    )
    assert "Traceback" not in result.stderr.str()
