"""The memory suite passes, simulated, with the lowest versions that pyproject.toml allows and with the newest, under every Python there is.

    python ci/versions.py                        # every python3.10 to python3.14 that can be found
    python ci/versions.py lowest python3.10      # one of them

Makes an environment for each. The lowest versions are tried under Python 3.10 and 3.11 alone: they have no wheels for a newer one. Exits
with 1 if a suite fails, or if no Python was found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 15))
OLD = ("3.10", "3.11")
SUITE = (
    "-m pytest -q -p no:cacheprovider --gpumem --gpumem-device=sim --gpumem-budget=50ms -W default"
)


def lowest() -> list[str]:
    """The lower bounds of the dependencies, as constraints of pip."""
    plain = [one for one in requires("pytest-gpumem") or () if "extra ==" not in one]
    return [re.sub(r"^([\w.-]+)>=([\w.]+).*$", r"\1==\2", one) for one in plain]


def version_of(python: str) -> str | None:
    """Major and minor version of an interpreter; None if it cannot be started."""
    try:
        ran = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def tried(which: str | None, pythons: list[str]) -> Iterator[tuple[str, str]]:
    """Interpreter and choice of versions."""
    for python in pythons:
        version = version_of(python)
        if version is None:
            print(f"versions: {python} is not here")
            continue
        if which != "newest" and (which == "lowest" or version in OLD):
            yield python, "lowest"
        if which != "lowest":
            yield python, "newest"


def passes(python: str, which: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        own = str(Path(folder, "bin", "python"))
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{one}\n" for one in lowest()) if which == "lowest" else "")
        install = [own, *["-m", "pip", "install", "-q", "--disable-pip-version-check", "-c"]]
        install += [str(constraints), "-e", str(ROOT)]
        if subprocess.run(install, check=False).returncode != 0:
            return False
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPUMEM", "PYTEST_"))
        }
        return (
            subprocess.run([own, *SUITE.split()], cwd=ROOT, env=environment, check=False).returncode
            == 0
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "which",
        nargs="?",
        choices=("lowest", "newest"),
        help="versions of the dependencies; both if none is given",
    )
    parser.add_argument("python", nargs="*", default=list(PYTHONS), help="interpreters")
    chosen = parser.parse_args()
    results = {
        (python, which): passes(python, which)
        for python, which in tried(chosen.which, chosen.python)
    }
    for (python, which), passed in results.items():
        print(f"{'ok' if passed else 'FAILED'}: {python}, {which} versions")
    print(f"versions: {sum(results.values())} of {len(results)} pass")
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
