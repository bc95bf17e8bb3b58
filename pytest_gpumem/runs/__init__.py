"""Runs of pytest in fresh processes: duets, repetitions, checkouts of other revisions."""


class DuetError(Exception):
    """A duet that cannot run as requested: one line with the value and what is accepted."""
