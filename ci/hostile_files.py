"""Damage baselines, acceptances, results and profiles, and feed them to whatever reads them.

    python ci/hostile_files.py [--seed N] [--cases N]

Each reader accepts a file or refuses it in one line with the exit code of a usage error, within
5 s, and prints nothing that commands a terminal or a CI. Needs no GPU. The last line says how many
cases passed and failed; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import ncu_csv  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from pytest_gpumem.baselines.store import digest  # noqa: E402
from pytest_gpumem.cli import main as gpumem  # noqa: E402
from pytest_gpumem.printable import printable  # noqa: E402

SECONDS = 5
"""For one case."""
SUITE = """
from pytest_gpumem import MiB
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 * MiB), device_buffer(64 * MiB), max_regression="5%")
def test_two(gpu_benchmark, device_buffer, managed_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, label="small")
    gpu_benchmark(gpu_kernels.init, managed_buffer(1 << 20), 1.0, label="managed", count_pages=True)
"""
NUMBERS = (0, -1, 1, 0.0, -0.0, 5e-324, -1e-6, 1e300, 1.7e308, 1 << 62, 1 << 64, -(10**400))
TEXTS = (
    "",
    "::add-mask::x\n::add-mask::x",
    "\x1b[2J\u202e\u2028\0",
    "\udcff",
    "x" * 5000,
    "../../x",
)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], [0], {"": 0}, math.inf, -math.inf, math.nan)


class TooSlow(BaseException):
    """No exception that a reader would catch."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(_number: int, _frame: object) -> None:
        raise TooSlow(f"takes longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


# Damage


def bytes_changed(text: bytes, rng: random.Random) -> bytes:
    """A few bits turned over, a part cut out or filled, or the end missing."""
    damaged, at = bytearray(text), rng.randrange(len(text))
    end, kind = min(len(text), at + rng.randrange(1, 64)), rng.randrange(4)
    if kind == 0:
        damaged[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del damaged[at:]
    elif kind == 2:
        del damaged[at:end]
    else:
        damaged[at:end] = rng.choice((b"[" * 100_000, b"\0", b"\xff", b'"', b"0"))
    return bytes(damaged)


def value_changed(value: Any, rng: random.Random) -> Any:
    """A few values of a JSON document replaced, taken away, added or nested."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder, key = rng.choice(list(_places(value)))
        old, kind = holder[key], rng.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = old
        elif kind == 2:
            holder[key] = [old]
        elif kind == 3:
            holder[key] = rng.choice(OTHERS)
        else:
            holder[key] = rng.choice(TEXTS if isinstance(old, str) else NUMBERS)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every key and index of a document; of a long list of numbers, such as samples, the first."""
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:1] if value and isinstance(value[0], float) else value))
    else:
        return
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def json_changed(text: bytes, rng: random.Random) -> bytes:
    return json.dumps(value_changed(json.loads(text), rng)).encode()


def results_changed(text: bytes, rng: random.Random) -> bytes:
    """Only what stands under our own key, which all that is read is in."""
    whole = json.loads(text)
    return json.dumps(whole | {"gpumem": value_changed(whole["gpumem"], rng)}).encode()


def baseline_changed(text: bytes, rng: random.Random) -> bytes:
    """With a digest that fits, as somebody forges it who means to deceive."""
    whole = json.loads(text)
    whole["content"] = value_changed(whole["content"], rng)
    with suppress(ValueError):  # of what is not finite
        whole["sha256"] = digest(json.loads(json.dumps(whole["content"], allow_nan=False)))
    return json.dumps(whole).encode()


# Readers: each raises where a file is read badly


def command(*arguments: str, codes: Sequence[int] = (0, 1, 4, 6)) -> None:
    done = CliRunner().invoke(gpumem, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in codes, f"exit code {done.exit_code}: {done.output[-300:]}"
    if done.exit_code == 4:
        one_line(done.output)
    harmless(done.output)


def one_line(text: str) -> None:
    """An error as a command prints it."""
    text = printable(text)
    assert text, "no word of what is wrong"
    assert len(text.splitlines()) == 1, f"more than one line: {text[:300]!r}"


def harmless(text: str) -> None:
    """Nothing in a text commands a terminal or a CI."""
    for line in text.split("\n"):
        assert line.replace("\t", "").replace("\N{NO-BREAK SPACE}", "").isprintable(), (
            f"control characters: {line[:200]!r}"
        )
        assert not line.lstrip().startswith("::add-mask"), f"a command to the CI: {line[:200]!r}"


def read_results(path: Path, seeds: Path, rng: random.Random) -> None:
    page = path.with_suffix(".html")
    command("report", str(path), "-o", str(page))
    command("report", str(path), rng.choice(("--csv", "--json")), "-")
    if page.exists():
        harmless(page.read_text(encoding="utf-8"))


def read_baseline(path: Path, seeds: Path, rng: random.Random) -> None:
    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.baselines.verdicts import judged, screened
    from pytest_gpumem.devices.opening import choose
    from pytest_gpumem.files import load_results
    from pytest_gpumem.outcomes import UserError
    from pytest_gpumem.reporting.conclusion import Run
    from pytest_gpumem.reporting.markdown import page
    from pytest_gpumem.reporting.table import table

    facts = choose("sim").facts
    folder = path.parent / "baseline" / facts.key / "gpumem"
    folder.mkdir(parents=True)
    shutil.copy(seeds / "baseline.json", folder / "20200101T000000Z-a-b.json")
    shutil.copy(path, folder / "20300101T000000Z-a-b.json")
    saved = folder / "20200101T000000Z-a-b.json"
    if json.loads(saved.read_bytes())["content"]["id"].encode() in path.read_bytes():
        saved.unlink()
    try:
        baseline = Store(path.parent / "baseline", facts).load()
        run = load_results(seeds / "results.json").document
        rows = []
        for row in run.rows:
            limited = replace(row, limits=replace(row.limits, max_regression="1%"))
            rows.append(judged(limited, baseline, facts, siblings={}, strict=False))
        screened(rows, baseline)
        harmless(table(run.rows, facts, width=100, colour=False))
        harmless(page(Run(run.rows, facts, {})))
    except UserError as error:
        one_line(str(error))


def read_acceptance(path: Path, seeds: Path, rng: random.Random) -> None:
    from pytest_gpumem.baselines.acceptances import Acceptances, Figure, read
    from pytest_gpumem.files import load_results
    from pytest_gpumem.limits import LIMITS
    from pytest_gpumem.outcomes import FileError

    run = load_results(seeds / "results.json").document
    try:
        accepted = Acceptances({path.name: read(path.read_bytes())})
    except FileError as error:
        one_line(" ".join(printable(str(error)).split()))
        return
    for measured in run.rows:
        for change in accepted.files[path.name].changes:
            str(change)
        accepted.why_gone(measured.key)
        for figure in get_args(Figure):
            accepted.digest(measured.key, figure)
        for name in LIMITS:
            accepted.allows(measured.key, name, None)


def read_profile(path: Path, seeds: Path, rng: random.Random) -> None:
    from pytest_gpumem.nsight.ncu import kernels_of, read_launches, table
    from pytest_gpumem.outcomes import FileError

    try:
        launches = read_launches(path.read_text(errors="replace"))
    except FileError as error:
        one_line(str(error))
    else:
        table(kernels_of(launches))


Damage = Callable[[bytes, random.Random], bytes]
Reader = Callable[[Path, Path, random.Random], None]
KINDS: tuple[tuple[str, tuple[Damage, ...], Reader, int], ...] = (
    ("results.json", (bytes_changed, json_changed, *(results_changed,) * 3), read_results, 4),
    ("baseline.json", (bytes_changed, json_changed, *(baseline_changed,) * 3), read_baseline, 4),
    ("acceptance.json", (bytes_changed, *(json_changed,) * 3), read_acceptance, 2),
    ("ncu.csv", (bytes_changed,), read_profile, 1),
)
"""Of each kind of file: a seed's name, ways to damage it, its reader, and its share of the cases."""


def make_seeds(folder: Path) -> None:
    """Files as the plugin and the profilers write them."""
    (folder / "test_a.py").write_text(SUITE)
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    base += ["--gpumem", "--gpumem-device=sim", "--gpumem-budget=5ms"]
    environment = dict(os.environ)
    for name in os.environ:
        if name.startswith(("GPUMEM", "GITHUB_", "CI_")):
            del environment[name]
    for more in (["--gpumem-save"], ["--benchmark-json=results.json"]):
        done = subprocess.run(
            [*base, *more], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"no seeds: {done.stdout}{done.stderr}")
    (saved,) = folder.rglob("gpumem/*.json")
    shutil.copy(saved, folder / "baseline.json")
    (folder / "acceptance.json").write_text(_acceptance())
    measured = ncu_csv.measured("test_copy")
    lines = [ncu_csv.line(number, ncu_csv.TRIAD, measured, ncu_csv.H200) for number in range(3)]
    (folder / "ncu.csv").write_text(ncu_csv.log(*lines))


def _acceptance() -> str:
    import msgspec

    from pytest_gpumem.baselines.acceptances import Acceptance, AcceptedChange

    test = "test_a.py::test_copy"
    changes = (
        AcceptedChange(test, "time", "8.41%"),
        AcceptedChange(test, "memory", "96 MiB"),
        AcceptedChange(test, "limit", "max_copies=3"),
        AcceptedChange(test, "limit", "max_regression=9%"),
        AcceptedChange(test, "renamed", "test_a.py::test_older"),
        AcceptedChange("test_a.py::test_old", "removed"),
    )
    accepted = Acceptance(test, "checks bounds", "ada", changes, "0" * 40, utc="2026-11-29")
    return json.dumps(msgspec.to_builtins(accepted))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=20_240)
    parser.add_argument("--cases", type=int, default=500)
    given = parser.parse_args()
    begun = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpumem-hostile-") as made:
        seeds = Path(made, "seeds")
        seeds.mkdir()
        make_seeds(seeds)
        for name, _, reader, _ in KINDS:  # what is not damaged is read
            shutil.copy(seeds / name, Path(made, name))
            reader(Path(made, name), seeds, random.Random(0))
        kinds = [kind for kind in KINDS for _ in range(kind[3])]
        for number in range(given.cases):
            # Each case by a seed of its own, so that one can be run again alone.
            rng = random.Random(f"{given.seed} {number}")
            name, ways, reader, _ = kinds[number % len(kinds)]
            folder = Path(made, str(number))
            folder.mkdir()
            path = folder / name
            path.write_bytes(rng.choice(ways)((seeds / name).read_bytes(), rng))
            try:
                with limited():
                    reader(path, seeds, rng)
            except (Exception, TooSlow) as error:
                failed += 1
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(at.filename).name}:{at.lineno}"
                words = f"{type(error).__name__}: {str(error)[:300]} ({where})"
                print(f"FAILED case {number}, {name}: {words}", flush=True)
            shutil.rmtree(folder)
    seconds = time.monotonic() - begun
    print(
        f"seed {given.seed}, {given.cases} damaged files in {seconds:.0f} s:"
        f" {given.cases - failed} passed, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
