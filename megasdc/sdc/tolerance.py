"""Thresholds of checks that are not exact, measured on clean steps of the run.

Such a check warns; it proves nothing about a rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

MEASURED = 10
"""Values needed before there is a threshold; these are not judged."""
KEPT = 64
"""Number of newest clean values from which the threshold is computed."""


class Tolerance:
    """Judges the values of one check, one a step.

    The threshold is a multiple of the upper quartile of the last clean values, so that one outlier among them does not
    make the check insensitive. Values above the threshold are not added.

    Args:
        factor: multiple of the upper quartile.
        floor: lower limit of the threshold: what rounding alone may cause.
    """

    def __init__(self, factor: float, floor: float) -> None:
        self._factor = factor
        self._floor = floor
        self._clean: deque[float] = deque(maxlen=KEPT)

    @property
    def threshold(self) -> float | None:
        """Values above it are unusual; None: not measured yet."""
        if len(self._clean) < MEASURED:
            return None
        ordered = sorted(self._clean)
        return max(self._floor, self._factor * ordered[3 * len(ordered) // 4])

    def judge(self, value: float) -> bool:
        """Whether a value is unusual; a usual finite value is added to the clean ones.

        Args:
            value: not negative; NaN is unusual.
        """
        threshold = self.threshold
        if threshold is not None and not value <= threshold:
            return True
        if math.isfinite(value):
            self._clean.append(value)
        return False

    def state_dict(self) -> list[float]:
        """The clean values."""
        return list(self._clean)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore the clean values."""
        self._clean = deque(state, maxlen=KEPT)
