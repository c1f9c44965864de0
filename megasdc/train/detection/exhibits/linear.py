"""Linear layers: output, and gradients of input, weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.sdc.fp64.bounds import Exact, product
from megasdc.train.detection.exhibits.calls import Call, Exhibit, rows_of, taken


def _linear_factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input [tokens, K], weight [C, K] and bias [C] of a parallel layer, or of a tied output, which has no bias."""
    given, weight, *rest = call.args
    return rows_of(given), weight.detach(), rest[0] if rest else None


def linear_output(call: Call, result: Tensor) -> Exhibit:
    """The input times the weight, and the bias where it is added."""
    inputs, weight, bias = _linear_factors(call)
    factors = (inputs, weight) if bias is None else (inputs, weight, bias)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        added = None if bias is None else taken(bias, columns)
        return product(taken(inputs, rows), taken(weight, columns), result.dtype, added)

    return Exhibit(rows_of(result), factors, compute)


def linear_input(call: Call, result: Tensor) -> Exhibit:
    """The output's gradient times the weight."""
    gradient, weight = rows_of(call.gradients[-1]), _linear_factors(call)[1]
    return Exhibit(
        rows_of(result),
        (gradient, weight),
        lambda rows, columns: product(taken(gradient, rows), taken(weight.T, columns), result.dtype),
    )


def linear_weight(call: Call, result: Tensor) -> Exhibit:
    """The output's gradient times the input."""
    gradient, inputs = rows_of(call.gradients[-1]), _linear_factors(call)[0]
    return Exhibit(
        rows_of(result),
        (gradient, inputs),
        lambda rows, columns: product(taken(gradient.T, rows), taken(inputs.T, columns), result.dtype),
    )


def bias_gradient(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over all tokens; one row."""
    gradient = rows_of(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        return product(terms, torch.ones_like(terms), result.dtype)

    return Exhibit(result.detach().reshape(1, -1), (gradient,), compute)
