"""Outlier detection of gradient features, across replicas and against past steps, by robust statistics.

Features are compared as logarithms, because gradients vary by factors. Across replicas, a value's distance from their
median is divided by the usual such distance, the median over replicas and past steps. Against the past, the median
over replicas is compared with its own values in past steps, by their median and median absolute deviation. Both
scales have a lower limit relative to those of the other submodules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WINDOW = 32
"""Past steps that are used."""
NEEDED = 10
"""Past steps needed before scoring begins."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SCALE = 0.01
"""Lower limit of a scale, of a logarithm: changes of one percent are never unusual."""
LEAST_SHARE = 0.5
"""Lower limit of a submodule's scale over the median of all: a few steps may be close together by chance."""


@dataclass(frozen=True)
class Score:
    """The most unusual feature of a step.

    Args:
        value: its distance over the usual one.
        replica: of the feature; None: the median over replicas.
        submodule: index in the list.
        feature: index in the list.
    """

    value: float
    replica: int | None
    submodule: int
    feature: int


class Outliers:
    """Scores the features of all replicas at one position of the layout, step by step."""

    def __init__(self) -> None:
        self._centers: deque[Tensor] = deque(maxlen=WINDOW)
        self._spreads: deque[Tensor] = deque(maxlen=WINDOW)

    def score(self, features: Tensor) -> tuple[Score, Score] | None:
        """The most unusual feature across replicas, and against the past; then adds the step to the past.

        Args:
            features: [replicas, submodules, features], on the host, not negative, finite.

        Returns:
            None until there are ``NEEDED`` past steps.
        """
        logs = features.double().clamp_min(torch.finfo(torch.float32).tiny).log()
        center = logs.quantile(0.5, 0)
        distance = (logs - center).abs()
        found = None
        if (scales := self.scales()) is not None:
            middle = torch.stack(list(self._centers)).quantile(0.5, 0)
            found = (
                _worst(distance / scales[0], across=True),
                _worst(((center - middle).abs() / scales[1]).unsqueeze(0)),
            )
        self._centers.append(center)
        alone = len(logs) % 2 if len(logs) > 1 else 0  # with an odd number, one replica is the median itself
        self._spreads.append(distance.sort(0).values[alone:].quantile(0.5, 0))
        return found

    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The usual distances of logarithms, across replicas and from the past, each [submodules, features].

        Returns:
            None until there are ``NEEDED`` past steps.
        """
        if len(self._centers) < NEEDED:
            return None
        past = torch.stack(list(self._centers))
        deviation = (past - past.quantile(0.5, 0)).abs().quantile(0.5, 0)
        return _scale(torch.stack(list(self._spreads)).quantile(0.5, 0)), _scale(deviation)

    def state_dict(self) -> dict[str, Any]:
        """Statistics of past steps, in plain values."""
        return {
            "centers": [one.tolist() for one in self._centers],
            "spreads": [one.tolist() for one in self._spreads],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._centers = _restored(state["centers"])
        self._spreads = _restored(state["spreads"])


def _scale(deviations: Tensor) -> Tensor:
    """Scale of distances, from the median deviation of each [submodules, features]."""
    scale = NORMAL * deviations
    return scale.maximum(LEAST_SHARE * scale.quantile(0.5, 0)).clamp_min(LEAST_SCALE)


def _restored(rows: Sequence[Any]) -> deque[Tensor]:
    return deque((torch.tensor(row, dtype=torch.float64) for row in rows), maxlen=WINDOW)


def _worst(scores: Tensor, across: bool = False) -> Score:
    """The largest of [replicas, submodules, features]."""
    place = int(scores.argmax())
    replica, submodule, feature = (int(one) for one in torch.unravel_index(torch.tensor(place), scores.shape))
    return Score(float(scores.flatten()[place]), replica if across else None, submodule, feature)
