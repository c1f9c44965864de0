"""Results of submodules, recomputed element by element in fp64 from what their calls were given (``Exhibit``).

A result is a matrix: rows are tokens, or those of a weight. ``MAKERS`` says by kind of submodule, phase and tensor
what computes it: linear layers, norms, word embeddings and learned positions, residual sums, activation, attention;
``make_exhibit`` also the loss, and the gradient of the logits, where one rank has the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.determinism import capture_rng
from megasdc.model.gpt import PositionEmbedding, ResidualAdd, TorchAttention, hidden_masks
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
from megasdc.sdc.referee.attention import (
    Off,
    attended,
    elements,
    from_exact,
    head_gradients,
    rotated,
    summed,
    unrotated,
)
from megasdc.sdc.referee.rounding import (
    WORKING,
    Exact,
    NormMoments,
    activated,
    activated_input,
    chosen,
    logit_gradients,
    normalized,
    product,
    residual,
    token_losses_fp64,
)
from megasdc.sdc.referee.rounding import norm_input as exact_input
from megasdc.sdc.referee.rounding import norm_weight as exact_weight
from megasdc.sdc.verdict import OWN_CODE, REFEREE
from megasdc.tensors.nested import map_in, tensors_in

LOCAL = "_forward_impl"
"""Method of Megatron-core's parallel linear layers that computes this rank's own part."""
METHODS = (LOCAL, "per_token")
"""Methods whose calls are seen in place of ``forward``, where a module has them by a class of ``OWNERS``: ``per_token``
is the loss's."""
OWNERS = ("megasdc", "megatron")


@dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Args:
        module: module of the submodule.
        args: positional arguments, those of linear layers by name included.
        options: arguments by name, of others than linear layers.
        output: the first tensor that it returned; None: there is none.
        gradients: gradients of the output, once there is one.
        received: gradients of its input, once there is one.
        mask: scaled mask of dropout, shaped as the output, or as attention's weights, [b, n, s, s]; None: no dropout.
        chance: state of random generators when the call began, where calls are copied.
        autocast: type of automatic mixed precision; None: it was off.
    """

    module: Any
    args: tuple[Any, ...]
    output: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chance: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Trust:
    """Limits, as multiples of bounds, by which results are judged.

    Args:
        basis: basis of rulings.
        inner: largest error of a right result, in bounds.
        outer: smallest error of a wrong result in some element, in bounds.
        compared: whether elements that agree must be within ``inner`` bounds, too.
        alone: limit in place of ``outer`` where too few of these elements tell anything.
    """

    basis: str
    inner: float = 1.0
    outer: float = 1.0
    compared: bool = False
    alone: float = 1.0


PROVED = Trust(REFEREE)
"""Trust in a known sum or function with a proved bound."""
LIKELY = Trust(REFEREE, 1.0, 4.0, compared=True, alone=math.inf)
"""Trust in a proved bound of what a submodule seems to compute by its structure: two right results of another function
are at most two bounds apart, so that none is outside of four where the other is within one.
"""
ESTIMATED = Trust(OWN_CODE, 8.0, 32.0, compared=True, alone=math.inf)
"""Trust in a submodule's own code in fp64 with an estimate of its rounding."""


def estimated(kind: torch.dtype) -> Trust:
    """The trust in an estimate for a type: where ranks agree on nothing, a wrong result is outside of what bf16, which
    the code of one of them may have had on the way, makes of it.
    """
    coarser = torch.finfo(torch.bfloat16).eps / torch.finfo(kind).eps
    return replace(ESTIMATED, alone=max(ESTIMATED.outer, ESTIMATED.inner * coarser))


@dataclass(frozen=True)
class Exhibit:
    """A result that can be recomputed.

    Args:
        result: the result as a matrix, [R, C].
        factors: operands of the result, which are equal on all ranks that are compared.
        compute: returns elements in fp64, from their rows [n] and columns [n].
        is_product: ``factors`` are left [R, K], right [C, K] and, if there is one, bias [C]: left right^T + bias.
        trust: trust in the way of computing it and in its bounds.
        held: names of the last of ``factors``: parameters and buffers of the submodule.
    """

    result: Tensor
    factors: tuple[Tensor, ...]
    compute: Callable[[Tensor, Tensor], Exact]
    is_product: bool = False
    trust: Trust = PROVED
    held: tuple[str, ...] = ()


@contextmanager
def record_calls(module: Any, seen: list[Call] | None = None) -> Iterator[list[Call]]:
    """Context in which calls of a module are kept, in their order; ``module`` None: nothing is kept.

    Args:
        seen: list to which calls are added, with tensors as they are, as long as nothing changes them, and with
            gradients that come later; None: a new list, with copies, and with gradients that come inside.
    """
    calls, copies = ([], True) if seen is None else (seen, False)
    if module is None:
        yield calls
        return
    name = _method_of(module)
    own, was = getattr(module, name), vars(module).get(name)
    hooks: list[Any] = []

    def record_gradient(tensor: Tensor, gradients: list[Tensor]) -> None:
        if tensor.requires_grad:
            hook = tensor.register_hook(lambda gradient: gradients.append(_detached(gradient, copies)))
            hooks.extend([hook] if copies else [])  # else the gradient may come after calls are kept no more

    def recorded(*args: Any, **options: Any) -> Any:
        given = (*args, *(options.get(one) for one in ("input", "weight", "bias"))) if name == LOCAL else args
        place, call = len(calls), Call(module, tuple(_detached(one, copies) for one in given))
        if copies:
            named = {} if name == LOCAL else {key: _detached(one, copies) for key, one in options.items()}
            call = replace(call, options=named, chance=capture_rng(), autocast=_autocast((given, named)))
        calls.append(call)  # before, since a listener may be called inside
        inputs = options.get("input", args[0] if args else None)
        if copies and isinstance(inputs, Tensor):
            record_gradient(inputs, call.received)
        output = own(*args, **options)
        first = next(tensors_in(output), None)
        if first is not None:
            calls[place] = replace(call, output=first.detach(), mask=_mask_of(module, args))
            record_gradient(first, call.gradients)
        return output

    setattr(module, name, recorded)
    try:
        yield calls
    finally:
        for hook in hooks:  # those of a parameter would stay for as long as it does
            hook.remove()
        if was is None:
            delattr(module, name)
        else:
            setattr(module, name, was)


def _method_of(module: Any) -> str:
    """The method whose calls are seen: a user's module may have others of the same names."""
    for name in METHODS:
        made_by = next((one.__module__ for one in type(module).__mro__ if name in vars(one)), "")
        if made_by.partition(".")[0] in OWNERS:
            return name
    return "forward"


def _detached(value: Any, copies: bool) -> Any:
    def apart(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return tensor.detach().clone() if copies else tensor.detach()

    return map_in(Tensor, value, apart)


def _autocast(given: Any) -> torch.dtype | None:
    """Type of automatic mixed precision that is on, on the device of what a submodule is given."""
    kind = next((one.device.type for one in tensors_in(given)), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _mask_of(module: Any, args: Sequence[Any]) -> Tensor | None:
    if isinstance(module, PositionEmbedding):
        return module.mask(args[0])
    if isinstance(module, TorchAttention):
        return module.masks(args[0].permute(1, 2, 0, 3)) if module.training and module.dropout > 0 else None
    if not isinstance(module, ResidualAdd) or not module.training or not args[2]:
        return None
    return hidden_masks(module.streams, args[0][0], args[2], module.layer_number, module.site, module.sequence_shard)


def one_call(address: Address, calls: Sequence[Call]) -> Call | str:
    """The call that a result is of; a text: there is none, or it may be of several."""
    if "#" in address.slot:
        return "it is computed several times in a micro-batch"
    if address.phase == FORWARD:
        some = list(calls[:1])
    elif address.phase == RECOMPUTE:
        some = list(calls[1:])
    else:
        some = [one for one in calls if one.gradients]
    if len(some) != 1:
        return "it is computed several times in a micro-batch" if some else "what it was made of was not seen"
    if some[0].output is None or next(tensors_in((some[0].args, some[0].options)), None) is None:
        return "it is given, or returns, no tensor"
    return some[0]


def rows_as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as a matrix, whose columns are its last dimension."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def taken(tensor: Tensor, *places: Tensor) -> Tensor:
    """Elements, or rows, of a tensor, on the host."""
    return tensor.detach()[tuple(one.to(tensor.device) for one in places)].cpu()


def _linear_factors(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input [tokens, K], weight [C, K] and bias [C] of a parallel layer, or of a tied output, which has no bias."""
    given, weight, *rest = call.args
    return rows_as_matrix(given), weight.detach(), rest[0] if rest else None


def _product(result: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Exhibit:
    """Exhibit of the product ``left right^T + bias``."""
    factors = (left, right) if bias is None else (left, right, bias)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        added = None if bias is None else taken(bias, columns)
        return product(taken(left, rows), taken(right, columns), result.dtype, added)

    return Exhibit(rows_as_matrix(result), factors, compute, is_product=True)


def linear_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a linear layer's output: the input times the weight, and the bias where it is added."""
    return _product(result, *_linear_factors(call))


def linear_input(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a linear layer's input gradient: the output's gradient times the weight."""
    return _product(result, rows_as_matrix(call.gradients[-1]), _linear_factors(call)[1].T)


def linear_weight(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a linear layer's weight gradient: the output's gradient times the input."""
    return _product(result, rows_as_matrix(call.gradients[-1]).T, _linear_factors(call)[0].T)


def bias_gradient(call: Call, result: Tensor) -> Exhibit:
    """The sum of the output's gradient over all tokens; one row."""
    gradient = rows_as_matrix(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        return product(terms, torch.ones_like(terms), result.dtype)

    return Exhibit(result.detach().reshape(1, -1), (gradient,), compute)


def _norm_factors(call: Call) -> tuple[Tensor, ...]:
    """Input [tokens, K], weight [K] and, if the norm has one, bias [K]."""
    bias = getattr(call.module, "bias", None)
    return (rows_as_matrix(call.args[0]), call.module.weight, *(() if bias is None else (bias,)))


def _moments(call: Call, rows: Tensor) -> NormMoments:
    """Moments of rows of a norm's input; a norm of a class of its own may round each operation to its input's type."""
    steps = call.args[0].dtype if hasattr(call.module, "centred") else WORKING
    return NormMoments.of(rows, call.module.eps, centred=_is_centred(call), steps=steps)


def norm_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a norm's output: the normalised input, times the weight, and the bias."""
    inputs, weight, *bias = _norm_factors(call)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, (scale, *added) = taken(inputs, rows), (taken(one, columns) for one in (weight, *bias))
        own = given.gather(-1, columns[:, None])[:, 0]
        found = added[0] if added else None
        return normalized(own, _moments(call, given), scale, found, result.dtype, inputs.shape[-1])

    return Exhibit(rows_as_matrix(result), (inputs, weight, *bias), compute)


def norm_input_exhibit(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a norm's input gradient, by the moments of each row and sums over it."""
    inputs, weight, *_ = _norm_factors(call)
    gradient, centred = rows_as_matrix(call.gradients[-1]), _is_centred(call)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        given, slope = taken(inputs, rows), taken(gradient, rows)
        scale = weight.detach().cpu()
        return exact_input(slope, given, columns, _moments(call, given), scale, result.dtype, centred=centred)

    return Exhibit(rows_as_matrix(result), (inputs, weight, gradient), compute)


def norm_weight_exhibit(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of the gradient of a norm's weight, as one row."""
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
    """Whether a norm subtracts the mean; a norm of a class of its own says so."""
    return bool(getattr(call.module, "centred", isinstance(call.module, nn.LayerNorm)))


def _summed_in(call: Call, result: Tensor) -> torch.dtype:
    """The type that gradients of weight and bias are summed in: their own in PyTorch's LayerNorm on a processor, and,
    as it may be, in a norm of a class of its own.
    """
    in_its_own = isinstance(call.module, nn.LayerNorm) and result.device.type == "cpu"
    return result.dtype if in_its_own or hasattr(call.module, "centred") else WORKING


SLOTS = ("query", "key", "value")
"""Inputs of attention, in the order of its gradients."""


def sum_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a residual sum: residual + mask (branch + bias)."""
    (branch, bias), other = call.args[0], call.args[1]
    parts = [None if one is None else rows_as_matrix(one) for one in (branch, call.mask, other)]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        own, mask, rest = (None if one is None else taken(one, rows, columns) for one in parts)
        assert own is not None, "there is a branch"
        return residual(own, None if bias is None else taken(bias, columns), mask, rest, result.dtype)

    factors = (*parts, bias)
    return Exhibit(rows_as_matrix(result), tuple(one for one in factors if one is not None), compute)


def sum_input(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of the gradient of a residual sum's branch: the mask times the gradient."""
    gradient, mask = rows_as_matrix(call.gradients[-1]), None if call.mask is None else rows_as_matrix(call.mask)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        kept = None if mask is None else taken(mask, rows, columns)
        return residual(taken(gradient, rows, columns), None, kept, None, result.dtype)

    return Exhibit(rows_as_matrix(result), (gradient,) if mask is None else (gradient, mask), compute)


def activation_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of an activation, from the layer before, whose bias is added here; a gate is its first half."""
    layer, config = call.module, call.module.config
    assert call.output is not None, "it is a linear layer"
    given, bias = rows_as_matrix(call.output), layer.bias
    half = given.shape[-1] // 2 if config.gated_linear_unit else None

    def part(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        return taken(given, rows, columns), None if bias is None else taken(bias, columns)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return activated(
            config.activation_func,
            *part(rows, columns),
            None if half is None else part(rows, columns + half),
            result.dtype,
            clamp=getattr(config, "activation_func_clamp_value", None),
            offset=getattr(config, "glu_linear_offset", 0.0),
        )

    return Exhibit(rows_as_matrix(result), (given,) if bias is None else (given, bias), compute)


def activation_input(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of an activation's input gradient, from the layer before it; None: it is clamped or has an offset."""
    layer, config = call.module, call.module.config
    if getattr(config, "activation_func_clamp_value", None) is not None or getattr(config, "glu_linear_offset", 0) != 0:
        return None
    assert call.output is not None, "it is a linear layer"
    given_output, bias, slopes = rows_as_matrix(call.output), layer.bias, rows_as_matrix(call.gradients[-1])
    half = given_output.shape[-1] // 2 if config.gated_linear_unit else None
    steps = config.activation_func is torch.nn.functional.relu

    def part(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        return taken(given_output, rows, columns), None if bias is None else taken(bias, columns)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        if half is None:
            gate = part(rows, columns)
            slope = taken(slopes, rows, columns)
            return activated_input(config.activation_func, slope, *gate, None, result.dtype, steps=steps)
        first = columns % half
        gate, linear, slope = part(rows, first), part(rows, first + half), taken(slopes, rows, first)
        of_gate = activated_input(config.activation_func, slope, *gate, linear, result.dtype, steps=steps)
        of_linear = activated(config.activation_func, *gate, (slope, None), result.dtype)
        is_gate = columns < half
        return Exact(
            torch.where(is_gate, of_gate.values, of_linear.values),
            torch.where(is_gate, of_gate.bounds, of_linear.bounds),
        )

    factors = (given_output, slopes)
    return Exhibit(rows_as_matrix(result), factors if bias is None else (*factors, bias), compute)


def attention_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of attention's output, by rows of heads."""
    module, (query, key, value) = call.module, call.args[:3]
    batch, heads, width = query.shape[1], query.shape[2], value.shape[3]
    shared = heads // key.shape[2]
    turn = _rotation(call)

    def rotated_tokens(tensor: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Query or key of tokens, [T, d], rotated where the module does that, and its errors."""
        tokens = tensor.cpu()
        if turn is None:
            return tokens.double(), torch.zeros_like(tokens, dtype=torch.float64)
        cosine, sine = (one[first:end] for one in turn)
        return rotated(tokens, cosine, sine, query.dtype)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        values, bounds = torch.zeros(2, len(rows), dtype=torch.float64)
        for row, head in sorted({(int(r), int(c) // width) for r, c in zip(rows, columns, strict=True)}):
            token, sample, group = row // batch, row % batch, head // shared
            here = (rows == row) & (columns // width == head)
            asked = rotated_tokens(query[token : token + 1, sample, head], token, token + 1)
            keys = rotated_tokens(key[: token + 1, sample, group], 0, token + 1)
            wanted = value[: token + 1, sample, group].cpu()[:, columns[here] % width]
            mask = None if call.mask is None else call.mask[sample, head, token, : token + 1].cpu()
            found = attended((asked[0][0], asked[1][0]), keys, wanted, module.scale, result.dtype, mask)
            values[here], bounds[here] = found.values, found.bounds
        return Exact(values, bounds)

    return Exhibit(rows_as_matrix(result), (query, key, value, *_masks(call)), compute)


def attention_input(call: Call, result: Tensor, slot: str) -> Exhibit:
    """Exhibit of the gradient of ``slot``, one of query, key and value."""
    module, (query, key, value) = call.module, call.args[:3]
    batch, own_heads = query.shape[1], result.shape[2]
    shared = query.shape[2] // key.shape[2]
    slopes = call.gradients[-1].reshape(*query.shape[:3], value.shape[3])
    turn, kind, place = _rotation(call), result.dtype, SLOTS.index(slot)

    def asked(tensor: Tensor, sample: int, head: int) -> Off:
        tokens = tensor[:, sample, head].cpu()
        return from_exact(tokens) if turn is None else Off(*rotated(tokens, *turn, kind))

    def of_head(sample: int, head: int) -> Off:
        """Gradient of one head, for all tokens; key and value sum those of all queries that share them."""
        queries = [head] if slot == "query" else range(head * shared, (head + 1) * shared)
        parts = [
            head_gradients(
                asked(query, sample, one),
                asked(key, sample, one // shared),
                value[:, sample, one // shared].cpu(),
                slopes[:, sample, one].cpu(),
                module.scale,
                kind,
                None if call.mask is None else call.mask[sample, one].cpu(),
            )[place]
            for one in queries
        ]
        total = summed(parts, kind)
        return total if turn is None or slot == "value" else unrotated(total.rounded(kind, 2), *turn, kind)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        values, bounds = torch.zeros(2, len(rows), dtype=torch.float64)
        tokens, samples, heads = rows // (batch * own_heads), rows // own_heads % batch, rows % own_heads
        for sample, head in sorted(set(zip(samples.tolist(), heads.tolist(), strict=True))):
            here = (samples == sample) & (heads == head)
            found = elements(of_head(sample, head), tokens[here], columns[here], kind)
            values[here], bounds[here] = found.values, found.bounds
        return Exact(values, bounds)

    return Exhibit(rows_as_matrix(result), (query, key, value, slopes, *_masks(call)), compute)


def _masks(call: Call) -> tuple[Tensor, ...]:
    return () if call.mask is None else (call.mask,)


def _rotation(call: Call) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of each token, [T, d]; None: nothing is rotated."""
    module = call.module
    if module.rotation is None:
        return None
    cosine, sine = (one[:, 0, 0].cpu() for one in module.rotation(call.args[0]))
    return cosine, sine


def _local_ids(call: Call) -> Tensor:
    """Rows of this rank's part of the vocabulary, [tokens]; -1: of another rank's. An embedding of PyTorch is whole."""
    ids = call.args[0].reshape(-1).cpu() - getattr(call.module, "vocab_start_index", 0)
    return torch.where((ids >= 0) & (ids < len(call.module.weight)), ids, -1)


def word_output(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a word embedding's output: a copy of the entry; 0 for one of another rank."""
    ids, weight = _local_ids(call), call.module.weight

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        looked = taken(weight, ids[rows].clamp(min=0), columns)
        return chosen(torch.where(ids[rows] < 0, torch.zeros((), dtype=looked.dtype), looked))

    return Exhibit(rows_as_matrix(result), (ids, weight), compute)


def word_weight(call: Call, result: Tensor) -> Exhibit:
    """Exhibit of a word's gradient: sum of the output's gradient over its tokens, added in the type of the result."""
    ids, gradient = _local_ids(call), rows_as_matrix(call.gradients[-1])
    if (padding := getattr(call.module, "padding_idx", None)) is not None:
        ids = torch.where(ids == padding, -1, ids)  # which gets no gradient

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        terms = taken(gradient.T, columns)
        here = (ids[None, :] == rows[:, None]).to(terms.dtype)
        return product(here, terms, result.dtype, working=result.dtype)

    return Exhibit(rows_as_matrix(result), (ids, gradient), compute)


def position_output(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of a position embedding's output: mask (word + position), without the parts that it lacks."""
    if _is_part(call):
        return None
    weight, samples = _weight(call), call.args[0].shape[1]
    words, mask = rows_as_matrix(call.args[0]), None if call.mask is None else rows_as_matrix(call.mask)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        position = None if weight is None else taken(weight, rows // samples, columns)
        kept = None if mask is None else taken(mask, rows, columns)
        return residual(taken(words, rows, columns), position, kept, None, result.dtype)

    return Exhibit(rows_as_matrix(result), tuple(one for one in (words, weight, mask) if one is not None), compute)


def position_input(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of a position embedding's input gradient: the mask times the gradient."""
    return None if _is_part(call) else sum_input(call, result)


def position_weight(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of a position's gradient: sum over samples of mask times gradient; 0 for positions that no token has."""
    if _is_part(call):
        return None
    gradient = call.gradients[-1]
    mask = torch.ones_like(gradient) if call.mask is None else call.mask

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        here = (rows < len(gradient))[:, None]
        place = rows.clamp(max=len(gradient) - 1)
        slopes, kept = (one.cpu()[place, :, columns] * here for one in (gradient, mask))
        return product(slopes, kept, result.dtype, working=result.dtype)

    return Exhibit(rows_as_matrix(result), (gradient, mask), compute)


def _weight(call: Call) -> Tensor | None:
    positions = call.module.positions
    return None if positions is None else positions.weight


def _is_part(call: Call) -> bool:
    """Whether ranks of a tensor group have parts of the sequence."""
    return bool(call.module.context.config.sequence_parallel)


def loss_output(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of losses [b, s], from logits [s, b, v]."""
    logits, labels = call.args[:2]
    if call.module.tensor > 1:
        return None
    real = logits[..., : call.module.real_columns]

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        return token_losses_fp64(real[columns, rows].cpu(), labels[rows, columns].cpu())

    return Exhibit(rows_as_matrix(result), (logits, labels), compute)


def logits_gradient(call: Call, result: Tensor) -> Exhibit | None:
    """Exhibit of the gradients of logits, [s, b, v]."""
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
"""Makers by kind of submodule, phase and tensor. A wrong factor shows before, where it was made."""
BETWEEN = {ACTIVATION: (FC1, FC2)}
"""Kinds that are no modules, each with the kinds before and after it in its block."""


def make_exhibit(
    address: Address, kind: str, calls: Sequence[Call], result: Tensor, after: Sequence[Call] = ()
) -> Exhibit | None:
    """The exhibit of a result that was computed in one of these calls.

    Args:
        calls: calls of the submodule, or, where it is no module, of the one before it.
        after: calls of the one after it, where it is no module: their inputs are the submodule's outputs.

    Returns:
        None: the referee does not compute such results, or what they were made of was not seen.
    """
    if after:
        calls = [replace(one, gradients=other.received) for one, other in zip(calls, after, strict=True)]
    make = MAKERS.get((kind, address.phase, address.slot))
    with_gradient = [one for one in calls if one.gradients]
    seen = calls[:1] if address.phase == FORWARD else calls[-1:] if address.phase == RECOMPUTE else with_gradient[-1:]
    return make(seen[0], result) if make is not None and seen else None
