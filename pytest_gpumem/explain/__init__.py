"""Why a test got slower: evidence of base and head, and the rules that find causes in it."""
