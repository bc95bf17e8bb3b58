"""Why a test got slower: evidence of base and head, from processes and profilers or from files, held against the rules of `verdicts`."""
