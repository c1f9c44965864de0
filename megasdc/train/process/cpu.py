"""Threads and memory of a rank that computes on the processor."""

from __future__ import annotations

import torch

from megasdc.train.process.heap import keep_freed_memory


def prepare_cpu(threads: int) -> None:
    """On a machine without an accelerator, set this rank's CPU threads and keep freed memory in the process.

    Args:
        threads: 0 leaves PyTorch's choice.
    """
    if torch.cuda.is_available():
        return
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
