"""Projects of their own, run from copies by the tests of the tutorial: nothing here belongs to this suite."""

collect_ignore_glob = ["*"]
