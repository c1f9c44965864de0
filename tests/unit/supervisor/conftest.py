"""What tests of supervision share: checkpoints written without an engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
