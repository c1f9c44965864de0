"""Memory that a CPU rank frees stays with its process, so that the next step does not ask the system for it again.

glibc gives blocks of more than 32 MiB back to the system when they are freed, and a free end of the heap too. Every
step then makes the kernel map and clear the same gigabytes anew, page by page, which takes as long as several passes
over them. Settings of the environment (``MALLOC_*``, ``GLIBC_TUNABLES``) and other allocators have the first word.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

KEPT_BYTES = 2**30
"""Blocks up to this size, and so much of a free end of the heap, are kept."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees; call it before large tensors are made.

    Args:
        environment: whose settings are left as they are.

    Returns:
        Whether the allocator took the settings; False with settings of the user's or without glibc.
    """
    if "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, KEPT_BYTES) == 1 for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
