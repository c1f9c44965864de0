"""Norms: output, and gradients of input and weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_as_matrix, taken
from megasdc.sdc.fp64.rounding_bounds import WORKING, Exact, NormMoments, normalized, product
from megasdc.sdc.fp64.rounding_bounds import norm_input as exact_input
from megasdc.sdc.fp64.rounding_bounds import norm_weight as exact_weight


def _norm_factors(call: Call) -> tuple[Tensor, ...]:
    """Input [tokens, K], weight [K] and, if the norm has one, bias [K]."""
    bias = getattr(call.module, "bias", None)
    return (rows_as_matrix(call.args[0]), call.module.weight, *(() if bias is None else (bias,)))


def _moments(call: Call, rows: Tensor) -> NormMoments:
    """In a norm of a class of its own each operation may round to the type of what it is given."""
    steps = call.args[0].dtype if hasattr(call.module, "centred") else WORKING
    return NormMoments.of(rows, call.module.eps, centred=_is_centred(call), steps=steps)


def norm_output(call: Call, result: Tensor) -> Exhibit:
    """The normalised input, times the weight, and the bias."""
    inputs, weight, *bias = _norm_factors(call)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, (scale, *added) = taken(inputs, rows), (taken(one, columns) for one in (weight, *bias))
        own = given.gather(-1, columns[:, None])[:, 0]
        found = added[0] if added else None
        return normalized(own, _moments(call, given), scale, found, result.dtype, inputs.shape[-1])

    return Exhibit(rows_as_matrix(result), (inputs, weight, *bias), compute)


def norm_input_exhibit(call: Call, result: Tensor) -> Exhibit:
    """By the moments of its row, and sums over that."""
    inputs, weight, *_ = _norm_factors(call)
    gradient, centred = rows_as_matrix(call.gradients[-1]), _is_centred(call)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, slope = taken(inputs, rows), taken(gradient, rows)
        scale = weight.detach().cpu()
        return exact_input(slope, given, columns, _moments(call, given), scale, result.dtype, centred=centred)

    return Exhibit(rows_as_matrix(result), (inputs, weight, gradient), compute)


def norm_weight_exhibit(call: Call, result: Tensor) -> Exhibit:
    """One row."""
    inputs, gradient = rows_as_matrix(call.args[0]), rows_as_matrix(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        own, slopes = taken(inputs.T, columns), taken(gradient.T, columns)
        working = _summed_in(call, result)
        return exact_weight(slopes, own, _moments(call, inputs.cpu()), result.dtype, inputs.shape[-1], working)

    return Exhibit(result.detach().reshape(1, -1), (inputs, gradient), compute)


def norm_bias(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over all tokens; one row."""
    gradient = rows_as_matrix(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        return product(terms, torch.ones_like(terms), result.dtype, working=_summed_in(call, result))

    return Exhibit(result.detach().reshape(1, -1), (gradient,), compute)


def _is_centred(call: Call) -> bool:
    """Whether it takes the mean away; a norm of a class of its own says so."""
    return bool(getattr(call.module, "centred", isinstance(call.module, nn.LayerNorm)))


def _summed_in(call: Call, result: Tensor) -> torch.dtype:
    """The type that gradients of weight and bias are summed in: their own in PyTorch's LayerNorm on a processor, and,
    as it may be, in a norm of a class of its own.
    """
    in_its_own = isinstance(call.module, nn.LayerNorm) and result.device.type == "cpu"
    return result.dtype if in_its_own or hasattr(call.module, "centred") else WORKING
