"""Commands of `gpumem`, one a file."""


def examples(*lines: str) -> str:
    """The epilog of a command's help: calls that work as they stand. click fills up paragraphs, but not those that begin with `\\b`."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
