"""Word embeddings: output, and gradient of the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.fp64.bounds import Exact, chosen, product
from megasdc.train.detection.exhibits.calls import Call, Exhibit, rows_of, taken


def _local_ids(call: Call) -> Tensor:
    """Rows of this rank's part of the vocabulary, [tokens]; -1: of another rank's."""
    ids = call.args[0].reshape(-1).cpu() - call.module.vocab_start_index
    return torch.where((ids >= 0) & (ids < len(call.module.weight)), ids, -1)


def word_output(call: Call, result: Tensor) -> Exhibit:
    """A copy of the entry; 0 for one of another rank."""
    ids, weight = _local_ids(call), call.module.weight

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        looked = taken(weight, ids[rows].clamp(min=0), columns)
        return chosen(torch.where(ids[rows] < 0, torch.zeros((), dtype=looked.dtype), looked))

    return Exhibit(rows_of(result), (ids, weight), compute)


def word_weight(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over the tokens of an entry, added in the type of the result."""
    ids, gradient = _local_ids(call), rows_of(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        here = (ids[None, :] == rows[:, None]).to(terms.dtype)
        return product(here, terms, result.dtype, working=result.dtype)

    return Exhibit(rows_of(result), (ids, gradient), compute)
