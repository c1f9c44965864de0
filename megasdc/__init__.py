"""megasdc: pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware."""

import warnings
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


def __getattr__(name: str) -> Any:
    """``megasdc.attach`` and ``check_settings``, which need PyTorch and DeepSpeed: imported where they are used."""
    if name in ("attach", "check_settings"):
        from megasdc.attached import attach

        return getattr(attach, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
