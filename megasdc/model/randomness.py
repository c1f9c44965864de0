"""Random numbers that do not depend on the layout: initial weights and dropout masks.

Initial weights: each layer of the pipeline is built under a seed of its own, derived from the run's seed and the
layer's index, so a weight is the same whichever rank holds it. Dropout: every mask is drawn from a generator seeded by
(seed, step, index of the sample in the global batch, layer, site), so a mask is the same whichever replica, stage or
tensor rank applies it, and the same again when the layer is recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash integers to 63 bits with the finaliser of SplitMix64.

    Source: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators, OOPSLA, with Stafford's constants.
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextlib.contextmanager
def seeded_build(seed: int, layer: int) -> Iterator[None]:
    """Context to build a layer under its own seed; the CPU generator is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, layer))
        yield


class DropoutStreams:
    """Generators for the dropout masks of the current micro-batch, seeded by the run's seed.

    The engine calls ``enter`` before each forward and backward pass; modules call ``keep_masks``.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._step = 0
        self._samples: tuple[int, ...] = ()

    def enter(self, step: int, samples: tuple[int, ...]) -> None:
        """Set the micro-batch for which masks are drawn.

        Args:
            step: optimizer step, first is 1.
            samples: index of each sample in the global batch, [b].
        """
        self._step, self._samples = step, samples

    def keep_masks(
        self, shape: tuple[int, ...], prob: float, layer: int, site: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Dropout masks, [b, *shape], of type and device of ``like``: 0 for dropped elements, 1 / (1 - prob) for the
        others.

        ``shape``: of one sample's mask; ``prob`` in [0, 1); ``layer``: index in the whole model; ``site``: number of
        the dropout site in the layer.
        """
        if not self._samples:
            raise RuntimeError("dropout masks were requested before a micro-batch was entered")
        generator = torch.Generator(device=like.device)
        masks = torch.empty((len(self._samples), *shape), dtype=torch.float32, device=like.device)
        for mask, sample in zip(masks, self._samples, strict=True):
            generator.manual_seed(mix(self.seed, self._step, sample, layer, site))
            mask.bernoulli_(1.0 - prob, generator=generator)
        return masks.mul_(1.0 / (1.0 - prob)).to(like.dtype)
