"""Where tests with several ranks find what tests of one process have: the values of every field."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "config"))  # field_values
