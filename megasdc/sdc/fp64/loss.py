"""Losses of tokens and gradients of their logits in fp64, and how far rounding may take the device's own from them.

The loss of a token is ``log(sum of exp(z_c - m)) + m - z_t`` for any m, the gradient of logit c is the slope times
``exp(z_c - m) / sum - [c = t]``. A device computes both in fp32, whatever the type of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.fp64.rounding_bounds import INACCURACY, WORKING, Exact, gamma, rounded

ROUNDOFF = torch.finfo(WORKING).eps / 2


def token_losses_fp64(logits: Tensor, labels: Tensor) -> Exact:
    """Losses, [n], of logits [n, V] without padding, and labels [n]."""
    logits = logits.double()
    largest = logits.amax(-1)
    total, share, _, _ = _exponentials(logits, largest)
    own = logits.gather(-1, labels[:, None])[:, 0]
    values = total.log() + largest - own
    off = torch.log1p(share) + INACCURACY * (1 + total.log())
    off = off + 4 * ROUNDOFF * (total.log() + largest.abs() + own.abs() + values.abs())
    return _with(values, rounded(off, values, WORKING))


def logit_gradients(
    logits: Tensor, labels: Tensor, slopes: Tensor, rows: Tensor, columns: Tensor, kind: torch.dtype
) -> Exact:
    """Elements of the gradient, [n].

    Args:
        logits: [m, V] without padding.
        labels: [m].
        slopes: of the losses, [m].
        rows: which of these each element is of, [n].
        columns: its logit; from V on, padding, whose gradient is 0.
        kind: type of the gradient.
    """
    logits, slopes = logits.double(), slopes.double()
    total, share, exponentials, apart = _exponentials(logits, logits.amax(-1))
    real = columns < logits.shape[-1]
    place = rows, columns.clamp(max=logits.shape[-1] - 1)
    weight = exponentials[place] / total[rows]
    off = weight * ((1 + apart[place]) * (1 + share[rows]) - 1 + 4 * ROUNDOFF)
    label = (labels[rows] == columns).double()
    values = slopes[rows] * (weight - label)
    bounds = slopes[rows].abs() * (off + 4 * ROUNDOFF * (weight + label)) + torch.finfo(WORKING).tiny
    bounds = rounded(rounded(bounds, values, kind), values, kind)
    return _with(torch.where(real, values, 0.0), torch.where(real, bounds, 0.0))


def _exponentials(logits: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, [m], the shares that they may be off by, the terms, [m, V], and the shares of these."""
    shifted = logits - largest[:, None]
    off = 2 * ROUNDOFF * (logits.abs() + largest.abs()[:, None]) + INACCURACY
    apart = torch.expm1(2 * off)
    terms = shifted.exp()
    total = terms.sum(-1)
    total_off = (terms * (apart + gamma(logits.shape[-1] + 2, WORKING))).sum(-1) / total
    return total, torch.where(total_off < 0.5, total_off / (1 - total_off), torch.inf), terms, apart


def _with(values: Tensor, bounds: Tensor) -> Exact:
    return Exact(values, torch.where(bounds.isfinite() & values.isfinite(), bounds, torch.inf))
