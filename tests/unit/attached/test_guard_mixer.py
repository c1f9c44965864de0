"""Is a fault in a function that no submodule computes found by the submodule around it, and no healthy rank named?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megasdc.attached.batch_replayer import Batch, SentTensor
from megasdc.sdc.verdict import OWN_CODE
from tools.trainings.engines import PERSISTENT, SDPA, Planted, wrong_attention
from tools.trainings.pair import Judged, Side, judge_pair

TOKENS, WIDTH, HEADS = 12, 32, 4


class _Mixer(nn.Module):
    """Mixes tokens; its name says nothing of what it computes, so that its own results are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        """Of all tokens before."""
        parts = self.three(given).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Model(nn.Module):
    """Two of them, around which something is added."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixers = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(_Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        """A loss."""
        found = self.words(given)
        for one in self.mixers:
            found = found + one(found)
        return {"loss": self.head(found).float().square().mean()}


def _judged(kind: torch.dtype, seed: int, around: Any) -> Judged | None:
    sides = []
    tokens = torch.randint(0, TOKENS, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    for rank in range(2):
        torch.manual_seed(seed)
        batch = Batch((), {"given": SentTensor(tokens, False, True)}, None, {})
        sides.append(Side(rank, _Model().to(kind), batch, *([around] if rank else [])))
    return judge_pair((sides[0], sides[1]))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_wrong_function_is_named_by_what_is_around_it(kind: torch.dtype, phase: str) -> None:
    """By the code of the submodule that calls it, in fp64."""
    planted = Planted(1, SDPA, phase, PERSISTENT, 4, "row")
    judged = _judged(kind, 3, partial(wrong_attention, planted))
    assert judged is not None and judged.named == [1], judged and judged.opinion.reason
    assert judged.opinion.basis == OWN_CODE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_of_two_kernels_of_it_neither_is_named(kind: torch.dtype) -> None:
    """Both are right; they round otherwise."""
    for seed in range(4):
        judged = _judged(kind, seed, partial(sdpa_kernel, SDPBackend.MATH))
        assert judged is not None and not judged.named, seed
