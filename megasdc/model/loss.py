"""Training loss: cross-entropy of the next token over a vocabulary that is split over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Observe = Callable[[str, Tensor], None]
"""Called with the name of a rank's own intermediate result and the result, before a collective mixes ranks."""


class TokenLoss:
    """Sum of the losses of unmasked tokens, divided by the fixed number of tokens b s.

    Dividing by a constant keeps the gradients of micro-batches comparable; the engine turns sums into means over the
    unmasked tokens. Padding columns of the vocabulary are excluded from the softmax, so that the loss does not depend
    on the padding.

    Args:
        vocab_size: entries of the vocabulary without padding.
        padded_vocab_size: entries with padding, v.
        tensor: tensor-parallel size.
        fuse: whether the gradient is computed in the forward pass, by compiled functions.
    """

    __name__ = "token_loss"

    def __init__(self, vocab_size: int, padded_vocab_size: int, tp_rank: int, tensor: int, fuse: bool = False) -> None:
        columns = padded_vocab_size // tensor
        self.real_columns = max(0, min(columns, vocab_size - tp_rank * columns))
        self.columns = columns
        self.first_column = tp_rank * columns
        self.tensor = tensor
        self.fuse = fuse
        self.tap: Callable[[Tensor], Tensor] | None = None
        self.observe: Observe | None = None

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """Loss of one micro-batch: a scalar, fp32.

        Args:
            logits: [s, b, v/tp].
            labels_and_mask: labels [b, s] int64 and mask [b, s] float32, 0 for unused tokens.

        Collective: the tensor group.
        """
        labels, mask = labels_and_mask
        if self.tap is not None:
            logits = self.tap(logits)
        loss = self.per_token(logits, labels)
        if self.observe is not None:
            self.observe("output", loss)
        return (loss * mask).sum() / labels.numel()

    def per_token(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token, [b, s] fp32, of logits [s, b, v/tp] and labels [b, s].

        Collective: the tensor group.
        """
        if self.fuse:
            return self._fused(logits, labels.transpose(0, 1)).transpose(0, 1)
        logits, labels = logits.float(), labels.transpose(0, 1)
        if self.tensor == 1:  # one fused pass if the whole vocabulary is on this rank
            if self.real_columns < self.columns:
                logits = logits[..., : self.real_columns]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return loss.view_as(labels).transpose(0, 1)
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        if self.real_columns < self.columns:
            padding = torch.arange(self.columns, device=logits.device) >= self.real_columns
            logits = logits.masked_fill(padding, torch.finfo(torch.float32).min)
        group = get_tensor_model_parallel_group()
        loss = VocabParallelCrossEntropy.apply(logits, labels, self.first_column, group, self.observe)
        return loss.transpose(0, 1)

    def _fused(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token, [s, b]; the logits are overwritten unless they are observed."""
        from megasdc.model.fused_loss import parallel_token_losses, token_losses

        overwrite = self.tap is None and self.observe is None and not logits.is_leaf
        what = (logits.contiguous().flatten(0, 1), labels.flatten(), self.real_columns, overwrite)
        if self.tensor == 1:
            return token_losses(*what).view_as(labels)
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        observe = self.observe
        shown = None if observe is None else lambda name, value: observe(name, value.view_as(labels))
        group = get_tensor_model_parallel_group()
        return parallel_token_losses(*what, self.first_column, group, shown).view_as(labels)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy over logits whose columns are split over the ranks of a group.

    Each rank's own maximum, sum and predicted logit can be observed before they are reduced; Megatron-core's function
    exposes only the reduced values, and overwrites its input.

    Collective: the group, in forward only.
    Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first_column: int,
        group: dist.ProcessGroup,
        observe: Observe | None,
    ) -> Tensor:
        """Loss of every token, [s, b] fp32, of logits [s, b, v/tp] fp32 and labels [s, b] over the whole vocabulary.

        ``first_column``: index of this rank's first column in the vocabulary. ``observe`` is None, or called with
        ``maximum``, ``predicted`` and ``sum``, each [s, b], before they are reduced.
        """
        observe = observe or (lambda name, value: None)
        maximum = logits.amax(-1)  # subtracted before exp, which then cannot overflow
        observe("maximum", maximum)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        column = labels - first_column
        elsewhere = (column < 0) | (column >= logits.shape[-1])
        column = column.masked_fill(elsewhere, 0).unsqueeze(-1)
        predicted = shifted.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0.0)
        observe("predicted", predicted)
        exponentials = shifted.exp_()
        total = exponentials.sum(-1)
        observe("sum", total)
        dist.all_reduce(predicted, group=group)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, elsewhere)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Softmax minus one at the label, times the gradient of the loss, [s, b, v/tp]."""
        softmax, column, elsewhere = ctx.saved_tensors
        ones = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        gradient = softmax.scatter_add_(-1, column, -ones)  # in place: autograd refuses a second backward
        return gradient.mul_(gradients[0].unsqueeze(-1)), None, None, None, None
