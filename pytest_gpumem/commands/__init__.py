"""Commands of `gpumem`, one a file."""

from textwrap import fill

from pytest_gpumem.outcomes import EXIT_CODES


def examples(*lines: str) -> str:
    """The epilog of a command's help: calls that work, and the exit codes. click leaves paragraphs that begin with `\\b` as they are."""
    codes = EXIT_CODES.get(lines[0].split()[1], {})
    meanings = (fill(f"  {code:d}  {meaning}", 76, subsequent_indent=" " * 5) for code, meaning in codes.items())
    shown = "\n\n\b\nExit codes:\n" + "\n".join(meanings) if codes else ""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) + shown
