"""`--gpumem-footprint=trace` on a GPU: the line of each planted growth is named."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.usefixtures("free_gpu")

START = """
import functools
import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
from cupy.cuda import runtime

N = 4 << 20
CACHE = {}
SEEN = []
"""


class Plant(NamedTuple):
    """Code before and after a change; the line that is to be named ends in "# here"."""

    base: str
    head: str
    kept: bool = False
    """More is kept; else more is in use at the peak."""


PLANTS = {
    "cupy_temporary": Plant(
        """
def test_cupy_temporary():
    a, b, c = (cupy.ones(N, "f4") for _ in range(3))
    cupy.multiply(a, b, out=a)
    cupy.add(a, c, out=a)
""",
        """
def test_cupy_temporary():
    a, b, c = (cupy.ones(N, "f4") for _ in range(3))
    a = a * b + c  # here
""",
    ),
    "torch_temporary": Plant(
        """
def axpy(a, b, c):
    return a.mul_(b).add_(c)

def test_torch_temporary():
    a, b, c = (torch.ones(N, device="cuda") for _ in range(3))
    axpy(a, b, c)
""",
        """
def axpy(a, b, c):
    return a * b + c  # here

def test_torch_temporary():
    a, b, c = (torch.ones(N, device="cuda") for _ in range(3))
    axpy(a, b, c)
""",
    ),
    "cupy_widened": Plant(
        """
def test_cupy_widened():
    x = cupy.ones(N, "f4")
    state = cupy.zeros(N, "f4")
""",
        """
def test_cupy_widened():
    x = cupy.ones(N, "f4")
    state = cupy.zeros(N, "f8")  # here
""",
    ),
    "torch_widened": Plant(
        """
def test_torch_widened():
    x = torch.ones(N, device="cuda")
    state = torch.zeros_like(x)
""",
        """
def test_torch_widened():
    x = torch.ones(N, device="cuda")
    state = torch.zeros_like(x, dtype=torch.float64)  # here
""",
    ),
    "driver_larger": Plant(
        """
def workspace():
    return runtime.malloc(2 * N)

def test_driver_larger():
    runtime.free(workspace())
""",
        """
def workspace():
    return runtime.malloc(8 * N)  # here

def test_driver_larger():
    runtime.free(workspace())
""",
    ),
    "cupy_cache": Plant(
        """
def weights(key):
    return cupy.ones(N, "f4")

def test_cupy_cache():
    for step in range(3):
        weights(step)
""",
        """
def weights(key):
    if key not in CACHE:
        CACHE[key] = cupy.ones(N, "f4")  # here
    return CACHE[key]

def test_cupy_cache():
    for step in range(3):
        weights(step)
""",
        kept=True,
    ),
    "torch_cache": Plant(
        """
def table(size):
    return torch.ones(size, device="cuda")

def test_torch_cache():
    table(N)
    table(2 * N)
""",
        """
@functools.lru_cache
def table(size):
    return torch.ones(size, device="cuda")  # here

def test_torch_cache():
    table(N)
    table(2 * N)
""",
        kept=True,
    ),
    "cupy_traceback": Plant(
        """
def load(step):
    batch = cupy.ones(N, "f4")
    raise ValueError(step)

def test_cupy_traceback():
    try:
        load(7)
    except ValueError as error:
        SEEN.append(str(error))
""",
        """
def load(step):
    batch = cupy.ones(N, "f4")  # here
    raise ValueError(step)

def test_cupy_traceback():
    try:
        load(7)
    except ValueError as error:
        SEEN.append(error)
""",
        kept=True,
    ),
    "torch_traceback": Plant(
        """
def read(step):
    batch = torch.ones(N, device="cuda")
    raise KeyError(step)

def test_torch_traceback():
    try:
        read(7)
    except KeyError as error:
        SEEN.append(str(error))
""",
        """
def read(step):
    batch = torch.ones(N, device="cuda")  # here
    raise KeyError(step)

def test_torch_traceback():
    try:
        read(7)
    except KeyError as error:
        SEEN.append(error)
""",
        kept=True,
    ),
    "torch_graph": Plant(
        """
LOSSES = []

def test_torch_graph():
    w = torch.ones(N, device="cuda", requires_grad=True)
    for _ in range(2):
        LOSSES.append(float((w * 2).tanh().sum()))
""",
        """
LOSSES = []

def test_torch_graph():
    w = torch.ones(N, device="cuda", requires_grad=True)
    for _ in range(2):
        LOSSES.append((w * 2).tanh().sum())  # here
""",
        kept=True,
    ),
}
"""A loss that is kept as a tensor keeps what its backward pass needs: the sum is small, and its graph is not."""


def source(head: bool) -> str:
    parts = [START]
    for name, plant in PLANTS.items():
        limit = 'max_kept="0 B"' if plant.kept else 'max_peak_regression="0 B"'
        code = plant.head if head else plant.base
        parts.append(
            code.replace(f"def test_{name}(", f"@pytest.mark.gpumem({limit})\ndef test_{name}(")
        )
    return "\n".join(parts)


def failures(junit: Any) -> dict[str, str]:
    """By test, the text of its failure or of the error at its teardown."""
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        texts = [one.text or "" for one in case if one.tag in ("failure", "error")]
        if texts:
            found[str(case.get("name"))] = "\n".join(texts)
    return found


@pytest.mark.skipif(
    not all(map(find_spec, ("cupy", "torch", "cupti"))), reason="needs CuPy, PyTorch and CUPTI"
)
def test_the_line_of_every_planted_growth_is_named(pytester: pytest.Pytester) -> None:
    arguments = (
        "--gpumem",
        "--gpumem-device=cuda:0",
        "--gpumem-footprint=trace",
        "-p",
        "no:cacheprovider",
    )
    file = pytester.path / "test_planted.py"
    file.write_text(source(head=False))
    base = pytester.runpytest_subprocess(*arguments, "--gpumem-save", timeout=240)
    base.assert_outcomes(passed=len(PLANTS))
    file.write_text(head := source(head=True))
    pytester.runpytest_subprocess(*arguments, "--junitxml=junit.xml", timeout=240)
    found = failures(pytester.path / "junit.xml")
    wrong = {}
    for name, plant in PLANTS.items():
        text = found.get(f"test_{name}", "did not fail")
        begin = head.index(plant.head.strip().partition("\n")[0])
        line = head[: head.index("# here", begin)].count("\n") + 1
        grown = re.search(r"why:\s+\S+\s+\+\S+\s+\S+\s+at\s+(\S+):(\d+)\s+in", text)
        named = grown is not None and grown.groups() == ("test_planted.py", str(line))
        if not named:
            wrong[name] = (line, text)
    assert not wrong, "\n\n".join(
        f"{name}, line {line}:\n{text}" for name, (line, text) in wrong.items()
    )


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy")
def test_memory_of_a_failed_test_is_the_users_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import cupy, pytest

        def layer(n):
            return cupy.ones(n, "f4")

        @pytest.mark.gpumem(max_peak="1 MiB")
        def test_it():
            kept = [layer(size << 20) for size in (1, 2, 3, 4)]
    """)
    result = pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--gpumem-footprint=trace", timeout=240
    )
    result.assert_outcomes(failed=1)
    words = " ".join(result.stdout.str().split())
    line = r"why: 40 MiB at test_\w+\.py:4 in layer: return cupy\.ones\(n, \"f4\"\)"
    assert re.search(line, words)
