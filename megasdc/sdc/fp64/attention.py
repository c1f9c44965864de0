"""Rows of causal attention in fp64, and how far rounding may take the device's own from them.

A row is sum of w_t v_t over sum of w_t, with w_t = exp(z_t - m), z_t = scale q k_t, for any m. Rounding takes z_t off
by e_t, and so w_t by a share of exp(e_t) - 1; kernels that go block by block scale what they have summed again with
each block, and multiply weights that were rounded to the type of the result with v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.fp64.rounding_bounds import INACCURACY, WORKING, Exact, gamma, rounded

BLOCK = 16
"""Fewest keys of a block: what was summed is scaled again so often."""


def rotated(values: Tensor, cosine: Tensor, sine: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries or keys after their rotation, [..., d] fp64, and what rounding may take each off by.

    Args:
        cosine: [..., d], and sine, whose first half is negated.
    """
    values, cosine, sine = values.double(), cosine.double(), sine.double()
    turned = values.roll(values.shape[-1] // 2, -1)
    found = values * cosine + turned * sine
    sizes = (values * cosine).abs() + (turned * sine).abs()
    return found, 2 * torch.finfo(kind).eps * sizes + torch.finfo(kind).tiny


def attended(
    query: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    values: Tensor,
    scale: float,
    kind: torch.dtype,
    mask: Tensor | None = None,
) -> Exact:
    """Elements of one row of one head.

    Args:
        query: [d], and what it may be off by.
        keys: those that the row may see, [T, d], likewise.
        values: of the wanted columns, [T, n].
        kind: type of the result.
        mask: of dropout, for the weights, [T]; with one, scores and weights are rounded to the type; None: none.
    """
    (asked, asked_off), (seen, seen_off), values = query, keys, values.double()
    count, width = seen.shape
    roundoff, share = torch.finfo(WORKING).eps / 2, torch.finfo(kind).eps / 2
    scores = scale * (seen @ asked)
    sizes = scale * (seen.abs() @ asked.abs())
    off = gamma(width + 4, WORKING) * sizes
    off = off + scale * (seen_off @ (asked.abs() + asked_off) + seen.abs() @ asked_off)
    if mask is not None:
        off = rounded(off, scores, kind)
    largest = scores.max()
    off = off + 4 * roundoff * (scores.abs() + largest.abs())
    blocks = count / BLOCK + 2
    apart = torch.expm1(off + blocks * 2 * (INACCURACY + 2 * roundoff))
    weights = (scores - largest).exp()
    total = weights.sum()
    total_off = (weights * (apart + gamma(count + 2, WORKING))).sum()
    terms = weights[:, None] * values * (1 if mask is None else mask.double()[:, None])
    summed = terms.sum(0)
    summed_off = (terms.abs() * (apart + 4 * share * (1 + apart) + gamma(count + 4, WORKING))[:, None]).sum(0)
    found = summed / total
    least = total - total_off
    bounds = torch.where(least > 0, (summed_off + found.abs() * total_off) / least, torch.inf)
    bounds = rounded(rounded(bounds, found, kind), found, kind)
    return Exact(found, torch.where(bounds.isfinite() & found.isfinite(), bounds, torch.inf))
