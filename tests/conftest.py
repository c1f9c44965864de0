"""What all tests share: no garbage collection while they are collected, and none of what they import afterwards."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """Objects that exist now live until the end: no collection visits them, here or in a fork, whose pages stay shared."""
    gc.freeze()
    gc.enable()
