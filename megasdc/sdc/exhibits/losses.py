"""The loss, and the gradient of the logits, where one rank has the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_of
from megasdc.sdc.fp64.bounds import Exact
from megasdc.sdc.fp64.loss import logit_gradients, token_losses


def loss_output(call: Call, result: Tensor) -> Exhibit | None:
    """Losses [b, s] of logits [s, b, v]."""
    logits, labels = call.args[:2]
    if call.module.tensor > 1:
        return None
    real = logits[..., : call.module.real_columns]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return token_losses(real[columns, rows].cpu(), labels[rows, columns].cpu())

    return Exhibit(rows_of(result), (logits, labels), compute)


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

    return Exhibit(rows_of(result), (logits, labels, slopes), compute)
