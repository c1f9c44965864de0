"""What all tests share: no garbage collection while they are collected, and none of what they import afterwards."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """No collection visits what exists now, which lives until the end, here or in forks, which share its pages."""
    gc.freeze()
    gc.enable()
