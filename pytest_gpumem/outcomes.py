"""Outcomes of a verdict with their order, colours and codes; and the exit codes of pytest --gpumem and of the commands."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum


class Outcome(str, Enum):
    """The result of judging one measurement against its limits."""

    PASS = "PASS"  # within every limit
    FAIL = "FAIL"  # outside a limit beyond doubt, or wrong
    UNDECIDED = "UNDECIDED"  # neither; `Verdict.code` names the reason
    NEW = "NEW"  # the baseline has no row to compare with

    @property
    def rank(self) -> int:
        """Position in reports; the outcome that most needs a person comes first."""
        return _ORDER.index(self)

    @property
    def style(self) -> str:
        """Style of rich in which terminals show it."""
        return _STYLES[self]


_ORDER = (Outcome.FAIL, Outcome.UNDECIDED, Outcome.NEW, Outcome.PASS)
_STYLES = {Outcome.FAIL: "bold red", Outcome.UNDECIDED: "yellow", Outcome.NEW: "cyan", Outcome.PASS: "green"}


class Code(str, Enum):
    """Why an outcome is what it is, for programs and for grouping."""

    SLOWER = "slower"  # FAIL: above `max_regression`, beyond doubt
    CREPT = "crept"  # FAIL: above `max_regression` against the first accepted run, by steps that each passed
    FASTER = "faster"  # FAIL: beyond `fail_if_faster`, beyond doubt
    TOO_MUCH_MEMORY = "too much memory"  # FAIL: above a limit on the memory of a test
    NOISY = "noisy"  # UNDECIDED: the interval of the change holds the limit
    LOOKS_SLOWER = "looks slower"  # UNDECIDED: measured above the limit, not beyond doubt
    CONDITIONS = "conditions"  # UNDECIDED: throttling, another process, a profiler or a changed device forbids a judgement
    MEASURED_DIFFERENTLY = "measured differently"
    """UNDECIDED: the baseline measured another kernel, in another mode or by another sampler, or moved another number of bytes."""
    TOO_FEW_RUNS = "too few runs"  # UNDECIDED: the baseline has too few runs to know how they differ
    OTHER_CARD_VARIANT = "other card variant"  # UNDECIDED: all of the baseline is of another variant of this card
    NOT_MEASURED = "not measured"  # UNDECIDED: this run has no measurement of the row
    SAME_CODE = "same code"
    """PASS: noisy, but each run that it is compared with ran the same machine code in the same way, and it does not look slower."""
    NO_BASELINE = "no baseline"  # NEW: the baseline holds no such row
    ACCEPTED = "accepted"  # NEW: a change of the row was accepted (`gpumem accept`), and no run since


class UserError(Exception):
    """Arguments or files that cannot be used: one line with the value, and what is accepted or the remedy. The exit code is 4."""


class NoAnswer(Exception):
    """A command that could do nothing of what was asked: one line with the cause and the remedy. The exit code is 6."""


class Exit(IntEnum):
    """Exit codes. 0 to 5 are pytest's."""

    FINE = 0
    FAILED = 1
    INTERRUPTED = 2
    INTERNAL_ERROR = 3  # python's own code for an exception, 1, would report a failure
    USAGE = 4
    NO_TESTS = 5
    NO_VERDICT = 6
    CTRL_C = 130  # a command of `gpumem` after Ctrl-C, as shells report it
    NOBODY_READS = 141  # the reader of the output ended, as shells report SIGPIPE


EXIT_CODES: Mapping[str, Mapping[Exit, str]] = {
    "pytest --gpumem": {
        Exit.FAILED: "a test fails, a requested file cannot be written, --gpumem-save or --gpumem-record fails, or the device changed "
        "under --gpumem-strict",
        Exit.USAGE: "before the first test: an option, a marker, the device, a baseline or a folder to write cannot be used, or a test is "
        "collected twice",
        Exit.NO_VERDICT: "--gpumem-l2-sweep swept nothing",
    },
    "bisect": {
        Exit.FAILED: "BAD is not slower or larger than GOOD",
        Exit.NO_VERDICT: "no single commit is proven; those that are left are listed",
    },
    "card": {
        Exit.FAILED: "a finding: the card is unlike its model, throttled, misconfigured or ageing",
        Exit.NO_VERDICT: "nothing could be measured, such as without a GPU",
    },
    "code": {
        Exit.FAILED: "a kernel does not compile, or exceeds a limit",
        Exit.NO_VERDICT: "the compiler is not installed, or the other revision cannot be compiled",
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
        Exit.NO_VERDICT: "nothing was measured, no row has a limit, or a row that BASE may have was compared with nothing; with --strict: "
        "a row is not a PASS of a real GPU",
    },
    "l2-sweep": {Exit.NO_VERDICT: "nothing was swept; the other codes are pytest's"},
    "merge": {
        Exit.FAILED: "a test failed in a shard, or a row fails among all of them",
        Exit.USAGE: "a shard is missing, or of another run",
    },
    "profile": {Exit.FAILED: "tests failed; the report is complete", Exit.NO_VERDICT: "no report was written"},
    "read": {Exit.NO_VERDICT: "a tool that reads the file is not installed"},
    "traffic": {Exit.FAILED: "a declaration is too large, or a count is beyond its limit", Exit.NO_VERDICT: "nothing could be counted"},
}
"""By command, the codes that mean something particular. All commands: 0 is fine, 3 an internal error, 4 wrong arguments or files."""
