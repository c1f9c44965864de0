"""Are the hooks of the toleranced checks gone after close?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megasdc.train.detection.toleranced import TolerancedChecks


def test_close_takes_hooks_away_also_before_the_start() -> None:
    """A run that fails before its first step closes too; later the check of updates is closed once."""
    checks = TolerancedChecks.__new__(TolerancedChecks)
    closed: list[int] = []
    update: Any = SimpleNamespace(close=lambda: closed.append(1))
    for checks._update, expected in ((None, []), (update, [1])):
        checks.close()
        assert closed == expected
