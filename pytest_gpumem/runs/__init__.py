"""Runs of pytest in fresh processes: duets, repetitions, checkouts of other revisions."""
