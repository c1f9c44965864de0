"""Rows of causal attention and their gradients in fp64, and how far rounding may take the device's own from them.

A row is sum of w_t v_t over sum of w_t, with w_t = exp(z_t - m), z_t = scale q k_t, for any m. Rounding takes z_t off
by e_t, and so w_t by a share of exp(e_t) - 1; kernels that go block by block scale what they have summed again with
each block, and multiply weights that were rounded to the type of the result with v.

With weights ``P`` (rows of the softmax), output ``O = (M P) V`` and its gradient ``G``:

    dV = (M P)^T G,   dP = M (G V^T),   D = rows of sum(G O),   dS = P (dP - D),   dQ = scale dS K,   dK = scale dS^T Q.

with M the mask of dropout, if there is one. Each is a sum of products of what is off by a bounded amount itself;
``docs/design/referee.md`` says by how much. Devices get D from the output, as it was rounded, or as the sum of
``P dP``; both are covered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.sdc.referee.rounding import INACCURACY, WORKING, Exact, gamma, rounded

BLOCK = 16
"""Smallest number of keys of a block, after each of which sums are scaled again."""


def rotated(values: Tensor, cosine: Tensor, sine: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries or keys after their rotation, [..., d] fp64, and the largest error of each by rounding.

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
        values: the wanted columns of the values, [T, n].
        kind: type of the result.
        mask: mask of dropout, for the weights, [T]; with one, scores and weights are rounded to the type; None: none.
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


ROWS = 512
"""Number of rows of the weights that are in memory at a time."""


@dataclass(frozen=True)
class Off:
    """Numbers in fp64, and the largest error of each; of the same shape."""

    values: Tensor
    bounds: Tensor

    @property
    def max_magnitude(self) -> Tensor:
        """Largest magnitude that each number may have."""
        return self.values.abs() + self.bounds

    def __add__(self, other: Off) -> Off:
        return Off(self.values + other.values, self.bounds + other.bounds)

    def rounded(self, kind: torch.dtype, times: int = 1) -> Off:
        """The numbers with the errors of more roundings to a type."""
        bounds = self.bounds
        for _ in range(times):
            bounds = rounded(bounds, self.values, kind)
        return Off(self.values, bounds)


def from_exact(values: Tensor) -> Off:
    """Given numbers, without error."""
    values = values.double()
    return Off(values, torch.zeros_like(values))


def times(left: Off, right: Off, kind: torch.dtype = WORKING) -> Off:
    """A product of matrices, [n, K] and [K, m], whose sums are computed in a type."""
    reach = left.max_magnitude @ right.max_magnitude
    off = reach - left.values.abs() @ right.values.abs()  # of factors: no more than this
    count = left.values.shape[-1]
    return Off(left.values @ right.values, off + gamma(count + 4, kind) * reach + 2 * count * torch.finfo(kind).tiny)


def head_gradients(
    query: Off,
    key: Off,
    value: Tensor,
    gradient: Tensor,
    scale: float,
    kind: torch.dtype,
    mask: Tensor | None = None,
) -> tuple[Off, Off, Off]:
    """Gradients of query, key and value of one head, each [T, d], before they are rounded.

    Args:
        query: [T, d], rotated if it is; key likewise.
        value: [T, d].
        gradient: gradient of the output, [T, d].
        kind: type of all of them.
        mask: mask of dropout for the weights, [T, T]; with one, scores and weights are rounded to the type; None: none.
    """
    values, slopes = from_exact(value), from_exact(gradient)
    found: list[Off] = []
    to_key, to_value = _nothing(key.values), _nothing(values.values)
    for start in range(0, len(values.values), ROWS):
        end = min(start + ROWS, len(values.values))
        seen, asked, slope = slice(0, end), _rows(query, start, end), _rows(slopes, start, end)
        weights = _weights(asked, _rows(key, 0, end), scale, kind, start, dropped=mask is not None)
        own = None if mask is None else mask[start:end, :end].double()
        inner = _score_gradients(weights, _rows(values, 0, end), slope, kind, own)
        found.append(times(inner, _rows(key, 0, end)))
        _add(to_key, seen, times(_turned(inner), asked))
        _add(to_value, seen, times(_turned(_masked(weights, own, kind)), slope))
    to_query = Off(torch.cat([one.values for one in found]), torch.cat([one.bounds for one in found]))
    blocks = gamma(-(-len(values.values) // BLOCK) + 2, WORKING)  # what is summed block by block
    return _scaled(to_query, scale, blocks), _scaled(to_key, scale, blocks), _scaled(to_value, 1.0, blocks)


def unrotated(turned: Off, cosine: Tensor, sine: Tensor, kind: torch.dtype) -> Off:
    """Gradient before the rotation, from the one after it; [T, d] each, the sine's first half negated."""
    cosine, sine = cosine.double(), sine.double()
    half = turned.values.shape[-1] // 2
    across = Off((turned.values * sine).roll(half, -1), (turned.bounds * sine.abs()).roll(half, -1))
    straight = Off(turned.values * cosine, turned.bounds * cosine.abs())
    off = 2 * torch.finfo(kind).eps * (straight.max_magnitude + across.max_magnitude) + torch.finfo(kind).tiny
    both = straight + across
    return Off(both.values, both.bounds + off)


def summed(heads: list[Off], kind: torch.dtype) -> Off:
    """The sum over heads that share a key, each of which may have been rounded to the type before."""
    rounded_heads = [one.rounded(kind, 2) for one in heads]
    total = rounded_heads[0]
    for one in rounded_heads[1:]:
        total = total + one
    reach = sum((one.max_magnitude for one in rounded_heads), torch.zeros_like(total.values))
    return Off(total.values, total.bounds + (gamma(len(heads), kind) * reach if len(heads) > 1 else 0.0))


def elements(found: Off, rows: Tensor, columns: Tensor, kind: torch.dtype) -> Exact:
    """Elements of a gradient, with bounds that hold for the type in which the device keeps it."""
    last = found.rounded(kind, 2)
    values, bounds = last.values[rows, columns], last.bounds[rows, columns]
    return Exact(values, torch.where(bounds.isfinite() & values.isfinite(), bounds, torch.inf))


def _masked(one: Off, mask: Tensor | None, kind: torch.dtype) -> Off:
    return one if mask is None else Off(one.values * mask, one.bounds * mask).rounded(kind)


def _weights(query: Off, key: Off, scale: float, kind: torch.dtype, start: int, *, dropped: bool) -> Off:
    """Rows of the softmax, [n, T], the first of which is row ``start``."""
    count, total_keys = len(query.values), len(key.values)
    roundoff, share = torch.finfo(WORKING).eps / 2, torch.finfo(kind).eps / 2
    future = torch.ones(count, total_keys, dtype=torch.bool).triu(start + 1)
    both = times(query, _turned(key))
    scores, off = scale * both.values, scale * both.bounds + 4 * roundoff * scale * both.values.abs()
    if dropped:
        off = rounded(off, scores, kind)
    scores = scores.masked_fill(future, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    off = off + 4 * roundoff * ((scale * both.values).abs() + largest.abs())
    blocks = total_keys / BLOCK + 2
    off = off + blocks * 2 * (INACCURACY + 2 * roundoff)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    total_share = (weights * (torch.expm1(off) + gamma(total_keys + 2, WORKING))).sum(-1, keepdim=True) / total
    total_share = torch.where(total_share < 0.5, total_share / (1 - total_share), torch.inf)
    # A backward pass takes the weights from the scores again, with the logarithm of their sum.
    logarithm = largest + total.log()
    off = off + 4 * roundoff * logarithm.abs() + 2 * INACCURACY * (1 + total.log()) + torch.log1p(total_share)
    weights = weights / total
    apart = (torch.expm1(off) + 2 * share * torch.exp(off)).masked_fill(future, 0.0)
    return Off(weights, weights * apart + torch.finfo(WORKING).tiny * ~future)


def _score_gradients(weights: Off, values: Off, slopes: Off, kind: torch.dtype, mask: Tensor | None) -> Off:
    """``P (M G V^T - D)``, [n, T]."""
    output = times(_masked(weights, mask, kind), values).rounded(kind, 2)
    of_weights = _masked(times(slopes, _turned(values)).rounded(kind, 2), mask, kind)
    from_output = _row_sums(slopes, output)
    from_weights = _row_sums(weights, of_weights)
    difference = of_weights.values - from_output.values
    off = of_weights.bounds + torch.maximum(from_output.bounds, from_weights.bounds)
    off = off + torch.finfo(WORKING).eps * (of_weights.values.abs() + from_output.values.abs())
    found = weights.values * difference
    return Off(found, weights.bounds * difference.abs() + weights.max_magnitude * off).rounded(WORKING).rounded(kind, 2)


def _row_sums(left: Off, right: Off) -> Off:
    """The sum of the products of each row, [n, 1]."""
    reach = left.max_magnitude * right.max_magnitude
    exact = left.values * right.values
    off = (reach - exact.abs()).sum(-1, keepdim=True)
    count = exact.shape[-1]
    off = off + gamma(count + 4, WORKING) * reach.sum(-1, keepdim=True) + 2 * count * torch.finfo(WORKING).tiny
    return Off(exact.sum(-1, keepdim=True), off)


def _nothing(like: Tensor) -> Off:
    return Off(torch.zeros_like(like), torch.zeros_like(like))


def _rows(one: Off, start: int, end: int) -> Off:
    return Off(one.values[start:end], one.bounds[start:end])


def _turned(one: Off) -> Off:
    return Off(one.values.T, one.bounds.T)


def _add(total: Off, place: slice, more: Off) -> None:
    total.values[place] += more.values
    total.bounds[place] += more.bounds


def _scaled(one: Off, scale: float, share: Tensor) -> Off:
    """Numbers times a factor, with the errors of that product and of sums of blocks."""
    off = one.bounds + (share + torch.finfo(WORKING).eps) * one.max_magnitude
    return Off(scale * one.values, abs(scale) * off)
