"""The causes of a slow-down: evidence of base and head, and the rules that find causes in it."""
