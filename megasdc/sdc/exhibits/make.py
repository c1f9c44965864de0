"""Which results can be computed again, and by what.

The loss, and the gradient of the logits, where one rank has the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.model.kinds import (
    ACTIVATION,
    BLOCK,
    CORE_ATTENTION,
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    HEAD,
    LOSS,
    NORM,
    POSITIONS,
    PROJECTION,
    QKV,
    RESIDUAL,
)
from megasdc.sdc.exhibits.block import (
    SLOTS,
    activation_input,
    activation_output,
    attention_input,
    attention_output,
    sum_input,
    sum_output,
)
from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_as_matrix
from megasdc.sdc.exhibits.linear import bias_gradient, linear_input, linear_output, linear_weight
from megasdc.sdc.exhibits.norms import norm_bias, norm_input_exhibit, norm_output, norm_weight_exhibit
from megasdc.sdc.exhibits.words import position_input, position_output, position_weight, word_output, word_weight
from megasdc.sdc.fp64.loss import logit_gradients, token_losses_fp64
from megasdc.sdc.fp64.rounding_bounds import Exact


def loss_output(call: Call, result: Tensor) -> Exhibit | None:
    """Losses [b, s] of logits [s, b, v]."""
    logits, labels = call.args[:2]
    if call.module.tensor > 1:
        return None
    real = logits[..., : call.module.real_columns]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return token_losses_fp64(real[columns, rows].cpu(), labels[rows, columns].cpu())

    return Exhibit(rows_as_matrix(result), (logits, labels), compute)


def logits_gradient(call: Call, result: Tensor) -> Exhibit | None:
    """Gradients [s, b, v] of the logits."""
    logits, labels = call.args[:2]
    if call.module.tensor > 1:
        return None
    real, slopes, samples = logits[..., : call.module.real_columns], call.gradients[-1], logits.shape[1]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        which, places = torch.unique(rows, return_inverse=True)
        token, sample = which // samples, which % samples
        found = real[token, sample].cpu(), labels[sample, token].cpu(), slopes[sample, token].cpu()
        return logit_gradients(*found, places, columns, result.dtype)

    return Exhibit(rows_as_matrix(result), (logits, labels, slopes), compute)


LINEAR, SUMS, NORMS = (QKV, PROJECTION, FC1, FC2, HEAD), (RESIDUAL, BLOCK), (NORM, FINAL_NORM)

Maker = Callable[[Call, Tensor], Exhibit | None]
MAKERS: Mapping[tuple[str, str, str], Maker] = {
    **{(kind, phase, "output"): linear_output for kind in LINEAR for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): linear_input for kind in LINEAR},
    **{(kind, WEIGHT_GRAD, "weight"): linear_weight for kind in LINEAR},
    **{(kind, WEIGHT_GRAD, "bias"): bias_gradient for kind in LINEAR},
    **{(kind, phase, "output"): sum_output for kind in SUMS for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): sum_input for kind in SUMS},
    **{(kind, phase, "output"): norm_output for kind in NORMS for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): norm_input_exhibit for kind in NORMS},
    **{(kind, WEIGHT_GRAD, "weight"): norm_weight_exhibit for kind in NORMS},
    **{(kind, WEIGHT_GRAD, "bias"): norm_bias for kind in NORMS},
    **{(ACTIVATION, phase, "output"): activation_output for phase in (FORWARD, RECOMPUTE)},
    (ACTIVATION, BACKWARD, "input"): activation_input,
    **{(CORE_ATTENTION, phase, "output"): attention_output for phase in (FORWARD, RECOMPUTE)},
    **{(CORE_ATTENTION, BACKWARD, slot): partial(attention_input, slot=slot) for slot in SLOTS},
    **{(EMBEDDING, phase, "output"): word_output for phase in (FORWARD, RECOMPUTE)},
    (EMBEDDING, WEIGHT_GRAD, "weight"): word_weight,
    **{(POSITIONS, phase, "output"): position_output for phase in (FORWARD, RECOMPUTE)},
    (POSITIONS, BACKWARD, "input"): position_input,
    (POSITIONS, WEIGHT_GRAD, "weight"): position_weight,
    (LOSS, FORWARD, "output"): loss_output,
    (LOSS, BACKWARD, "input"): logits_gradient,
}
"""By kind of submodule, phase and tensor. A wrong factor shows before, where it was made."""
BETWEEN = {ACTIVATION: (FC1, FC2)}
"""Kinds that are no modules, by the kinds of those before and after them in their block."""


def make_exhibit(
    address: Address, kind: str, calls: Sequence[Call], result: Tensor, after: Sequence[Call] = ()
) -> Exhibit | None:
    """The exhibit of a result that was computed in one of these calls.

    Args:
        calls: of the submodule, or of the one before it.
        after: of the one after it, where it is no module itself: its inputs are the submodule's outputs.

    Returns:
        None: the referee does not compute such results, or what they were made of was not seen.
    """
    if after:
        calls = [replace(one, gradients=other.received) for one, other in zip(calls, after, strict=True)]
    make = MAKERS.get((kind, address.phase, address.slot))
    with_gradient = [one for one in calls if one.gradients]
    seen = calls[:1] if address.phase == FORWARD else calls[-1:] if address.phase == RECOMPUTE else with_gradient[-1:]
    return make(seen[0], result) if make is not None and seen else None
