"""Which values of a check are usual in this run? A threshold measured on clean steps, for checks that are not exact.

Such a check warns; it proves nothing about a rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

MEASURED = 10
"""Values after which a threshold is known; none of them is judged."""
KEPT = 64
"""Newest clean values that a threshold is measured on."""


class Tolerance:
    """Judges the values of one check, one a step.

    The threshold is a multiple of the upper quartile of the last clean values, so that one odd step among those that
    are measured does not make a check blind. A value above it is not one of them.

    Args:
        factor: how many times the upper quartile is unusual.
        floor: least threshold: what the arithmetic alone may do.
    """

    def __init__(self, factor: float, floor: float) -> None:
        self._factor = factor
        self._floor = floor
        self._clean: deque[float] = deque(maxlen=KEPT)

    @property
    def threshold(self) -> float | None:
        """Values above it are warned of; None: not measured yet."""
        if len(self._clean) < MEASURED:
            return None
        ordered = sorted(self._clean)
        return max(self._floor, self._factor * ordered[3 * len(ordered) // 4])

    def judge(self, value: float) -> bool:
        """Whether a value is unusual; learn from it if not.

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
        """Take up clean values."""
        self._clean = deque(state, maxlen=KEPT)
