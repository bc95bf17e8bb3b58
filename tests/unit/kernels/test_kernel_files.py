"""The CUDA sources are found from a checkout, from an editable install and from a wheel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installing import ROOT, copied, environment, needs_pip, pip

from pytest_gpumem.kernels import sources
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.controls import SOURCE as CONTROLS

NAMES = {
    "stream.cu",
    "l2_persistence.cu",
    "l2_bandwidth.cu",
    "unified_memory.cu",
    "access_pattern.cu",
    "transpose.cu",
    "latency.cu",
    "transfers.cu",
}
REPORT = """
import hashlib
from pytest_gpumem.kernels import sources
from pytest_gpumem.kernels.catalogue import CATALOGUE
print(sources.folder())
for name in sorted({k.source for k in CATALOGUE.values() if k.source}):
    print(name, hashlib.sha256(sources.read(name).encode()).hexdigest())
"""


def expected() -> list[str]:
    return [f"{name} {hashlib.sha256((ROOT / 'kernels' / name).read_bytes()).hexdigest()}" for name in sorted(NAMES)]


def report(python: Path | str, working: Path, path: Path | None = None) -> tuple[Path, list[str]]:
    """The folder and the sources that another interpreter finds, in another working directory."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    ran = subprocess.run([str(python), "-c", REPORT], cwd=working, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    folder, *files = ran.stdout.splitlines()
    return Path(folder), files


def test_every_source_is_used_and_every_used_one_is_there():
    assert {k.source for k in CATALOGUE.values() if k.source} == NAMES
    # The control kernels are nobody's to measure.
    assert {p.name for p in (ROOT / "kernels").glob("*.cu")} == NAMES | {CONTROLS}


def test_found_in_the_checkout_from_elsewhere(tmp_path):
    folder, files = report(sys.executable, tmp_path, ROOT)
    assert folder == ROOT / "kernels"
    assert files == expected()


def test_sources_need_no_header():
    for name in NAMES:
        assert "#include" not in sources.read(name)


def test_fingerprint_is_the_texts_sha256():
    assert sources.fingerprint("stream.cu") == hashlib.sha256((ROOT / "kernels" / "stream.cu").read_bytes()).hexdigest()


def test_a_missing_source_says_where_it_looked_and_what_there_is():
    with pytest.raises(
        sources.SourceMissing, match=r"no kernel source 'strem\.cu' in .*; there are access_pattern\.cu, .*unified_memory\.cu"
    ):
        sources.read("strem.cu")


def test_an_incomplete_installation_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "site" / "pytest_gpumem" / "kernels")
    with pytest.raises(sources.SourceMissing, match=r"no CUDA sources in .*cu \(installed\) nor in .*kernels \(checkout\)"):
        sources.read("stream.cu")


def test_the_shipped_copy_comes_first(tmp_path, monkeypatch):
    package = tmp_path / "pytest_gpumem" / "kernels"
    for folder, text in ((package / "cu", "shipped"), (tmp_path / "kernels", "checkout")):
        folder.mkdir(parents=True)
        (folder / "stream.cu").write_text(text)
    monkeypatch.setattr(sources, "_PACKAGE", package)
    assert sources.read("stream.cu") == "shipped"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("project"))


@needs_pip
def test_found_in_a_wheel(project, tmp_path):
    pip("wheel", ".", "-w", str(tmp_path), cwd=project)
    (wheel,) = tmp_path.glob("pytest_gpumem-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {f"pytest_gpumem/kernels/cu/{name}" for name in NAMES} <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.startswith("kernels/")]
        # what else the package reads at run time
        assert {"pytest_gpumem/py.typed", "pytest_gpumem/reporting/templates/report.html"} <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    folder, files = report(sys.executable, tmp_path, tmp_path / "site")
    assert folder == tmp_path / "site" / "pytest_gpumem" / "kernels" / "cu"
    assert files == expected()


@needs_pip
def test_found_in_an_editable_install(project, tmp_path):
    python, _ = environment(tmp_path / "venv")
    pip("--python", str(python), "install", "-e", ".", cwd=project)
    folder, files = report(python, tmp_path)
    assert folder == project / "kernels"
    assert files == expected()
