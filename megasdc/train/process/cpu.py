"""Threads and memory of a rank that computes on the processor.

Heap settings of a CPU rank: freed memory stays with the process, so that the next step need not request it again.

glibc returns blocks of more than 32 MiB to the system when they are freed, and the free top of the heap too. Every
step then makes the kernel map and clear the same gigabytes again, page by page, which takes as long as several passes
over them. Environment settings (``MALLOC_*``, ``GLIBC_TUNABLES``) and other allocators take precedence.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch

KEPT_BYTES = 2**30
"""Freed blocks up to this size, and a free heap top up to this size, are kept."""
OLDER_KEPT_BYTES = 2**25
"""The largest block size that glibc before 2.36 accepts."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep freed memory; call it before large tensors are allocated.

    Returns whether the allocator took the settings; False with settings of the user's or without glibc.
    """
    if "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) != 1:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, kept) == 1 for kept in (KEPT_BYTES, OLDER_KEPT_BYTES))


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
