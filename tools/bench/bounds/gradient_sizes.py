"""Sizes of a healthy run's gradients: histograms of |g| and of g^2 / V, and the threshold that few exceed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.config.hooks import ABSOLUTE, BOUNDS, SPIKE_AWARE
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.optim.zero1 import owned_fragments

LOWEST, HIGHEST, PER_DECADE = -40, 40, 50
"""Decades of a histogram, and its bins in each: one is 4.7 % wide."""


class SizeHistogram:
    """Counts magnitudes in logarithmic bins; zeros count as elements that exceed nothing."""

    def __init__(self) -> None:
        self.counts = torch.zeros((HIGHEST - LOWEST) * PER_DECADE, dtype=torch.float64)
        self.elements = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor, elements: int) -> None:
        """Count values, [n], not negative, of at least n elements, the others of which exceed nothing.

        Sync: waits for the device.
        """
        decades = values[values > 0].double().log10().clamp(LOWEST, HIGHEST).cpu()
        self.counts += torch.histc(decades, self.counts.numel(), LOWEST, HIGHEST)
        self.elements += elements

    def exceeded_by(self, share: float) -> float:
        """The lowest bin's edge that at most a share, in [0, 1], of all elements exceeds, rounded to two digits."""
        above = self.counts.flip(0).cumsum(0).flip(0)  # elements in a bin or in a higher one
        bins = int((above > share * self.elements).sum())
        return float(f"{10 ** (LOWEST + bins / PER_DECADE):.1e}")


class GradientSizes(Hook):
    """Counts the sizes of reduced gradients before they are clipped, in every ``interval`` steps from ``first_step``.

    It only reads.
    """

    def __init__(self, first_step: int, interval: int) -> None:
        self._first, self._interval = first_step, interval
        self.of = {kind: SizeHistogram() for kind in BOUNDS}
        """By kind of bound what it compares with its threshold: |g|, or g^2 / V where V is not 0."""

    @torch.no_grad()
    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Count the owned shards of this step."""
        step = engine.step_number
        if step < self._first or (step - self._first) % self._interval:
            return
        for fragment in owned_fragments(engine.optimizer):
            if fragment.gradient is None:
                continue
            sizes = fragment.gradient.double().abs()
            moment = fragment.states(engine.optimizer)["exp_avg_sq"].double()
            has_history = moment > 0
            self.of[ABSOLUTE].add(sizes, sizes.numel())
            self.of[SPIKE_AWARE].add(sizes[has_history] ** 2 / moment[has_history], sizes.numel())

    def reduce(self) -> None:
        """Add the counts of all ranks.

        Collective: all ranks of the world.
        """
        for histogram in self.of.values():
            dist.all_reduce(histogram.counts)
            dist.all_reduce(histogram.elements)
