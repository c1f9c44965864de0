"""megasdc: pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware."""

import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Megatron-core 0.16 warns at every import and build of what no user of megasdc can change: optional GPU libraries that
# are absent (which backend runs is our own setting), its own old defaults, and torch's new names for collectives.
for _message in (
    r".*Apex (is|are) not installed",
    r"full scope is deprecated",
    r".*CUDA_DEVICE_MAX_CONNECTIONS",
    r".*torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)",
):
    warnings.filterwarnings("ignore", message=_message)


_PUBLIC = {
    "attach": "megasdc.api",
    "check_settings": "megasdc.attached.attach",
    "compare": "megasdc.api",
    "Field": "megasdc.parallel.collectives",
    "GradientHook": "megasdc.optim.hooks",
    "GradientPart": "megasdc.optim.hooks",
    "Hook": "megasdc.engine.hooks",
    "load_weights": "megasdc.api",
    "read_events": "megasdc.events",
    "read_sweep": "megasdc.lab.sweeps.results",
}
"""Modules of the names for users' programs, by name: imported where they are used, since some need PyTorch."""


def __getattr__(name: str) -> Any:
    """One of the public names."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Train(ModuleType):
    """Module of the room ``megasdc.train``, which is called as a function, too: ``megasdc.train(config)``."""

    def __call__(self, config: Any, **options: Any) -> Any:
        """Train; arguments, result and errors are those of ``megasdc.api.train``."""
        return import_module("megasdc.api").train(config, **options)


# Python gives the folder's name to its module, whatever was there before.
import_module("megasdc.train").__class__ = _Train
