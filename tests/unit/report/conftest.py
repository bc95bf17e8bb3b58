from __future__ import annotations

import sys
from pathlib import Path

# Result files are written as for the other command that reads them.
FILES = str(Path(__file__).parents[1] / "compare")
if FILES not in sys.path:
    sys.path.append(FILES)
