"""Imports of large libraries without repeated garbage collection of their objects and without unused packages.

PyTorch, DeepSpeed and Megatron-core create half a million objects that live until the process ends. Python traverses
them a dozen times during the import, a fifth of its time, and then at every full collection, a quarter of a second
each; DeepSpeed requests up to six while it builds an optimizer. Megatron-core (0.16.1, ``core/timers.py``,
``core/inference``, ``core/datasets``) imports trackers and a client of S3 where they are installed; what uses them in
Megatron-core is not used here.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("wandb", "torch.utils.tensorboard", "boto3")


@contextmanager
def frozen_imports() -> Iterator[None]:
    """No automatic garbage collection inside; objects that exist at the end are never collected (``gc.freeze``).

    An import of one of ``UNUSED`` fails inside with ``ImportError``, unless it has been imported before.
    """
    collects = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None: an import of the name fails
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()


def is_installed(package: str) -> bool:
    """Whether a package is installed; a mere folder of that name, as trackers create in the working folder, is not."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
