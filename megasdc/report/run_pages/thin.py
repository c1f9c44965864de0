"""Which points of a long series does a picture need? The smallest and largest of every stretch, and both ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 2000
"""Points of one curve in a picture, at most."""


def thin(values: NDArray[np.float64], limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """Choose points so that no peak is lost.

    The series is cut into stretches of equal length; of each its smallest and largest value stay, and one that is NaN
    or infinite, so that a gap stays one.

    Args:
        values: of the points, in order, [point].
        limit: points at most, >= 5.

    Returns:
        Places of the points that stay, rising; all where there are no more than ``limit``.
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
