"""The examples of the README run as they stand there."""

from __future__ import annotations

from readme_examples import README, examples

for _example in examples():
    if _example.module is None:
        # With the README's own lines, so that a failure shows them.
        exec(compile("\n" * _example.line + _example.code, str(README), "exec"))
