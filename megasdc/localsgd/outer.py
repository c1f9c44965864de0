"""How replicas of Local-SGD bring their weights together at the end of a round.

Every replica computes the same from the same weights, in fp64 and in the order of replicas, and rounds once: so all
have equal bits, whatever the order in which weights have come.

- ``average``: the mean of the master weights, each weighted by the tokens that its replica has used in the round; with
  equal weights that of Lin, Stich, Patel, Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217).
- ``nesterov``: the outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105, Algorithm 1): the outer gradient
  d is the agreed weights before the round minus that mean; b <- momentum b + d; the agreed weights then move by
  -lr (d + momentum b), as ``torch.optim.SGD`` with ``nesterov`` moves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 20
"""Number of elements that are computed at once, in fp64."""


@dataclass(frozen=True)
class OuterRule:
    """How weights are brought together.

    Args:
        nesterov: whether the outer optimizer is DiLoCo's; else weights are averaged.
        lr: outer learning rate.
        momentum: outer momentum, in [0, 1).
    """

    nesterov: bool = False
    lr: float = 0.7
    momentum: float = 0.9


class Agreed:
    """Weights on which all replicas agree, and the outer optimizer's momentum: this rank's shard of both.

    Args:
        weights: flat fp32 partitions, [n] each, as they are before the first round; copied.

    Attributes:
        weights: after the last round, [n] each.
        momentum: of the outer optimizer, in the shapes of ``weights``; empty with ``average``.
    """

    def __init__(self, weights: Sequence[Tensor], rule: OuterRule) -> None:
        self._rule = rule
        self.weights = [one.detach().clone() for one in weights]
        self.momentum = [torch.zeros_like(one) for one in self.weights] if rule.nesterov else []

    @property
    def tensors(self) -> list[Tensor]:
        """All that another replica needs to go on from here, in an order that is the same on all."""
        return [*self.weights, *self.momentum]

    @torch.no_grad()
    def update(self, masters: Mapping[int, Sequence[Tensor]], tokens: Mapping[int, int]) -> None:
        """Bring the weights of a round together.

        Args:
            masters: flat fp32 partitions at the end of the round, by replica, each of the shapes of ``weights``.
            tokens: number of tokens that each of these replicas has used in the round, at least one of them above 0.
        """
        order = sorted(masters)
        total = sum(tokens[replica] for replica in order)
        if total <= 0:
            raise ValueError(f"replicas {order} have used {total} tokens in a round, needed at least 1")
        for index, agreed in enumerate(self.weights):
            for start in range(0, agreed.numel(), PIECE):
                piece = slice(start, start + PIECE)
                mean = torch.zeros_like(agreed[piece], dtype=torch.float64)
                for replica in order:
                    mean += masters[replica][index][piece].to(mean.device).double() * tokens[replica]
                mean /= total
                agreed[piece] = self._step(index, piece, mean) if self._rule.nesterov else mean.float()

    def _step(self, index: int, piece: slice, mean: Tensor) -> Tensor:
        before, momentum = self.weights[index][piece].double(), self.momentum[index][piece]
        gradient = before - mean
        momentum.copy_(momentum.double() * self._rule.momentum + gradient)
        moved = gradient + momentum.double() * self._rule.momentum
        return (before - moved * self._rule.lr).float()


@torch.no_grad()
def distance(weights: Sequence[Tensor], agreed: Sequence[Tensor]) -> tuple[float, bool]:
    """Sum of squares of an outer gradient in this rank's shard, in fp64, and whether all of its weights are finite.

    Sync: waits for the device.
    """
    total, finite = 0.0, True
    for one, before in zip(weights, agreed, strict=True):
        for start in range(0, one.numel(), PIECE):
            piece = slice(start, start + PIECE)
            moved = float(((one[piece].double() - before[piece].double()) ** 2).sum())
            total, finite = total + moved, finite and moved < float("inf")
    return total, finite
