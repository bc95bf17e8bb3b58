"""Plain data that all rooms share: frozen msgspec Structs with arithmetic on their fields, and
their JSON. This module has the base of all records, the types of their fields, and keys of rows.

The text behind a field, or below it, describes it; the JSON Schema has the same text. The limits of
a type hold when JSON is read and written, not when a record is made.
"""

import math
import re
from functools import cache
from typing import Annotated

from msgspec import Meta, Struct

LEAST_TIME, LONGEST_TIME = 1e-12, 1e9  # Seconds of a launch: ratios and squares stay finite
FARTHEST = math.log(LONGEST_TIME / LEAST_TIME) + 1
"""Log-ratio that no two times have; exponentials of larger ones overflow."""
_LARGEST = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Bytes = Annotated[int, Meta(ge=0, le=_LARGEST)]
ByteChange = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_TIME)]
LaunchTime = Annotated[float, Meta(ge=LEAST_TIME, le=LONGEST_TIME)]  # Seconds of a launch
LaunchTimes = Annotated[tuple[LaunchTime, ...], Meta(min_length=1)]
Placements = Annotated[tuple[LaunchTimes, ...], Meta(min_length=1)]  # Of each buffer placement
NotNegative = Annotated[float, Meta(ge=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Record(Struct, frozen=True):
    """Plain data: frozen. Unknown fields of JSON, such as derived figures, are ignored."""


def selects(name: str, nodeid: str) -> bool:
    """Return whether the id of a test, a file, a class or a folder selects a test."""
    # A name with parameters selects this test alone: `test[a][b]` has the parameters "a][b".
    return nodeid == name or (
        not name.endswith("]")
        and nodeid.startswith((f"{name}[", f"{name}::", f"{name.rstrip('/')}/"))
    )


def function_of(nodeid: str) -> str:
    """The id of a test's function, without the parameters of this call."""
    start = nodeid.find("[", nodeid.find("::") + 1)
    return nodeid[:start] if start >= 0 else nodeid


@cache
def key_of(nodeid: str, label: str) -> str:
    r"""The key of a measurement: `nodeid[label]`, or the node id alone without a label.

    Brackets inside of parameters and label get a backslash: the parameter `a][b` is `test[a\]\[b]`.
    """
    function = function_of(nodeid)
    if nodeid != function and nodeid.endswith("]"):
        nodeid = f"{function}[{_escaped(nodeid[len(function) + 1 : -1])}]"
    return f"{nodeid}[{_escaped(label)}]" if label else nodeid


def _escaped(text: str) -> str:
    # Inside: double the backslashes before a bracket or the end, so that no two texts become the
    # same. Others stay: pytest writes many, as in "\xe4". Then put one before each bracket.
    return re.sub(r"([\[\]])", r"\\\1", re.sub(r"(\\+)(?=[\[\]]|\Z)", r"\1\1", text))
