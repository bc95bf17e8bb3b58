"""The history of a store: its accepted and recorded runs, as series and changes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.baselines.storage import Storage, storage
from pytest_gpumem.baselines.store import IMPROVED
from pytest_gpumem.collector import uncollected
from pytest_gpumem.history.changes import Step, exact_steps, steps
from pytest_gpumem.history.columns import Column, Columns, Mark, Values, columns_of
from pytest_gpumem.history.data import Change, History, Run, Series
from pytest_gpumem.history.figures import METRICS
from pytest_gpumem.judging.drift import APART
from pytest_gpumem.records.row import covers
from pytest_gpumem.units import format_time


def history(where: str | Path | Storage, *, card: str | None = None, test: str | None = None) -> History:
    """Everything that the accepted and the recorded runs of a place say.

    Args:
        where: as of --gpumem-baseline or --gpumem-record.
        card: only of this device, by its key.
        test: only of this test: a row's key, or what selects it on pytest's command line.

    Raises:
        BaselineError: the place cannot be reached, or a file of it cannot be read.
        UserError: there may be changes, and ruptures is not installed.
    """
    place = storage(where)
    keys = sorted({*place.devices(), *place.recorded().devices()})
    return of_columns({key: (columns_of(place, key), columns_of(place.recorded(), key)) for key in keys if card in (None, key)}, test=test)


@uncollected()
def of_columns(cards: Mapping[str, tuple[Columns, Columns]], *, test: str | None = None) -> History:
    """The history of columns: by card, those of accepted and of recorded runs. Otherwise as `history`."""
    every: list[tuple[str, bool, Column]] = []
    marks: dict[tuple[str, str], list[Mark]] = defaultdict(list)
    for key, (accepted, recorded) in cards.items():
        ids = {column.id for column in accepted.columns}
        twice = {column.id for column in recorded.columns}
        every += [(key, True, column) for column in accepted.columns if column.id not in twice]
        every += [(key, column.id in ids, column) for column in recorded.columns]
        for mark in sorted(accepted.marks, key=lambda mark: mark.when):
            marks[key, mark.test].append(mark)
    every.sort(key=lambda one: (one[2].when, one[2].file))
    number = {id(column): index for index, (_, _, column) in enumerate(every)}
    runs = tuple(
        Run(datetime.fromisoformat(column.when), column.revision, key, column.device, accepted, column.simulated)
        for key, accepted, column in every
    )
    found: list[Series] = []
    for key, both in cards.items():
        found += _series(key, both, number)
    # The runs of each figure of a card and variant share their deviations.
    groups: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for index, one in enumerate(found):
        groups[one.metric, one.card, one.variant].append(index)
    by_series: dict[int, list[Step]] = {}
    for group in groups.values():
        by_series |= _steps_of(found, group)
    chosen = [index for index, one in enumerate(found) if test is None or covers(test, one.test)]
    changes = [
        change
        for position, index in enumerate(chosen)
        for change in _changes(
            position, found[index], by_series.get(index, []), runs, marks.get((found[index].card, found[index].test), ())
        )
    ]
    return History(runs, tuple(found[index] for index in chosen), tuple(changes))


def recent(found: History, since: datetime) -> list[Change]:
    """The changes since a time: what became worse and nobody accepted, what became worse, what became better; the largest first."""
    after = [change for change in found.changes if found.runs[found.series[change.series].runs[change.latest]].when >= since]
    return sorted(after, key=lambda change: (not change.worse, change.accepted, -_size(change)))


def _size(change: Change) -> float:
    """As large for a doubling as for a halving."""
    return abs(math.log(change.after / change.before)) if change.before > 0 and change.after > 0 else math.inf


def variants(columns: Sequence[Column]) -> list[str | None]:
    """What tells the cards of one model apart that ran these columns: the latency of their memory. None for all where they are alike.

    Readings of one control that lie less than `APART` from the next are of one variant. Another version of the control reads other
    latencies: a card that both have read links their variants.
    """
    of: dict[int, tuple[str, int]] = {}  # by column: its control, and the number of the variant that it reads
    for control in sorted({column.control for column in columns if column.control is not None and column.dram is not None}):
        read = sorted((column.dram, index) for index, column in enumerate(columns) if column.control == control and column.dram)
        number, last = 0, read[0][0] if read else 0.0
        for latency, index in read:
            number += latency > last * (1 + APART)
            last = latency
            of[index] = control, number
    by_time = sorted(of, key=lambda index: columns[index].when)
    variant = {node: node for node in of.values()}
    newest: dict[str, tuple[str, int]] = {}
    for index in by_time:
        card, node = columns[index].card, of[index]
        if card is None:
            continue
        if (before := newest.get(card)) is not None and before[0] != node[0]:
            variant |= dict.fromkeys([one for one, own in variant.items() if own == variant[before]], variant[node])
        newest[card] = node
    if len(set(variant.values())) < 2:
        return [None] * len(columns)
    last_control = {variant[of[index]]: of[index][0] for index in by_time}
    latencies: dict[tuple[str, int], list[float]] = defaultdict(list)
    for index, node in of.items():
        if node[0] == last_control[variant[node]]:
            latencies[variant[node]].append(columns[index].dram or 0.0)
    names = {node: f"DRAM {format_time(float(np.median(read)))}" for node, read in latencies.items()}
    found: list[str | None] = []
    for index, column in enumerate(columns):
        known = of.get(index) or newest.get(column.card or "")
        found.append(names[variant[known]] if known is not None else None)
    return found


def _series(key: str, both: tuple[Columns, Columns], number: Mapping[int, int]) -> list[Series]:
    """The series of one card; `number`: of each column's run, by its identity."""
    together = [column for columns in both for column in columns.columns]
    of_column = dict(zip(map(id, together), variants(together), strict=True))
    names = sorted({name for name in of_column.values() if name is not None})
    parts: dict[tuple[str, str, str, str | None], list[tuple[NDArray[np.int32], NDArray[np.float64]]]] = defaultdict(list)
    for columns in both:
        at = np.array([number.get(id(column), -1) for column in columns.columns], np.int32)
        order = np.argsort(at, kind="stable")
        of = [of_column[id(columns.columns[column])] for column in order]
        groups = {name: np.array([one == name for one in of], bool) & (at[order] >= 0) for name in (None, *names)}
        known: dict[bytes, list[_Piece]] = {}
        for metric, values in columns.values.items():
            for row, variant, runs, own in _rows(values, at, order, groups, known):
                test, how = columns.rows[row]
                parts[metric, test, how, variant].append((runs, own))
    found, hows = [], defaultdict[str, set[str]](set)
    for _, test, how, _ in parts:
        hows[test] |= {how} - {""}
    for (metric, test, how, variant), pieces in parts.items():
        runs, own = (
            pieces[0] if len(pieces) == 1 else (np.concatenate([one[0] for one in pieces]), np.concatenate([one[1] for one in pieces]))
        )
        if len(pieces) > 1:
            order = np.argsort(runs, kind="stable")
            runs, own = runs[order], own[order]
        told = ", ".join(filter(None, (variant, how if len(hows[test]) > 1 else None))) or None
        found.append(Series(test, metric, METRICS[metric].unit, key, told, runs, own))
    return found


_Piece = tuple[str | None, NDArray[np.intp], NDArray[np.int32]]  # variant, columns and runs of a row


def _rows(
    values: Values,
    at: NDArray[np.int32],
    order: NDArray[np.intp],
    groups: Mapping[str | None, NDArray[np.bool_]],
    known: dict[bytes, list[_Piece]],
) -> Iterator[tuple[int, str | None, NDArray[np.int32], NDArray[np.float64]]]:
    """Row, variant, runs and values of each row of a metric.
    `at`: the number of each column's run.
    `order`: the columns by these numbers.
    `groups`: of each variant, which columns it has, in that order.
    `known`: the pieces of rows with values in the same columns.
    """
    dense = dict(zip(values.varying.tolist(), values.dense, strict=True))
    values.constant.flags.writeable = False
    for position, (row, present) in enumerate(zip(values.rows.tolist(), values.present, strict=True)):
        bits = present.tobytes()
        if (pieces := known.get(bits)) is None:
            there = np.unpackbits(present, count=len(at)).view(bool)[order]
            chosen = ((variant, order[there & of]) for variant, of in groups.items())
            pieces = known[bits] = [(variant, columns, at[columns]) for variant, columns in chosen if len(columns)]
        line = dense.get(position)
        for variant, columns, runs in pieces:
            if line is not None:
                yield row, variant, runs, line[columns]
            else:  # as `numpy.broadcast_to`, which takes ten times as long
                yield row, variant, runs, np.ndarray((len(columns),), np.float64, values.constant, 8 * position, (0,))


def _steps_of(found: Sequence[Series], group: Sequence[int]) -> dict[int, list[Step]]:
    """The changes of series whose runs share their deviations, by index; `group`: their indexes."""
    if METRICS[found[group[0]].metric].exact:
        return {index: own for index in group if found[index].values.strides != (0,) and (own := exact_steps(found[index].values))}
    numbers = np.unique(np.concatenate([found[index].runs for index in group]))
    local = np.full(int(numbers[-1]) + 1, -1, np.int32)
    local[numbers] = np.arange(len(numbers))
    every = steps([local[found[index].runs] for index in group], [found[index].values for index in group], len(numbers))
    return {index: own for index, own in zip(group, every, strict=True) if own}


def _changes(position: int, one: Series, own: Sequence[Step], runs: Sequence[Run], marks: Sequence[Mark]) -> Iterator[Change]:
    # A run that a change may begin with is of neither level, unless one run would be all that is left of a level.
    begins, ends = [0, *(step.at for step in own)], [*((step.earliest, step.at) for step in own), (len(one.values),) * 2]
    levels = [one.values[begin : earliest if earliest > begin + 1 else at] for begin, (earliest, at) in zip(begins, ends, strict=True)]
    medians = [float(np.median(level)) for level in levels] if own else []
    by = _accepted(one, own, medians, runs, marks) if marks else {}
    for index, (step, before, after) in enumerate(zip(own, medians, medians[1:], strict=False)):
        relative = after / before - 1 if before else math.copysign(math.inf, after - before)
        who, why = (by[index].who, by[index].why) if index in by else ("", "")
        yield Change(position, step.at, step.earliest, step.latest, before, after, relative, index in by, who, why)


def _accepted(one: Series, own: Sequence[Step], medians: Sequence[float], runs: Sequence[Run], marks: Sequence[Mark]) -> dict[int, Mark]:
    """What accepted each change: somebody accepts all that runs have shown by then, or else the change that the next run shows."""
    by: dict[int, Mark] = {}
    for mark in marks:
        when = datetime.fromisoformat(mark.when)
        left = [index for index in range(len(own)) if index not in by]
        if mark.who == IMPROVED:  # of a gain
            left = [index for index in left if medians[index + 1] < medians[index]]
        shown = [index for index in left if runs[one.runs[own[index].at]].when <= when]
        next_one = [index for index in left if runs[one.runs[own[index].earliest - 1]].when <= when][:1]
        by |= dict.fromkeys(shown or next_one, mark)
    return by
