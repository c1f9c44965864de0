"""Results of PyTorch's own submodules, as any model has them: linear layers, norms of the last dimension, embeddings.

With automatic mixed precision a linear layer rounds what it is given to the type of its output, and computes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.sdc.exhibits.calls import Call, Exhibit, rows_of, taken
from megasdc.sdc.exhibits.linear import bias_gradient, linear_input, linear_weight
from megasdc.sdc.exhibits.norms import norm_bias, norm_input, norm_output, norm_weight
from megasdc.sdc.exhibits.words import word_output, word_weight
from megasdc.sdc.fp64.bounds import Exact, product

Maker = Callable[[Call, Tensor], Exhibit | None]
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(module: nn.Module) -> bool:
    """Whether results of a submodule can be computed again: it has its weight, and computes as its class does."""
    held = module._parameters.get("weight")
    return isinstance(held, nn.Parameter) and any(type(module).forward is kind.forward for kind in MAKERS)


def make_plain(
    address: Address, calls: Sequence[Call], result: Tensor, used_once: Collection[str] = ()
) -> Exhibit | None:
    """The exhibit of a result that was computed in one of these calls of a plain submodule.

    Args:
        used_once: parameters, by full name, that one operation has used: gradients of others are sums.

    Returns:
        None: such results are not computed, or what they were made of was not seen, or was not of one call.
    """
    call = _call_of(address, calls)
    if call is None or (address.phase == WEIGHT_GRAD and f"{address.fqn}.{address.slot}" not in used_once):
        return None
    for kind, makers in MAKERS.items():
        if type(call.module).forward is kind.forward and (make := makers.get((address.phase, address.slot))):
            return make(call, result)
    return None


def _call_of(address: Address, calls: Sequence[Call]) -> Call | None:
    """The call that a result is of; None: there is none, or it may be of several."""
    if address.phase == FORWARD:
        some = calls[:1]
    elif address.phase == RECOMPUTE:
        some = calls[1:]
    else:
        some = [one for one in calls if one.gradients]
    if len(some) != 1 or not some[0].args or not isinstance(some[0].args[0], Tensor) or some[0].output is None:
        return None
    return some[0]


# --- linear layers ----------------------------------------------------------------------------------------------------


def _linear(make: Maker) -> Maker:
    """Of the call as the operation has it: input, weight and bias, in its type."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module, kind = call.module, None if call.output is None else call.output.dtype
        if kind not in TYPES:
            return None
        operands = (call.args[0], module.weight, *(() if module.bias is None else (module.bias,)))
        given = tuple(one.detach().to(kind) for one in operands)
        found = make(replace(call, args=given, gradients=[one.to(kind) for one in call.gradients]), result.to(kind))
        return None if found is None else replace(found, result=result.detach().reshape(found.result.shape))

    return made


def _output(call: Call, result: Tensor) -> Exhibit:
    """The input times the weight; a bias is added by the same operation, as one more term, or after it."""
    given, weight, *biases = call.args
    left = rows_of(given)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        factors = taken(left, rows), taken(weight, columns)
        if not biases:
            return product(*factors, result.dtype)
        bias = taken(biases[0], columns)
        after = product(*factors, result.dtype, bias)
        ones, added = torch.ones_like(bias[:, None]), bias[:, None]
        inside = product(torch.cat((factors[0], ones), -1), torch.cat((factors[1], added), -1), result.dtype)
        return Exact(after.values, after.bounds.maximum(inside.bounds) + (after.values - inside.values).abs())

    return Exhibit(rows_of(result), (left, weight, *biases), compute)


# --- norms and embeddings ---------------------------------------------------------------------------------------------


def _norm(make: Maker) -> Maker:
    """Of a norm of the last dimension alone, all in one type."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module, given = call.module, call.args[0]
        kinds = {one.dtype for one in (given, module.weight, result, *call.gradients)}
        if len(kinds) > 1 or result.dtype not in TYPES or module.eps is None or len(module.normalized_shape) != 1:
            return None
        return make(call, result)

    return made


def _words(make: Maker) -> Maker:
    """Of an embedding that changes no weights and scales no gradient."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module = call.module
        odd = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        unlike = make is word_weight and module.padding_idx is not None
        return None if odd or unlike or result.dtype not in TYPES else make(call, result)

    return made


def _both(make: Maker) -> dict[tuple[str, str], Maker]:
    return {(phase, "output"): make for phase in (FORWARD, RECOMPUTE)}


_NORMS: Mapping[tuple[str, str], Maker] = {
    **_both(_norm(norm_output)),
    (BACKWARD, "input"): _norm(norm_input),
    (WEIGHT_GRAD, "weight"): _norm(norm_weight),
    (WEIGHT_GRAD, "bias"): _norm(norm_bias),
}
MAKERS: Mapping[type[Any], Mapping[tuple[str, str], Maker]] = {
    nn.Linear: {
        **_both(_linear(_output)),
        (BACKWARD, "input"): _linear(linear_input),
        (WEIGHT_GRAD, "weight"): _linear(linear_weight),
        (WEIGHT_GRAD, "bias"): _linear(bias_gradient),
    },
    nn.LayerNorm: _NORMS,
    nn.RMSNorm: _NORMS,
    nn.Embedding: {**_both(_words(word_output)), (WEIGHT_GRAD, "weight"): _words(word_weight)},
}
"""By class, phase and tensor."""
