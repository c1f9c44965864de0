"""What tests with several ranks share: DeepSpeed's device, and the values of every field of tests of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fused_switch import apply_fused_switch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.append(str(Path(__file__).parents[1] / "unit" / "config"))  # field_values
apply_fused_switch()
