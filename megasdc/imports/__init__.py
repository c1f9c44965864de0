"""How are large libraries imported without being searched for garbage again and again?

PyTorch, DeepSpeed and Megatron-core make half a million objects that stay until the process ends. Python looks through
them a dozen times while they are imported, a fifth of that time, and then at every full collection, a quarter of a
second each; DeepSpeed asks for up to six while it builds an optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["imports_kept"]


@contextmanager
def imports_kept() -> Iterator[None]:
    """Collect nothing inside, and never look at what is there at the end of it again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
