"""Plain data that all rooms share: frozen msgspec Structs with arithmetic on their fields, and
their JSON. This module has the base of all records, and the types of their fields.

The text behind a field, or below it, describes it; the JSON Schema has the same text. The limits of
a type hold when JSON is read and written, not when a record is made.
"""

import math
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
