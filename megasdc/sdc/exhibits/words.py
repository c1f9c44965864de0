"""Word embeddings and learned positions: output, and gradient of the weight; of positions also of the input."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.exhibits.block import sum_input
from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_as_matrix, taken
from megasdc.sdc.fp64.rounding_bounds import Exact, chosen, product, residual


def _local_ids(call: Call) -> Tensor:
    """Rows of this rank's part of the vocabulary, [tokens]; -1: of another rank's. An embedding of PyTorch is whole."""
    ids = call.args[0].reshape(-1).cpu() - getattr(call.module, "vocab_start_index", 0)
    return torch.where((ids >= 0) & (ids < len(call.module.weight)), ids, -1)


def word_output(call: Call, result: Tensor) -> Exhibit:
    """A copy of the entry; 0 for one of another rank."""
    ids, weight = _local_ids(call), call.module.weight

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        looked = taken(weight, ids[rows].clamp(min=0), columns)
        return chosen(torch.where(ids[rows] < 0, torch.zeros((), dtype=looked.dtype), looked))

    return Exhibit(rows_as_matrix(result), (ids, weight), compute)


def word_weight(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over the tokens of an entry, added in the type of the result."""
    ids, gradient = _local_ids(call), rows_as_matrix(call.gradients[-1])
    if (padding := getattr(call.module, "padding_idx", None)) is not None:
        ids = torch.where(ids == padding, -1, ids)  # which gets no gradient

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        here = (ids[None, :] == rows[:, None]).to(terms.dtype)
        return product(here, terms, result.dtype, working=result.dtype)

    return Exhibit(rows_as_matrix(result), (ids, gradient), compute)


def position_output(call: Call, result: Tensor) -> Exhibit | None:
    """Mask (word + position), without what there is not."""
    if _is_part(call):
        return None
    weight, samples = _weight(call), call.args[0].shape[1]
    words, mask = rows_as_matrix(call.args[0]), None if call.mask is None else rows_as_matrix(call.mask)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        position = None if weight is None else taken(weight, rows // samples, columns)
        kept = None if mask is None else taken(mask, rows, columns)
        return residual(taken(words, rows, columns), position, kept, None, result.dtype)

    return Exhibit(rows_as_matrix(result), tuple(one for one in (words, weight, mask) if one is not None), compute)


def position_input(call: Call, result: Tensor) -> Exhibit | None:
    """The mask times the gradient."""
    return None if _is_part(call) else sum_input(call, result)


def position_weight(call: Call, result: Tensor) -> Exhibit | None:
    """The sum over samples of mask times gradient; 0 for positions that no token has."""
    if _is_part(call):
        return None
    gradient = call.gradients[-1]
    mask = torch.ones_like(gradient) if call.mask is None else call.mask

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        here = (rows < len(gradient))[:, None]
        place = rows.clamp(max=len(gradient) - 1)
        slopes, kept = (one.cpu()[place, :, columns] * here for one in (gradient, mask))
        return product(slopes, kept, result.dtype, working=result.dtype)

    return Exhibit(rows_as_matrix(result), (gradient, mask), compute)


def _weight(call: Call) -> Tensor | None:
    positions = call.module.positions
    return None if positions is None else positions.weight


def _is_part(call: Call) -> bool:
    """Whether ranks of a tensor group have parts of the sequence."""
    return bool(call.module.context.config.sequence_parallel)
