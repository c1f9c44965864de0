"""What a submodule was given and what it made of it, and its elements in fp64: for the referee.

A result is a matrix: rows are tokens, or those of a weight. Which results have an exhibit is in ``MAKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.model.kinds import (
    ACTIVATION,
    BLOCK,
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    HEAD,
    NORM,
    PROJECTION,
    QKV,
    RESIDUAL,
)
from megasdc.model.modules import ResidualAdd, hidden_masks
from megasdc.sdc.fp64.bounds import (
    Exact,
    Moments,
    activated,
    chosen,
    norm_input,
    norm_weight,
    normalized,
    product,
    residual,
)

LOCAL = "_forward_impl"
"""Method of Megatron-core's parallel linear layers that computes this rank's own part."""
_LINEAR, _SUM, _NORMS = (QKV, PROJECTION, FC1, FC2, HEAD), (RESIDUAL, BLOCK), (NORM, FINAL_NORM)


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Args:
        module: the submodule's.
        args: positional arguments, those of linear layers by name included.
        output: of linear layers, before their bias; else of no use.
        gradients: of the output, once there is one.
        mask: of dropout, scaled, as the output; None: nothing is dropped.
    """

    module: Any
    args: tuple[Any, ...]
    output: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None


@dataclass(frozen=True)
class Exhibit:
    """A result that can be computed again.

    Args:
        result: [R, C].
        factors: what it was made of, which is equal on all ranks that are compared.
        compute: elements in fp64, from their rows [n] and columns [n].
    """

    result: Tensor
    factors: tuple[Tensor, ...]
    compute: Callable[[Tensor, Tensor], Exact]


@contextmanager
def kept_calls(module: Any) -> Iterator[list[Call]]:
    """Inside, calls of a module are kept, in their order; None: nothing is."""
    calls: list[Call] = []
    if module is None:
        yield calls
        return
    name = LOCAL if hasattr(module, LOCAL) else "forward"
    own, was = getattr(module, name), vars(module).get(name)

    def kept(*args: Any, **options: Any) -> Any:
        output = own(*args, **options)
        given = (*args, *(options.get(one) for one in ("input", "weight", "bias"))) if name == LOCAL else args
        own_result = output.detach() if isinstance(output, Tensor) else None
        call = Call(module, tuple(map(_detached, given)), own_result, mask=_mask_of(module, args))
        calls.append(call)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: call.gradients.append(gradient.detach().clone()))
        return output

    setattr(module, name, kept)
    try:
        yield calls
    finally:
        if was is None:
            delattr(module, name)
        else:
            setattr(module, name, was)


def make_exhibit(address: Address, kind: str, calls: Sequence[Call], result: Tensor) -> Exhibit | None:
    """The exhibit of a result that was computed in one of these calls.

    Returns:
        None: the referee does not compute such results, or what they were made of was not seen.
    """
    make = MAKERS.get((kind, address.phase, address.slot))
    with_gradient = [one for one in calls if one.gradients]
    seen = calls[:1] if address.phase == FORWARD else calls[-1:] if address.phase == RECOMPUTE else with_gradient[-1:]
    return make(seen[0], result) if make is not None and seen else None


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach().clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _mask_of(module: Any, args: Sequence[Any]) -> Tensor | None:
    if not isinstance(module, ResidualAdd) or not module.training or not args[2]:
        return None
    return hidden_masks(module.streams, args[0][0], args[2], module.layer_number, module.site, module.sequence_shard)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _taken(tensor: Tensor, *places: Tensor) -> Tensor:
    """Elements, or rows, on the host."""
    return tensor.detach()[tuple(one.to(tensor.device) for one in places)].cpu()


# --- linear layers ------------------------------------------------------------------------------------------------


def _linear_factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input [tokens, K], weight [C, K] and bias [C] of a parallel layer, or of a tied output, which has no bias."""
    given, weight, *rest = call.args
    return _rows(given), weight.detach(), rest[0] if rest else None


def _linear_output(call: Call, result: Tensor) -> Exhibit:
    inputs, weight, bias = _linear_factors(call)
    factors = (inputs, weight) if bias is None else (inputs, weight, bias)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        added = None if bias is None else _taken(bias, columns)
        return product(_taken(inputs, rows), _taken(weight, columns), result.dtype, added)

    return Exhibit(_rows(result), factors, compute)


def _linear_input(call: Call, result: Tensor) -> Exhibit:
    gradient, weight = _rows(call.gradients[-1]), _linear_factors(call)[1]
    return Exhibit(
        _rows(result),
        (gradient, weight),
        lambda rows, columns: product(_taken(gradient, rows), _taken(weight.T, columns), result.dtype),
    )


def _linear_weight(call: Call, result: Tensor) -> Exhibit:
    gradient, inputs = _rows(call.gradients[-1]), _linear_factors(call)[0]
    return Exhibit(
        _rows(result),
        (gradient, inputs),
        lambda rows, columns: product(_taken(gradient.T, rows), _taken(inputs.T, columns), result.dtype),
    )


def _bias(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over all tokens; one row."""
    gradient = _rows(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = _taken(gradient.T, columns)
        return product(terms, torch.ones_like(terms), result.dtype)

    return Exhibit(result.detach().reshape(1, -1), (gradient,), compute)


# --- other submodules ---------------------------------------------------------------------------------------------


def _sum_output(call: Call, result: Tensor) -> Exhibit:
    (branch, bias), other = call.args[0], call.args[1]
    parts = [None if one is None else _rows(one) for one in (branch, call.mask, other)]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        own, mask, rest = (None if one is None else _taken(one, rows, columns) for one in parts)
        assert own is not None, "there is a branch"
        return residual(own, None if bias is None else _taken(bias, columns), mask, rest, result.dtype)

    factors = (*parts, bias)
    return Exhibit(_rows(result), tuple(one for one in factors if one is not None), compute)


def _sum_input(call: Call, result: Tensor) -> Exhibit:
    gradient, mask = _rows(call.gradients[-1]), None if call.mask is None else _rows(call.mask)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        kept = None if mask is None else _taken(mask, rows, columns)
        return residual(_taken(gradient, rows, columns), None, kept, None, result.dtype)

    return Exhibit(_rows(result), (gradient,) if mask is None else (gradient, mask), compute)


def _norm_factors(call: Call) -> tuple[Tensor, ...]:
    """Input [tokens, K], weight [K] and, if the norm has one, bias [K]."""
    bias = getattr(call.module, "bias", None)
    return (_rows(call.args[0]), call.module.weight, *(() if bias is None else (bias,)))


def _moments(call: Call, rows: Tensor) -> Moments:
    return Moments.of(rows, call.module.eps, centred=isinstance(call.module, nn.LayerNorm))


def _norm_output(call: Call, result: Tensor) -> Exhibit:
    inputs, weight, *bias = _norm_factors(call)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, (scale, *added) = _taken(inputs, rows), (_taken(one, columns) for one in (weight, *bias))
        own = given.gather(-1, columns[:, None])[:, 0]
        found = added[0] if added else None
        return normalized(own, _moments(call, given), scale, found, result.dtype, inputs.shape[-1])

    return Exhibit(_rows(result), (inputs, weight, *bias), compute)


def _norm_input(call: Call, result: Tensor) -> Exhibit:
    inputs, weight, *_ = _norm_factors(call)
    gradient, centred = _rows(call.gradients[-1]), isinstance(call.module, nn.LayerNorm)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, slope = _taken(inputs, rows), _taken(gradient, rows)
        scale = weight.detach().cpu()
        return norm_input(slope, given, columns, _moments(call, given), scale, result.dtype, centred=centred)

    return Exhibit(_rows(result), (inputs, weight, gradient), compute)


def _norm_weight(call: Call, result: Tensor) -> Exhibit:
    """One row."""
    inputs, gradient = _rows(call.args[0]), _rows(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        own, slopes = _taken(inputs.T, columns), _taken(gradient.T, columns)
        return norm_weight(slopes, own, _moments(call, inputs.cpu()), result.dtype, inputs.shape[-1])

    return Exhibit(result.detach().reshape(1, -1), (inputs, gradient), compute)


def _activation_output(call: Call, result: Tensor) -> Exhibit:
    """Of the layer before it, whose bias is added here; where it is gated, its first half is the gate."""
    layer, config = call.module, call.module.config
    assert call.output is not None, "it is a linear layer"
    given, bias = _rows(call.output), layer.bias
    half = given.shape[-1] // 2 if config.gated_linear_unit else None

    def part(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        return _taken(given, rows, columns), None if bias is None else _taken(bias, columns)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return activated(
            config.activation_func,
            *part(rows, columns),
            None if half is None else part(rows, columns + half),
            result.dtype,
            clamp=getattr(config, "activation_func_clamp_value", None),
            offset=getattr(config, "glu_linear_offset", 0.0),
        )

    return Exhibit(_rows(result), (given,) if bias is None else (given, bias), compute)


def _local_ids(call: Call) -> Tensor:
    """Rows of this rank's part of the vocabulary, [tokens]; -1: of another rank's."""
    ids = call.args[0].reshape(-1).cpu() - call.module.vocab_start_index
    return torch.where((ids >= 0) & (ids < len(call.module.weight)), ids, -1)


def _word_output(call: Call, result: Tensor) -> Exhibit:
    ids, weight = _local_ids(call), call.module.weight

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        looked = _taken(weight, ids[rows].clamp(min=0), columns)
        return chosen(torch.where(ids[rows] < 0, torch.zeros((), dtype=looked.dtype), looked))

    return Exhibit(_rows(result), (ids, weight), compute)


def _word_weight(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over the tokens of an entry, added in the type of the result."""
    ids, gradient = _local_ids(call), _rows(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = _taken(gradient.T, columns)
        here = (ids[None, :] == rows[:, None]).to(terms.dtype)
        return product(here, terms, result.dtype, working=result.dtype)

    return Exhibit(_rows(result), (ids, gradient), compute)


Maker = Callable[[Call, Tensor], Exhibit]
MAKERS: Mapping[tuple[str, str, str], Maker] = {
    **{(kind, phase, "output"): _linear_output for kind in _LINEAR for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): _linear_input for kind in _LINEAR},
    **{(kind, WEIGHT_GRAD, "weight"): _linear_weight for kind in _LINEAR},
    **{(kind, WEIGHT_GRAD, "bias"): _bias for kind in (*_LINEAR, *_NORMS)},
    **{(kind, phase, "output"): _sum_output for kind in _SUM for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): _sum_input for kind in _SUM},
    **{(kind, phase, "output"): _norm_output for kind in _NORMS for phase in (FORWARD, RECOMPUTE)},
    **{(kind, BACKWARD, "input"): _norm_input for kind in _NORMS},
    **{(kind, WEIGHT_GRAD, "weight"): _norm_weight for kind in _NORMS},
    **{(ACTIVATION, phase, "output"): _activation_output for phase in (FORWARD, RECOMPUTE)},
    **{(EMBEDDING, phase, "output"): _word_output for phase in (FORWARD, RECOMPUTE)},
    (EMBEDDING, WEIGHT_GRAD, "weight"): _word_weight,
}
"""By kind of submodule, phase and tensor. A wrong factor shows before, where it was made."""
SEEN_AT = {ACTIVATION: FC1}
"""Kinds that are no modules, by the kind of the one before them in their block."""
