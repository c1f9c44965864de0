"""Top-1 predictions of an evaluation, over a vocabulary that is sharded over tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.model.loss import TokenLoss


@contextmanager
def top_predictions(loss: TokenLoss | None) -> Iterator[list[Tensor]]:
    """Collects the predictions of every micro-batch that is evaluated inside.

    Args:
        loss: of the last stage; None on other stages, where none are collected.

    Yields:
        A list that receives a tensor per micro-batch, [b, s], int64, on the host; equal on all ranks of a tensor group.

    Collective: the tensor group, at each micro-batch.
    """
    found: list[Tensor] = []
    if loss is None:
        yield found
        return

    def tap(logits: Tensor) -> Tensor:
        found.append(top_tokens(logits, loss).transpose(0, 1).cpu())
        return logits

    before, loss.tap = loss.tap, tap
    try:
        yield found
    finally:
        loss.tap = before


def top_tokens(logits: Tensor, loss: TokenLoss) -> Tensor:
    """The most likely tokens, [s, b], int64, of logits [s, b, v/tp]; of equal ones that of the lowest tensor rank.

    ``loss`` knows this rank's columns. The result is the same on all ranks of the tensor group.

    Collective: the tensor group.
    """
    real = torch.arange(loss.columns, device=logits.device) < loss.real_columns
    value, column = logits.detach().float().masked_fill(~real, -torch.inf).max(-1)
    token = column + loss.first_column
    if loss.tensor == 1:
        return token
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    values = [torch.empty_like(value) for _ in range(loss.tensor)]
    tokens = [torch.empty_like(token) for _ in range(loss.tensor)]
    dist.all_gather(values, value, group=group)
    dist.all_gather(tokens, token, group=group)
    best = torch.stack(values).argmax(0, keepdim=True)
    return torch.stack(tokens).gather(0, best).squeeze(0)
