"""Exit codes of pytest --gpumem and of the commands, with what each means."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes. 0 to 5 are pytest's."""

    FINE = 0
    FAILED = 1
    INTERRUPTED = 2
    INTERNAL_ERROR = 3
    """Python's own code for an exception, 1, would report a failure."""
    USAGE = 4
    NO_TESTS = 5
    NO_VERDICT = 6
    CTRL_C = 130
    """A command of `gpumem` after Ctrl-C, as shells report it."""
    NOBODY_READS = 141
    """The reader of the output ended, as shells report SIGPIPE."""


EXIT_CODES: Mapping[str, Mapping[Exit, str]] = {
    "pytest --gpumem": {
        Exit.FAILED: "a test fails, a file cannot be written, or --gpumem-save fails",
        Exit.USAGE: "an option, a marker, the device or a baseline cannot be used",
        Exit.NO_VERDICT: "--gpumem-l2-sweep swept nothing",
    },
    "compare": {
        Exit.FAILED: "a row is slower",
        Exit.NO_VERDICT: "no row is on both sides, or --force was needed; with --strict: a row is not a PASS of a real GPU",
    },
    "duet": {
        Exit.FAILED: "a test is slower, or fails in head only",
        Exit.NO_VERDICT: "nothing could be judged; with --strict: a row is not a PASS of a real GPU",
    },
    "explain": {Exit.NO_VERDICT: "a side measured nothing"},
    "gate": {
        Exit.FAILED: "a test fails or is slower, or a measurement of the baseline is lost",
        Exit.USAGE: "the run could not start, such as without a GPU in CI",
        Exit.NO_VERDICT: "nothing was measured, or a row that BASE may have was compared with nothing; with --strict: a row is not a PASS "
        "of a real GPU",
    },
    "l2-sweep": {Exit.NO_VERDICT: "nothing was swept; the other codes are pytest's"},
    "profile": {Exit.FAILED: "tests failed; the report is complete", Exit.NO_VERDICT: "no report was written"},
    "read": {Exit.NO_VERDICT: "a file cannot be read"},
    "traffic": {Exit.FAILED: "a declaration is too large", Exit.NO_VERDICT: "nothing could be counted"},
}
"""By command, the codes that mean something particular. All commands: 0 is fine, 3 an internal error, 4 wrong arguments or files."""
