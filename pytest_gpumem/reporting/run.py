"""A run as its reports see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Past, Row


@dataclass(frozen=True)
class Place:
    """The place where a test is defined."""

    file: str  # path with forward slashes, relative to the repository
    line: int  # from 1 on


@dataclass(frozen=True)
class Run:
    """The rows of a run, and what is known of it besides."""

    rows: Sequence[Row]  # in the order in which they are shown; failed ones too
    facts: DeviceFacts
    settings: Mapping[
        str, object
    ]  # plain values that the run was taken under, by the names of the options
    utc: str = ""  # time of the run, ISO 8601
    revision: str | None = None  # of the code that was measured; None if unknown
    past: Mapping[str, Sequence[Past]] = field(
        default_factory=dict
    )  # by `Row.key`, the saved runs, oldest first
    footprints: Mapping[str, Footprint] = field(
        default_factory=dict
    )  # by `Row.key`, of the newest run of the baseline
    remarks: Sequence[
        str
    ] = ()  # sentences about the run as a whole, such as lost measurements or what decided a gate
