"""The tables of the reference pages."""

from __future__ import annotations

import ast
from pathlib import Path

import docs_reference
import results_schema

from pytest_gpumem.kernels.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]


def test_every_kernel_has_a_sentence_and_its_traffic() -> None:
    assert sorted(docs_reference.SENTENCES) == sorted(CATALOGUE)
    assert all(
        sentence.endswith(".") and sentence.count(". ") == 0
        for sentence in docs_reference.SENTENCES.values()
    )
    assert docs_reference.traffic(CATALOGUE["triad"]) == "Reads `b`, `c`; writes `a`"
    assert all(docs_reference.traffic(kernel) for kernel in CATALOGUE.values())
    assert len(docs_reference.kernels().splitlines()) == len(CATALOGUE)


def test_the_readme_has_every_fixture() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    fixtures = [line.split("`")[1] for line in docs_reference.fixtures().splitlines()]
    assert [name for name in fixtures if f"`{name}`" not in readme] == []


def test_the_file_of_the_schema_is_what_the_code_gives() -> None:
    assert results_schema.FILE.read_text(encoding="utf-8") == results_schema.text(), (
        "python ci/results_schema.py writes it anew"
    )


def test_every_constant_of_a_verdict_says_what_it_is_and_they_are_few() -> None:
    table = docs_reference.constants()
    for name in ("slowdown.DAYS", "duet.LOOKS"):
        assert f"| `{name}` |" in table
    assert len(table.splitlines()) <= 2 + 15


def test_no_constant_of_a_verdict_hides_in_a_function() -> None:
    for path in docs_reference.MODULES_OF_CONSTANTS:
        tree = ast.parse((ROOT / "pytest_gpumem" / path).read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for part in ast.walk(function):
                    if isinstance(part, ast.Constant) and isinstance(part.value, float):
                        assert part.value in (0.0, 1.0), path
