"""Are parameters that several operations use told from those whose gradient is of one?"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megasdc.attached.batch_replayer import count_uses


class _Model(nn.Module):
    """Layers that are used once, twice, by a function beside their module, in a penalty, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.once, self.kept = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.twice, self.penalty, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss."""
        x = self.once(self.words(ids))
        x = checkpoint(self.kept, x, use_reentrant=False)
        x = self.twice(torch.tanh(self.twice(x)))
        x = self.norm(self.penalty(x))
        return functional.linear(x, self.words.weight).logsumexp(-1).mean() + self.penalty.weight.square().sum()


def test_gradients_of_one_operation_are_told() -> None:
    """Also with automatic mixed precision, which keeps one cast of a weight for all its uses."""
    torch.manual_seed(1)
    for mixed in (False, True):
        model = _Model()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(torch.randint(0, 16, (3, 5)))
        named = dict(model.named_parameters())
        once = {"once.weight", "once.bias", "kept.weight", "norm.weight", "norm.bias", "penalty.bias"}
        uses = count_uses([loss], named)
        assert {name for name, count in uses.items() if count == 1} == once
        assert (uses["words.weight"], uses["twice.weight"], uses["unused.weight"]) == (2, 2, 0)
