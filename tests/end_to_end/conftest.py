"""What tests of the real launcher share with those of several ranks: the helpers of their folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # harness
