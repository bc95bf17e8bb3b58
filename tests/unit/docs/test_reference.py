"""The tables of the reference pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pytest_gpumem.kernels.catalogue import CATALOGUE

ROOT = Path(__file__).parents[3]


def test_every_kernel_has_a_sentence_and_its_traffic() -> None:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "ci" / "docs_reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert sorted(reference.SENTENCES) == sorted(CATALOGUE)
    assert all(sentence.endswith(".") and sentence.count(". ") == 0 for sentence in reference.SENTENCES.values())
    assert reference.traffic(CATALOGUE["triad"]) == "reads `b`, `c`; writes `a`"
    assert all(reference.traffic(kernel) for kernel in CATALOGUE.values())
    assert len(reference.kernels().splitlines()) == 2 + len(CATALOGUE)


def test_the_readme_has_every_fixture() -> None:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "ci" / "docs_reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert sorted(reference.SENTENCES) == sorted(CATALOGUE)
    assert all(sentence.endswith(".") and sentence.count(". ") == 0 for sentence in reference.SENTENCES.values())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    fixtures = [line.split("`")[1] for line in reference.fixtures().splitlines()[2:]]
    assert [name for name in fixtures if f"`{name}`" not in readme] == []
