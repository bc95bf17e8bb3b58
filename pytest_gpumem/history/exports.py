"""A history in the formats of other programs. Values are in SI units: seconds, bytes, bytes per second, or a count."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from pytest_gpumem.history.data import Change, History, Run, Series
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.exports import bmf as bmf_text
from pytest_gpumem.reporting.exports import written

_OF_SERIES = ("test", "metric", "unit", "card", "variant")
_OF_RUN = ("device", "simulated", "time", "revision", "accepted")
COLUMNS = (*_OF_SERIES, *_OF_RUN, "value", "change", "change_accepted")
"""Of CSV and Parquet, which have a line for each value. A change stands with its first run, as a share: 0.1 for "+10 %"."""
_PART = 1_000_000  # values that are turned into columns at once


def csv(history: History) -> Iterator[bytes]:
    """The lines of all values, a part for each series."""
    yield written([COLUMNS]).encode()
    of_run = [written([_run(one)])[:-1] for one in history.runs]
    of_series = _changes(history)
    for index, one in enumerate(history.series):
        start = written([_line(one)])[:-1]
        changes = {change.at: f"{change.relative:.6g},{change.accepted}" for change in of_series[index]}
        values = zip(one.runs.tolist(), one.values.tolist(), strict=True)
        lines = [f"{start},{of_run[run]},{value!r},{changes.get(place, ',')}\n" for place, (run, value) in enumerate(values)]
        yield "".join(lines).encode()


def _line(series: Series) -> tuple[object, ...]:
    return series.test, series.metric, series.unit, series.card, series.variant


def _run(run: Run) -> tuple[object, ...]:
    return run.device, run.simulated, run.when.isoformat(timespec="seconds"), run.revision, run.accepted


def _changes(history: History) -> Mapping[int, list[Change]]:
    """By index of the series, its changes; none for others."""
    changes: dict[int, list[Change]] = defaultdict(list)
    for change in history.changes:
        changes[change.series].append(change)
    return changes


def parquet(history: History) -> memoryview:
    """The same lines as an Apache Parquet file. Raises `UserError`: pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("Parquet needs pyarrow; pip install 'pytest-gpumem[parquet]' brings it") from None
    text, flag = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.bool_()
    kinds = {"time": pyarrow.timestamp("s", "UTC"), "simulated": flag, "accepted": flag, "value": pyarrow.float64()}
    kinds |= {"change": pyarrow.float64(), "change_accepted": flag}
    schema = pyarrow.schema([(name, kinds.get(name, text)) for name in COLUMNS])
    of_run = list(zip(*map(_run, history.runs), strict=True)) or [()] * len(_OF_RUN)
    of_run[2] = tuple(one.when for one in history.runs)
    texts = [pyarrow.array(printable(list(column)), kinds.get(name, text)) for name, column in zip(_OF_RUN, of_run, strict=True)]
    lines = list(zip(*map(_line, history.series), strict=True)) or [()] * len(_OF_SERIES)
    dictionaries = [pyarrow.array(printable(list(column)), pyarrow.string()).dictionary_encode() for column in lines]
    changes = _changes(history)
    sink = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        for numbers in _parts(history.series):
            own = [history.series[index] for index in numbers]
            lengths = [len(one.runs) for one in own]
            starts = np.concatenate([[0], np.cumsum(lengths)])
            runs = pyarrow.array(np.concatenate([one.runs for one in own]))
            which = pyarrow.array(np.repeat(np.array(numbers, np.int32), lengths))
            relative, accepted = np.full(starts[-1], np.nan), np.zeros(starts[-1], bool)
            marked = np.zeros(starts[-1], bool)
            for place, index in enumerate(numbers):
                for change in changes[index]:
                    row = starts[place] + change.at
                    relative[row], accepted[row], marked[row] = change.relative, change.accepted, True
            columns = [column.take(which) for column in dictionaries] + [column.take(runs) for column in texts]
            columns.append(pyarrow.array(np.concatenate([one.values for one in own])))
            columns += [pyarrow.array(column, mask=~marked) for column in (relative, accepted)]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
    return sink.getbuffer()


def _parts(series: tuple[Series, ...]) -> Iterator[list[int]]:
    """Indexes of the series, in parts of some `_PART` values."""
    part: list[int] = []
    count = 0
    for index, one in enumerate(series):
        part.append(index)
        count += len(one.runs)
        if count >= _PART:
            yield part
            part, count = [], 0
    if part:
        yield part


_FAMILIES = {
    "s": ("gpumem_seconds", "seconds", "Last measured time of a test."),
    "B": ("gpumem_bytes", "bytes", "Last measured bytes of a test."),
}
_COUNTS = ("gpumem_events", "", "Last count of a test, such as of kernels.")


def openmetrics(history: History) -> str:
    """OpenMetrics text: the last value of each series, and when each card last ran.

    Without timestamps, which Prometheus's node exporter refuses.
    """
    families: dict[tuple[str, str, str], list[str]] = {}
    for one in history.series:
        if len(one.values) and np.isfinite(one.values[-1]):
            labels = {"test": one.test, "metric": one.metric, "card": one.card, "variant": one.variant or ""}
            sample = f"{{{_labels(labels)}}} {float(one.values[-1])!r}"
            families.setdefault(_FAMILIES.get(one.unit, _COUNTS), []).append(sample)
    newest = {one.card: one for one in history.runs}
    if newest:
        last = [f"{{{_labels({'card': one.card, 'device': one.device})}}} {one.when.timestamp()!r}" for one in newest.values()]
        families["gpumem_newest_run_timestamp_seconds", "seconds", "When a card last ran the tests, in seconds since 1970."] = last
    lines = []
    for (name, unit, help), samples in families.items():
        lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {help}"]
        lines += [f"{name}{sample}" for sample in samples]
    return "\n".join([*lines, "# EOF", ""])


def _labels(labels: Mapping[str, str]) -> str:
    escaped = ((name, printable(value).replace("\\", "\\\\").replace('"', '\\"')) for name, value in labels.items())
    return ",".join(f'{name}="{value}"' for name, value in escaped)


def bmf(history: History) -> str:
    """The last value of each series in the Bencher Metric Format."""
    return bmf_text(
        (", ".join(filter(None, (f"{one.test} @ {one.card}", one.variant))), one.metric, float(one.values[-1]), None)
        for one in history.series
        if len(one.values)
    )
