"""Imports of large libraries without repeated garbage collection of their objects, and without what they do not need.

PyTorch, DeepSpeed and Megatron-core create half a million objects that live until the process ends. Python traverses
them a dozen times during the import, a fifth of its time, and then at every full collection, a quarter of a second
each; DeepSpeed requests up to six while it builds an optimizer. Megatron-core (0.16.1) imports W&B, wherever that is
installed, for its inference engine: a quarter of the processor time of a rank's imports.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LEFT_OUT = ("wandb",)
"""Optional packages; whoever does need one imports it later."""


@contextmanager
def imports_kept() -> Iterator[None]:
    """No automatic garbage collection inside; objects that exist at the end are never collected (``gc.freeze``).

    Packages of ``LEFT_OUT`` are not found inside, unless they were imported before.
    """
    collects = gc.isenabled()
    gc.disable()
    leave_out()
    try:
        yield
    finally:
        allow()
        gc.freeze()
        if collects:
            gc.enable()


def leave_out() -> None:
    """Have imports of ``LEFT_OUT`` fail from now on, as where they are not installed."""
    for name in LEFT_OUT:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type] # how Python notes that there is none


def allow() -> None:
    """Let packages of ``LEFT_OUT`` be imported again."""
    for name in LEFT_OUT:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


def is_installed(package: str) -> bool:
    """Whether a package is installed; a mere folder of that name, as trackers create in the working folder, is not."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
