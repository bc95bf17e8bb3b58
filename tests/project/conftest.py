"""The scripts of ci/ are no package: their folders go on the path, as the scripts put them there themselves."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "ci", ROOT / "ci" / "bench"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
