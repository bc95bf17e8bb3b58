"""What an installation has, what a session costs that measures nothing, and what both leave behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from installing import ROOT, build, copied_as_tracked, environment, needs_pip, pip

from pytest_gpumem import MiB
from pytest_gpumem.kernels.catalogue import CATALOGUE

PROGRAM = """
import sys, pytest
assert pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider", "--gpumem-device", "sim", "test_it.py"]) == 0
print(*sys.modules)
"""


REPORT = """
import hashlib
from pytest_gpumem.kernels.kernel import read_source, source_folder
from pytest_gpumem.kernels.catalogue import CATALOGUE
print(source_folder())
for name in sorted({k.source for k in CATALOGUE.values() if k.source}):
    print(name, hashlib.sha256(read_source(name).encode()).hexdigest())
"""


def modules_of_a_session(python: Path, folder: Path, *arguments: str) -> set[str]:
    """The modules that a session with two tests, which measure nothing, imports."""
    (folder / "test_it.py").write_text("def test_it(): pass\ndef test_other(): pass\n")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("PYTEST_")
    }
    ran = subprocess.run(
        [str(python), "-c", PROGRAM, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


def expected() -> list[str]:
    """The sources of the catalogue, with their digests."""
    names = sorted({kernel.source for kernel in CATALOGUE.values() if kernel.source})
    return [
        f"{name} {hashlib.sha256((ROOT / 'kernels' / name).read_bytes()).hexdigest()}"
        for name in names
    ]


def report(python: Path | str, working: Path, path: Path | None = None) -> tuple[Path, list[str]]:
    """The folder and the sources that another interpreter finds, in another working directory."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        {"PYTHONPATH": str(path)} if path else {}
    )
    ran = subprocess.run(
        [str(python), "-c", REPORT], cwd=working, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    folder, *files = ran.stdout.splitlines()
    return Path(folder), files


def test_found_in_the_checkout_from_elsewhere(tmp_path: Path) -> None:
    folder, files = report(sys.executable, tmp_path, ROOT)
    assert folder == ROOT / "kernels"
    assert files == expected()


def source_distribution(folder: Path) -> Path:
    """Build and unpack it. It has documents, no tests and no records."""
    project = copied_as_tracked(folder / "project")
    archive = build("sdist", project, folder)
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        tar.extractall(folder)
    tracked = {
        path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()
    }
    folders, left_out = ("docs/", "kernels/", "pytest_gpumem/", "ci/"), ("tests/", "ci/records/")
    assert {
        name
        for name in tracked
        if name.startswith(folders) and not name.startswith(left_out) and "egg-info" not in name
    } <= names
    assert not [name for name in names if name.startswith(left_out)]
    assert archive.stat().st_size < 2 * MiB
    assert {"pytest_gpumem_entry.py", "CHANGELOG.md", "mkdocs.yml", "LICENSE", "README.md"} <= names
    return folder / archive.name.removesuffix(".tar.gz")


@needs_pip
def test_installed_a_session_that_measures_nothing_is_cheap_and_an_uninstall_removes_all(
    tmp_path: Path,
) -> None:
    wheel = build("wheel", source_distribution(tmp_path), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert {
            f"pytest_gpumem/kernels/cu/{path.name}" for path in (ROOT / "kernels").glob("*.cu")
        } <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.startswith("kernels/")]
        # what else the package reads at run time
        assert {"pytest_gpumem/py.typed", "pytest_gpumem/reporting/templates/report.html"} <= set(
            archive.namelist()
        )
    python, site = environment(tmp_path / "venv")
    pip("--python", str(python), "install", str(wheel), cwd=tmp_path)
    assert report(python, tmp_path) == (site / "pytest_gpumem" / "kernels" / "cu", expected())
    names = modules_of_a_session(python, tmp_path, "--gpumem")
    assert "pytest_gpumem.plugin.session" in names
    assert not names & {"scipy", "jinja2", "rich", "cupy", "cuda", "numba", "torch"}
    later = ("plugin.rows", "plugin.results", "devices.protocol", "measuring.measure")
    assert not names & {f"pytest_gpumem.{name}" for name in later}
    # The package's modules are compiled once, by pip, which removes what its record lists.
    (record,) = site.glob("pytest_gpumem-*.dist-info/RECORD")
    listed = {line.partition(",")[0] for line in record.read_text().splitlines()}
    present = [path for path in (site / "pytest_gpumem").rglob("*") if path.is_file()]
    assert {path.relative_to(site).as_posix() for path in present} <= listed


def test_a_session_that_measures_nothing_executes_little_of_the_package(tmp_path: Path) -> None:
    """What judges, stores and watches is loaded for a test that needs it."""
    names = modules_of_a_session(Path(sys.executable), tmp_path, "--gpumem")
    sources = [name for name in names if name.partition(".")[0] == "pytest_gpumem"]
    assert "pytest_gpumem.plugin.session" in sources
    size = 0
    for name in sources:
        module = ROOT.joinpath(*name.split("."))
        size += (
            (module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
            .stat()
            .st_size
        )
    assert size <= 240_000, sorted(sources)


MEASURES = """
import sys
from pytest_gpumem import Case

def test_it(gpu_benchmark):
    before_samples = set()

    def restore():
        before_samples.update(sys.modules)

    gpu_benchmark.case(lambda memory: Case(restore, reference=restore, restore=restore))
    print("imported:", *before_samples)
"""

THIRD_PARTIES = "scipy jinja2 rich matplotlib click concurrent.futures.thread asyncio unittest.mock"
LATER = {
    *THIRD_PARTIES.split(),
    *(f"pytest_gpumem.{room}" for room in ("cli", "commands", "doctor", "nsight")),
    "pytest_gpumem.reporting.html",
}
"""What no first sample needs: all of it together takes longer to import than everything else, and much longer to compile."""


def test_little_is_imported_before_the_first_sample(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(MEASURES)
    options = "-s -p benchmark -p gpumem --gpumem --gpumem-device=sim -p no:cacheprovider"
    ran = pytester.runpytest_subprocess(*options.split())
    (line,) = (line for line in ran.outlines if "imported:" in line)
    names = set(line.split())
    assert "pytest_gpumem.measuring.measure" in names
    assert not names & {*LATER, "cupy", "cuda", "pynvml"}


def test_a_gpu_is_opened_without_what_no_first_sample_needs() -> None:
    pytest.importorskip("cupy")
    program = "import sys, pytest_gpumem.devices.cuda.device; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = set(ran.stdout.split())
    assert "cupy" in names
    assert not names & {*LATER, "cuda.bindings.nvrtc", "cuda.core", "pytest"}


def test_assertions_of_tests_are_still_rewritten(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it():\n    left = 1\n    assert left == 2")
    pytester.runpytest_subprocess().stdout.fnmatch_lines(["E*assert 1 == 2"])
