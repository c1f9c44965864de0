"""A model of submodules whose right results are far apart: narrow norms, casts inside, choices that rounding tips."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NarrowNorm(nn.Module):
    """An RMSNorm each of whose operations rounds to the type of what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, given: Tensor) -> Tensor:
        """Of the last dimension."""
        return given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class InnerCast(nn.Module):
    """A function that is computed in bf16, whatever it is given."""

    def forward(self, given: Tensor) -> Tensor:
        """Of each element."""
        narrow = given.bfloat16()
        return (narrow * torch.sigmoid(narrow) * narrow).to(given.dtype)


class InnerAutocast(nn.Module):
    """A layer with mixed precision of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * width**-0.5)

    def forward(self, given: Tensor) -> Tensor:
        """In bf16."""
        with torch.autocast(given.device.type, torch.bfloat16):
            return F.linear(given, self.weight).to(given.dtype)


class Step(nn.Module):
    """A step function of sums that cancel, so that rounding alone says on which side they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * width**-0.5)

    def forward(self, given: Tensor) -> Tensor:
        """What it is given, or one more."""
        sums = F.linear(torch.cat((given, given), -1), torch.cat((self.weight, -self.weight), -1))
        return (sums > 0).to(given.dtype) + given


class OwnCode(nn.Module):
    """A model of these submodules one after the other, for tokens."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.words, self.norm, self.cast = nn.Embedding(vocab, width), NarrowNorm(width), InnerCast()
        self.mixed, self.step, self.head = InnerAutocast(width), Step(width), nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        """The loss."""
        hidden = self.step(self.mixed(self.cast(self.norm(self.words(input_ids)))))
        return {"loss": F.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())}
