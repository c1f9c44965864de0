"""What is minimised? Cross-entropy of the next token over a vocabulary that is split over tensor ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TokenLoss:
    """Sum of the losses of the used tokens, divided by the planned number of tokens b s.

    Dividing by a constant keeps the gradients of micro-batches comparable; the engine turns sums into means over the
    tokens that were really used. Columns that pad the vocabulary are taken out of the softmax, so that the loss does
    not depend on the padding.

    Args:
        vocab_size: entries of the vocabulary that are real.
        padded_vocab_size: entries with padding, v.
        tp_rank: tensor rank.
        tensor: tensor-parallel size.
    """

    __name__ = "token_loss"

    def __init__(self, vocab_size: int, padded_vocab_size: int, tp_rank: int, tensor: int) -> None:
        columns = padded_vocab_size // tensor
        self.real_columns = max(0, min(columns, vocab_size - tp_rank * columns))
        self.columns = columns
        self.tensor = tensor

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the loss of one micro-batch.

        Args:
            logits: [s, b, v/tp].
            labels_and_mask: labels [b, s] int64 and mask [b, s] float32, 0 where a token is not used.

        Returns:
            scalar, fp32.

        Collective: the tensor group.
        """
        labels, mask = labels_and_mask
        return (self.per_token(logits, labels) * mask).sum() / labels.numel()

    def per_token(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of every token.

        Args:
            logits: [s, b, v/tp].
            labels: [b, s].

        Returns:
            [b, s], fp32.

        Collective: the tensor group.
        """
        logits, labels = logits.float(), labels.transpose(0, 1)
        if self.tensor == 1:  # one fused pass where the whole vocabulary is here
            if self.real_columns < self.columns:
                logits = logits[..., : self.real_columns]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return loss.view_as(labels).transpose(0, 1)
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if self.real_columns < self.columns:
            padding = torch.arange(self.columns, device=logits.device) >= self.real_columns
            logits = logits.masked_fill(padding, torch.finfo(torch.float32).min)
        return vocab_parallel_cross_entropy(logits, labels.contiguous()).transpose(0, 1)
