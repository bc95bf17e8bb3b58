"""A suite on several machines: which tests each shard runs, and the results of all shards as those of one run."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.screen import Family
from pytest_gpumem.outcomes import Exit, Outcome, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import LOST, Missing, Row, Verdict
from pytest_gpumem.records.schema import SWEEPS_KEY, Document, SchemaError, document, from_plain
from pytest_gpumem.reporting.concerns import Place
from pytest_gpumem.reporting.exports import properties
from pytest_gpumem.reporting.row_facts import failure_text
from pytest_gpumem.result_files import Results, load_results
from pytest_gpumem.settings import Role, of_role

KEY = "gpumem_shard"  # key of a shard in the file of its results
FAILED, ERROR, SKIPPED = "failed", "error", "skipped"  # ends of a test that JUnit tells from a pass
_OF_ONE_MACHINE = ("baseline", "baseline_offline", "record", "device", "allow_lost")
"""Settings in which shards may differ, besides those of a whole run."""
WIDTH = 100  # columns of the text of a failure
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Ended(msgspec.Struct, frozen=True):
    """One test of a shard, as its JUnit file has it."""

    nodeid: str
    outcome: str | None = None  # as pytest counts it; None: it did not run
    seconds: float = 0.0
    text: str = ""  # of a failure or a skip
    file: str = ""  # path of its file, relative to the repository
    line: int = 1
    properties: list[tuple[str, str]] = []  # of JUnit


class Shard(msgspec.Struct, frozen=True):
    """What the results of a shard have besides those of a run."""

    index: int  # from 1 on
    count: int
    collected: str  # `digest` of the tests of all shards
    exit: int  # pytest's exit code
    tests: list[Ended]  # those of this shard
    family: int  # number of rows of the whole suite that may be compared with the baseline
    withheld: dict[str, Any] = {}
    """By `Row.key`: the FAIL of a row that is UNDECIDED only because so many rows are compared, as plain values."""


def digest(nodeids: Iterable[str]) -> str:
    """SHA-256 of the names of tests, in any order."""
    return hashlib.sha256("\0".join(sorted(nodeids)).encode(errors="surrogatepass")).hexdigest()


def divided(costs: Mapping[str, float | None], count: int) -> dict[str, int]:
    """By test, the shard that runs it, from 1 on: the same on every machine with the same baseline.

    The test of the largest cost goes to the shard that has least so far (Graham 1969, "Bounds on multiprocessing timing anomalies": at most
    a third above the best division). A test without a cost goes where its name's hash says, whatever other tests there are.
    `costs`: by node id, in seconds; None: unknown.
    `count`: of shards.
    """
    shards, loads = {}, [0.0] * count
    for nodeid, cost in sorted(costs.items(), key=lambda one: (-(one[1] or 0.0), one[0])):
        if cost is None:
            shards[nodeid] = int(digest([nodeid]), 16) % count + 1
        else:
            index = min(range(count), key=loads.__getitem__)
            loads[index] += cost
            shards[nodeid] = index + 1
    return shards


@dataclass(frozen=True)
class Merged:
    """The results of all shards."""

    document: Document
    value: Mapping[str, Any]  # for a file: as one run would have written it
    code: int  # as pytest's exit code of one run
    failures: int  # tests that failed
    tests: tuple[Ended, ...]
    utc: str
    revision: str | None
    remarks: tuple[str, ...]

    @property
    def places(self) -> dict[str, Place]:
        """Where the tests are defined."""
        return {test.nodeid: Place(test.file, test.line) for test in self.tests if test.file}


def merged(paths: Sequence[Path]) -> Merged:
    """Read the results of all shards of one run, and judge its rows as those of one suite.
    Raises `UserError`: a file cannot be read or is of no shard; a shard is missing or there twice; the shards are of different code,
    cards, settings or tests.
    """
    files = sorted((_read(path) for path in paths), key=lambda one: one.shard.index)
    _refuse_others(files)
    first = files[0]
    rows, withheld = [row for one in files for row in one.results.document.rows], _withheld(files)
    promoted = _promoted(rows, withheld, max(one.shard.family for one in files))
    failing = {row.nodeid for row in rows if row.key in promoted}
    rows = [
        replace(row, verdict=promoted.get(row.key, row.verdict), failed=True) if row.nodeid in failing else row  # rows fail with their test
        for row in rows
    ]
    device, of_test = first.results.document.device, {nodeid: [row for row in rows if row.nodeid == nodeid] for nodeid in failing}
    tests = tuple(
        _failing(test, of_test[test.nodeid], promoted, device) if test.nodeid in failing else test
        for one in files
        for test in one.shard.tests
    )
    found = replace(
        first.results.document,
        rows=tuple(rows),
        missing=_missing(files, rows),
        settings={**first.results.document.settings, "shard": None},
    )
    value: dict[str, Any] = {name: one for name, one in first.results.value.items() if name != KEY}
    value["datetime"] = min(one.results.utc for one in files)
    benchmarks = (benchmark for one in files for benchmark in one.results.value.get("benchmarks", []))
    # pytest-benchmark writes none of a test that fails.
    value["benchmarks"] = [one for one in benchmarks if one.get("fullname") not in failing]
    value["gpumem"] = document(found.device, found.rows, found.settings, found.missing)
    if sweeps := [sweep for one in files for sweep in one.results.value.get(SWEEPS_KEY, [])]:
        value[SWEEPS_KEY] = sweeps
    failures, remarks = sum(test.outcome in (FAILED, ERROR) for test in tests), tuple(_remarks(files, promoted))
    return Merged(found, value, _code(files, failures), failures, tests, value["datetime"], first.results.revision, remarks)


def junit(tests: Sequence[Ended]) -> str:
    """The tests as a JUnit file, as pytest's own (xunit2) names them."""
    kinds = {FAILED: "failure", ERROR: "error", SKIPPED: "skipped"}
    count = {kind: sum(kinds.get(test.outcome or "") == kind for test in tests) for kind in kinds.values()}
    ran = [test for test in tests if test.outcome is not None]
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name="pytest",
        errors=str(count["error"]),
        failures=str(count["failure"]),
        skipped=str(count["skipped"]),
        tests=str(len(ran)),
        time=f"{sum(test.seconds for test in ran):.3f}",
    )
    for test in ran:
        path, _, inside = test.nodeid.partition("::")
        names, bracket, parameters = inside.partition("[")
        *classes, name = names.split("::") if inside else (path,)
        classname = ".".join([path.removesuffix(".py").replace("/", "."), *classes])
        name = _xml(f"{name}{bracket}{parameters}")
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(classname), name=name, time=f"{test.seconds:.3f}")
        if test.properties:
            properties = ElementTree.SubElement(case, "properties")
            for key, value in test.properties:
                ElementTree.SubElement(properties, "property", name=_xml(key), value=_xml(value))
        if (kind := kinds.get(test.outcome or "")) is not None:
            text = _xml(test.text)
            errors = (line[1:].strip() for line in text.splitlines() if line.startswith("E "))  # as pytest marks them
            ElementTree.SubElement(case, kind, message=next(errors, text.partition("\n")[0])).text = text
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _xml(text: str) -> str:
    """Text without the characters that XML has no place for."""
    return _NOT_XML.sub("?", text)


class _File(NamedTuple):
    results: Results
    shard: Shard


def _read(path: Path) -> _File:
    results = load_results(path)
    if not isinstance(results.value.get(KEY), dict):
        raise UserError(f"{path}: of no shard; pytest --gpumem --gpumem-shard I/N --benchmark-json=FILE writes them")
    try:
        return _File(results, from_plain(results.value[KEY], Shard, f"$.{KEY}"))
    except (SchemaError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None


def _refuse_others(files: Sequence[_File]) -> None:
    """Raises `UserError`: they are not all the shards of one run."""
    if not files:
        raise UserError("there are no results of shards")
    first = files[0]
    seen: dict[int, _File] = {}
    for one in files:
        if one.shard.index in seen:
            raise UserError(f"{one.results.path}: shard {one.shard.index}, as {seen[one.shard.index].results.path} is")
        seen[one.shard.index] = one
        for what, mine, theirs in (
            ("shards", one.shard.count, first.shard.count),
            ("revision", one.results.revision, first.results.revision),
            ("GPU", one.results.document.device.key, first.results.document.device.key),
            *((f"--gpumem-{name.replace('_', '-')}", *pair) for name, pair in _settings(one, first).items()),
        ):
            if mine != theirs:
                raise UserError(
                    f"{one.results.path}: {what} {mine}, {first.results.path}: {what} {theirs}; the shards of one run have the same"
                )
    if missing := [str(index) for index in range(1, first.shard.count + 1) if index not in seen]:
        raise UserError(f"shard {', '.join(missing)} of {first.shard.count} is missing; nothing can be said of its tests")
    names = [test.nodeid for one in files for test in one.shard.tests]
    if len(names) != len(set(names)) or any(one.shard.collected != digest(names) for one in files):
        raise UserError(
            "the shards do not make up one suite: they collected other tests, or their baseline changed while they began; "
            "run all of them again"
        )


def _settings(one: _File, other: _File) -> dict[str, tuple[object, object]]:
    names = [option.name for option in of_role(Role.MEASURING, Role.JUDGING, Role.STRICTNESS) if option.name not in _OF_ONE_MACHINE]
    return {name: (one.results.document.settings.get(name), other.results.document.settings.get(name)) for name in names}


def _withheld(files: Sequence[_File]) -> dict[str, Verdict]:
    found = {}
    for one in files:
        for key, verdict in one.shard.withheld.items():
            try:
                found[key] = from_plain(verdict, Verdict, f"$.{KEY}.withheld")
            except SchemaError as error:
                raise UserError(f"{one.results.path}: {error}") from None
    return found


def _promoted(rows: Iterable[Row], withheld: Mapping[str, Verdict], size: int) -> dict[str, Verdict]:
    """By row key: the FAIL of rows that only the other rows of their shard kept UNDECIDED, by Holm's procedure over all shards."""
    failing = {row.key: row.verdict for row in rows if row.verdict.outcome is Outcome.FAIL} | dict(withheld)
    found, family = dict[str, Verdict](), Family(size)
    for key, verdict in sorted(failing.items(), key=lambda one: _p_value(one[1])):
        if key in withheld:
            if _p_value(verdict) > family.threshold:
                break
            found[key] = verdict
        family = family.after(verdict)
    return found


def _p_value(verdict: Verdict) -> float:
    p_value = verdict.comparison.p_value if verdict.comparison is not None else None
    return 1.0 if p_value is None else p_value


def _failing(test: Ended, rows: Sequence[Row], promoted: Collection[str], device: DeviceFacts) -> Ended:
    """A test that fails among all shards: with the text of its failure, and the properties of its rows as they are now."""
    text = "\n\n".join([*filter(None, [test.text]), *(failure_text(row, device, WIDTH) for row in rows if row.key in promoted)])
    named = dict(test.properties) | {name: str(value) for row in rows for name, value in properties(row, device)}
    return msgspec.structs.replace(test, outcome=FAILED, text=text, properties=list(named.items()))


def _missing(files: Sequence[_File], rows: Sequence[Row]) -> tuple[Missing, ...]:
    """The measurements that no shard has; each once, and as lost if a shard lost it."""
    measured = {row.key for row in rows if row.measurement is not None}
    found: dict[str, Missing] = {}
    for one in (one for file in files for one in file.results.document.missing):
        if one.key not in measured and (one.key not in found or one.status == LOST):
            found[one.key] = one
    return tuple(found.values())


def _code(files: Sequence[_File], failures: int) -> int:
    codes = [one.shard.exit for one in files]
    if failures or any(code not in (Exit.FINE, Exit.NO_TESTS) for code in codes):
        return Exit.FAILED
    return Exit.NO_TESTS if all(code == Exit.NO_TESTS for code in codes) else Exit.FINE


def _remarks(files: Sequence[_File], promoted: Mapping[str, Verdict]) -> Iterable[str]:
    for one in files:
        name = f"shard {one.shard.index} of {one.shard.count}"
        if one.shard.exit not in (Exit.FINE, Exit.FAILED, Exit.NO_TESTS):
            yield f"{name} ended with {one.shard.exit} before its tests did"
        elif one.shard.exit == Exit.FAILED and not any(test.outcome in (FAILED, ERROR) for test in one.shard.tests):
            yield f"{name} failed as a whole; its output says why"
        if left := sum(test.outcome is None for test in one.shard.tests):
            yield f"{name} did not run {counted(left, 'test')}"
    for key in promoted:
        yield f"FAIL among all rows, not among those of its shard alone: {key}"
