"""Mean of the factors by which steps were clipped, so that a second moment of clipped gradients can be read without.

Adam's V averages gradients after the clip of the norm. A gradient that is bounded before the norm is not clipped yet,
so eq. 1 of Pei et al. (IEEE Micro 2025, 10.1109/MM.2025.3642709), g^2 / V > theta, would compare unlike things: with
steps clipped by a factor c it acts as theta c^2. V divided by the mean of c^2, with the weights that V gives its steps,
is the mean of unclipped g^2, weighted by c^2: exactly what V would be if c or g^2 did not change.
"""

from __future__ import annotations

from dataclasses import dataclass


def clip_factor(norm: float, largest: float) -> float:
    """Factor by which DeepSpeed's ZeRO-1 optimizers clip a gradient of this norm; ``largest`` 0: no clip."""
    return min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0


@dataclass
class ClipFactors:
    """Weighted mean of squared clip factors of the steps in a second moment.

    Args:
        beta: beta2 of the moment.
        squares: sum of c^2 by weight.
        weight: sum of weights, 0 before the first step, near 1 after many.
    """

    beta: float
    squares: float = 0.0
    weight: float = 0.0

    def add(self, factor: float) -> None:
        """Count a step that the optimizer took, clipped by this factor."""
        self.squares = self.beta * self.squares + (1 - self.beta) * factor**2
        self.weight = self.beta * self.weight + (1 - self.beta)

    def clear(self) -> None:
        """The moment was set to 0."""
        self.squares = self.weight = 0.0

    @property
    def unclipping(self) -> float:
        """What V is multiplied by to be one of unclipped gradients; 1 without clip, and before the first step."""
        return self.weight / self.squares if self.squares > 0 else 1.0
