"""Training loss: cross-entropy of the next token over a vocabulary that is split over tensor ranks.

Cross-entropy that computes the gradient of the logits in the forward pass, in chunks of tokens.

A chunk's logits stay in the CPU cache from their maximum to their gradient, and fp32 values exist for one chunk only.
The gradient overwrites the logits if nothing else reads them; the backward only scales it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasdc.model.fused import Compiled

Observe = Callable[[str, Tensor], None]
"""Function of the name of a rank's own intermediate result and the result, before a collective mixes ranks."""


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


CHUNK_BYTES = {"cpu": 2**19, "cuda": 2**26}
"""Bytes of a chunk's logits: half of a typical L2 cache; on a GPU enough to keep it busy."""
FP16_FACTOR = 2.0**15
"""Factor on fp16 gradients, so that small probabilities are not subnormal; a power of two, undone in the backward."""


def token_losses(logits: Tensor, labels: Tensor, real_columns: int, overwrite: bool) -> Tensor:
    """Loss of every token, [t] fp32, of logits [t, v] and labels [t], if the whole vocabulary is on this rank.

    Columns from ``real_columns`` on are padding: they do not contribute and get zero gradient. With ``overwrite`` the
    gradient may overwrite the logits.
    """
    return _CrossEntropy.apply(logits, labels, real_columns, overwrite)  # type: ignore[no-any-return]


def parallel_token_losses(
    logits: Tensor,
    labels: Tensor,
    real_columns: int,
    overwrite: bool,
    first_column: int,
    group: dist.ProcessGroup,
    observe: Observe | None,
) -> Tensor:
    """Loss of every token, [t] fp32, over logits [t, v/tp] whose columns are split over the ranks of a group.

    Arguments as in ``token_losses``, ``real_columns`` of this rank; labels are over the whole vocabulary, of which
    ``first_column`` is this rank's first. ``observe`` is None, or called with ``maximum``, ``predicted`` and ``sum``,
    each [t], before they are reduced.

    Collective: the group, in forward only.
    """
    parts = (first_column, group, observe or (lambda name, value: None))
    return _ParallelCrossEntropy.apply(logits, labels, real_columns, overwrite, *parts)  # type: ignore[no-any-return]


def _statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    # Maximum and sum stay apart: put together, they are rounded to the precision of the logits' size.
    wide = logits.float()
    maximum = wide.amax(-1)
    shifted = wide - maximum[:, None]
    total = shifted.exp().sum(-1)
    return total.log() - (wide.gather(-1, labels[:, None])[:, 0] - maximum), maximum, total


def _maximum(logits: Tensor) -> tuple[Tensor, ...]:
    return (logits.float().amax(-1),)


def _sum(logits: Tensor, labels: Tensor, maximum: Tensor) -> tuple[Tensor, ...]:
    shifted = logits.float() - maximum[:, None]
    return shifted.gather(-1, labels[:, None])[:, 0], shifted.exp().sum(-1)


def _probabilities_(logits: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    factor = FP16_FACTOR if logits.dtype == torch.float16 else 1.0
    logits.copy_((logits.float() - maximum[:, None]).exp() * (factor / total)[:, None])
    return ()


def _scale_(gradient: Tensor, factors: Tensor) -> tuple[Tensor, ...]:
    undo = 1 / FP16_FACTOR if gradient.dtype == torch.float16 else 1.0
    gradient.copy_(gradient.float() * (factors * undo)[:, None])
    return ()


statistics, maxima, sums, probabilities_, scale_ = (
    Compiled(function, f"cross-entropy's {function.__name__}")
    for function in (_statistics, _maximum, _sum, _probabilities_, _scale_)
)


def _chunks(logits: Tensor) -> Iterator[slice]:
    tokens, columns = logits.shape
    limit = CHUNK_BYTES.get(logits.device.type, CHUNK_BYTES["cuda"])
    rows = max(1, limit // (columns * logits.element_size()))
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def _per_chunk(function: Compiled, logits: Tensor, *others: Tensor) -> list[Tensor]:
    """Apply a function chunk by chunk; returns its results, [t] each."""
    found = [function(logits[part], *(one[part] for one in others)) for part in _chunks(logits)]
    return [torch.cat(results) for results in zip(*found, strict=True)]


class _Gradient:
    """Gradient of the logits [t, v] under construction; with ``overwrite`` in the logits' memory."""

    def __init__(self, logits: Tensor, real_columns: int, overwrite: bool) -> None:
        self.whole = logits if overwrite else torch.empty_like(logits)
        self._source, self._real = logits[:, :real_columns], self.whole[:, :real_columns]
        self.whole[:, real_columns:] = 0

    def fill(self, part: slice, maximum: Tensor, total: Tensor) -> None:
        """Fill the gradient of some tokens with probabilities, without the label's term."""
        target = self._real[part]
        if self._real.data_ptr() != self._source.data_ptr():
            target.copy_(self._source[part])
        probabilities_(target, maximum[part], total[part])

    def subtract_label(self, column: Tensor, losses: Tensor, elsewhere: Tensor | None = None) -> None:
        """Subtract one at the label's column; the probability minus one is computed before rounding."""
        factor = FP16_FACTOR if self.whole.dtype == torch.float16 else 1.0
        value = (torch.expm1(-losses) * factor).to(self.whole.dtype)[:, None]
        if elsewhere is not None:
            value = torch.where(elsewhere[:, None], self._real.gather(-1, column[:, None]), value)
        self._real.scatter_(-1, column[:, None], value)  # in-place, so that autograd's version counter sees the change


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy on one rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, real_columns: int, overwrite: bool) -> Tensor:
        real = logits[:, :real_columns]
        if not ctx.needs_input_grad[0]:
            return _per_chunk(statistics, real, labels)[0]
        gradient = _Gradient(logits, real_columns, overwrite)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        maximum, total = torch.empty_like(losses), torch.empty_like(losses)
        for part in _chunks(real):
            losses[part], maximum[part], total[part] = statistics(real[part], labels[part])
            gradient.fill(part, maximum, total)
        gradient.subtract_label(labels, losses)
        ctx.save_for_backward(gradient.whole)
        return losses

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the logits, scaled in place: autograd refuses a second backward."""
        (gradient,) = ctx.saved_tensors
        scale_(gradient, gradients[0].contiguous())
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


class _ParallelCrossEntropy(_CrossEntropy):
    """Cross-entropy whose columns are split over the ranks of a group."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        real_columns: int,
        overwrite: bool,
        first_column: int,
        group: dist.ProcessGroup,
        observe: Observe,
    ) -> Tensor:
        real = logits[:, :real_columns]
        column = labels - first_column
        elsewhere = (column < 0) | (column >= real_columns)
        column = column.masked_fill(elsewhere, 0)
        if real_columns:
            (maximum,) = _per_chunk(maxima, real)
        else:  # this rank has only padding
            maximum = torch.full(labels.shape, torch.finfo(torch.float32).min, device=logits.device)
        observe("maximum", maximum)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        if real_columns:
            predicted, total = _per_chunk(sums, real, column, maximum)
        else:
            predicted, total = torch.zeros_like(maximum), torch.zeros_like(maximum)
        predicted = predicted.masked_fill(elsewhere, 0.0)
        observe("predicted", predicted)
        observe("sum", total)
        dist.all_reduce(predicted, group=group)
        dist.all_reduce(total, group=group)
        losses = total.log() - predicted
        if ctx.needs_input_grad[0]:
            gradient = _Gradient(logits, real_columns, overwrite)
            if real_columns:
                for part in _chunks(real):
                    gradient.fill(part, maximum, total)
                gradient.subtract_label(column, losses, elsewhere)
            ctx.save_for_backward(gradient.whole)
        return losses
