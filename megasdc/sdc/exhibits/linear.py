"""Linear layers: output, and gradients of input, weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_as_matrix, taken
from megasdc.sdc.fp64.rounding_bounds import Exact, product


def _linear_factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input [tokens, K], weight [C, K] and bias [C] of a parallel layer, or of a tied output, which has no bias."""
    given, weight, *rest = call.args
    return rows_as_matrix(given), weight.detach(), rest[0] if rest else None


def _product(result: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Exhibit:
    """Of ``left right^T + bias``."""
    factors = (left, right) if bias is None else (left, right, bias)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        added = None if bias is None else taken(bias, columns)
        return product(taken(left, rows), taken(right, columns), result.dtype, added)

    return Exhibit(rows_as_matrix(result), factors, compute, is_product=True)


def linear_output(call: Call, result: Tensor) -> Exhibit:
    """The input times the weight, and the bias where it is added."""
    return _product(result, *_linear_factors(call))


def linear_input(call: Call, result: Tensor) -> Exhibit:
    """The output's gradient times the weight."""
    return _product(result, rows_as_matrix(call.gradients[-1]), _linear_factors(call)[1].T)


def linear_weight(call: Call, result: Tensor) -> Exhibit:
    """The output's gradient times the input."""
    return _product(result, rows_as_matrix(call.gradients[-1]).T, _linear_factors(call)[0].T)


def bias_gradient(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over all tokens; one row."""
    gradient = rows_as_matrix(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        return product(terms, torch.ones_like(terms), result.dtype)

    return Exhibit(result.detach().reshape(1, -1), (gradient,), compute)
