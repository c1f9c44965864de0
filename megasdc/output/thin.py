"""Thinning of a long series for a picture: the smallest and largest value of every stretch, and both ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 2000
"""Maximum of points of one curve in a picture."""


def thin(values: NDArray[np.float64], limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """The ascending indices of at most ``limit`` (>= 5) points so that no peak is lost; all where there are no more.

    The series is cut into stretches of equal length; each keeps its smallest and largest value, and one that is NaN or
    infinite, so that gaps remain.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), (limit - 2) // 3):
        finite = np.isfinite(values[stretch])
        if not finite.all():
            kept.add(int(stretch[np.argmin(finite)]))
        if finite.any():
            whole = stretch[finite]
            kept.update((int(whole[values[whole].argmin()]), int(whole[values[whole].argmax()])))
    return np.array(sorted(kept), dtype=np.int64)
