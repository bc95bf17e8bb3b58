"""Drawing rows for people."""
