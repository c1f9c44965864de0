"""Cross-entropy that computes the gradient of the logits in the forward pass, in chunks of tokens.

A chunk's logits stay in the CPU cache from their maximum to their gradient, and fp32 values exist for one chunk only.
The gradient overwrites the logits if nothing else reads them; the backward only scales it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasdc.model.compiled import Compiled

CHUNK_BYTES = {"cpu": 2**19, "cuda": 2**26}
"""Bytes of a chunk's logits: half of a typical L2 cache; on a GPU enough to keep it busy."""
FP16_FACTOR = 2.0**15
"""Factor on fp16 gradients, so that small probabilities are not subnormal; a power of two, undone in the backward."""

Observe = Callable[[str, Tensor], None]


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
    """Apply a function chunk by chunk; its results, [t] each."""
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
