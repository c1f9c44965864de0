"""Imports of large libraries without repeated garbage collection of their objects.

PyTorch, DeepSpeed and Megatron-core create half a million objects that live until the process ends. Python traverses
them a dozen times during the import, a fifth of its time, and then at every full collection, a quarter of a second
each; DeepSpeed requests up to six while it builds an optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["imports_kept"]


@contextmanager
def imports_kept() -> Iterator[None]:
    """No automatic garbage collection inside; objects that exist at the end are never collected (``gc.freeze``)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
