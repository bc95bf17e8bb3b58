"""Outcomes of a verdict, and exit codes of pytest --gpumem and of the commands."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum


class Outcome(str, Enum):
    """The result of judging a measurement against its limits, if it has any.

    What most needs a person comes first.
    """

    FAIL = "FAIL"  # outside a limit beyond doubt, or wrong
    UNDECIDED = "UNDECIDED"  # neither PASS nor FAIL, such as by `judging.limits`
    ACCEPTED = "ACCEPTED"  # outside a limit by an accepted change, and within all others
    NEW = "NEW"  # the baseline has no row to compare with
    PASS = "PASS"  # within every limit
    MEASURED = "MEASURED"  # no limit is set: nobody relies on it

    @property
    def rank(self) -> int:
        """Position in reports."""
        return list(Outcome).index(self)

    @property
    def word(self) -> str:
        """The outcome in tables and sentences: in capitals, unless there is no limit."""
        return "measured" if self is Outcome.MEASURED else str(self.value)

    @property
    def quiet(self) -> bool:
        """True if it needs nobody."""
        return self in (Outcome.PASS, Outcome.MEASURED)


class Code(str, Enum):
    """Why an outcome is what it is, for programs and for grouping."""

    SLOWER = "slower"  # FAIL: above `max_regression`, beyond doubt
    # FAIL: above a limit against the oldest revision of the reference, by steps that each passed
    CREPT = "crept"
    TOO_MUCH_MEMORY = "too much memory"  # FAIL: above a limit on the memory of a test
    NOISY = "noisy"  # UNDECIDED: noise may hide the limit
    LOOKS_SLOWER = "looks slower"  # UNDECIDED: measured above the limit, not beyond doubt
    CONDITIONS = "conditions"
    """UNDECIDED: throttling, another process or a profiler forbids a judgement."""
    MEASURED_DIFFERENTLY = "measured differently"
    """UNDECIDED, and FAIL in a duet: another mode, sampler or window, or fewer declared bytes."""
    TOO_FEW_RUNS = "too few runs"
    """UNDECIDED: the reference has a single process, which does not tell how processes differ."""
    NOT_READ = "not read"
    """UNDECIDED: the memory that a limit is about could not be read."""
    DID_NOT_RUN = "did not run"  # FAIL: an earlier test lost the context of the device
    NO_BASELINE = "no baseline"  # NEW: the baseline has no such row, or none since an acceptance


class UserError(Exception):
    """Arguments or files that cannot be used: a line with the value and what is accepted."""


class FileError(ValueError):
    """A file that cannot be read, JSON of another schema, or a record that cannot be written. Names
    the value by its path, not the file."""

    def __str__(self) -> str:
        """Return a single line."""
        return " ".join(super().__str__().split())


class NoAnswer(Exception):
    """A command that could do nothing: a line with the cause and the remedy."""


class Exit(IntEnum):
    """Exit codes. 0 to 5 are pytest's."""

    FINE = 0
    FAILED = 1
    INTERRUPTED = 2
    INTERNAL_ERROR = 3  # Python's code for an exception, 1, would report a failure
    USAGE = 4
    NO_TESTS = 5
    NO_VERDICT = 6
    CTRL_C = 130  # a command of `gpumem` after Ctrl-C, as shells report it
    NOBODY_READS = 141  # the reader of the output ended, as shells report SIGPIPE


EXIT_CODES: Mapping[str, Mapping[Exit, str]] = {
    "pytest --gpumem": {
        Exit.FAILED: "a test fails, a requested file cannot be written, or --gpumem-save fails",
        Exit.USAGE: "before the first test: an option, a marker, the device, a baseline or a "
        "folder to write cannot be used, or a test is collected twice",
        Exit.NO_VERDICT: "under --gpumem-strict, a part of the plugin raised by mistake",
    },
    "duet": {
        Exit.FAILED: "a test is slower, takes more bytes or counts, is measured in another way, or "
        "fails in head only",
        Exit.NO_VERDICT: "nothing could be judged; with --strict: a row is not a PASS of a real "
        "GPU",
    },
    "gate": {
        Exit.FAILED: "a test fails, is slower, takes more bytes or counts, is measured in another "
        "way, or has a looser limit; a measurement of the baseline, or a test that BASE selects, "
        "is lost",
        Exit.USAGE: "pytest did not start: its arguments, the baseline or the device cannot be "
        "used",
        Exit.NO_VERDICT: "nothing was measured, no row has a limit, or a limit is open: not "
        "counted, in doubt by its conditions, or left open by the duet; a simulated device takes "
        "the place of the baseline's GPU; the tests of BASE cannot be collected; with --strict: a "
        "row with a limit is not a PASS of a real GPU",
    },
    "doctor": {
        Exit.FAILED: "nothing can be measured: no GPU can be used, and GPUMEM_DEVICE chooses no "
        "simulated device"
    },
    "explain": {
        Exit.FAILED: "a test failed in base or head; what was counted is printed",
        Exit.NO_VERDICT: "nothing was counted: there is no GPU or no tool, or no kernel was "
        "measured",
    },
    "profile": {
        Exit.FAILED: "tests failed; the report is complete",
        Exit.NO_VERDICT: "no report was written",
    },
}
"""By command, the codes that mean something particular. All commands: 0 is fine, 3 an internal
error, 4 wrong arguments or files."""
