"""Recorded latencies, read from a NumPy file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megasdc.common.errors import DataError


def load_latencies(path: Path) -> NDArray[np.float64]:
    """Reads seconds from a file of NumPy's format (``.npy``).

    Args:
        path: an array [replica, step, micro-batch], or [replica, step, micro-batch, stage].

    Returns:
        Seconds, [replica, step, micro-batch, stage].

    Raises:
        DataError: it cannot be read, has another shape, or holds a value that is negative or not finite.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}; write it with numpy.save") from error
    if not isinstance(array, np.ndarray) or array.ndim not in (3, 4) or 0 in array.shape:
        shape = getattr(array, "shape", "an archive")
        raise DataError(
            f"{path} has the shape {shape}, needed [replica, step, micro-batch] with or without a fourth axis of stages"
        )
    if array.dtype.kind not in "fiu":
        raise DataError(f"{path} holds {array.dtype}, needed numbers of seconds")
    seconds = array.astype(np.float64)
    wrong = np.argwhere(~(np.isfinite(seconds) & (seconds >= 0)))
    if len(wrong):
        place = [int(i) for i in wrong[0]]
        raise DataError(f"{path} has {seconds[tuple(wrong[0])]} at {place}, needed finite seconds >= 0")
    return seconds if seconds.ndim == 4 else seconds[..., None]
