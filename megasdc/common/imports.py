"""Imports of large libraries without repeated garbage collection of their objects.

PyTorch, DeepSpeed and Megatron-core create half a million objects that live until the process ends. Python traverses
them a dozen times during the import, a fifth of its time, and then at every full collection, a quarter of a second
each; DeepSpeed requests up to six while it builds an optimizer.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager


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


def is_installed(package: str) -> bool:
    """Whether a package is installed; a mere folder of that name, as trackers create in the working folder, is not."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
