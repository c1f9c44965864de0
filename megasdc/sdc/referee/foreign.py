"""Results of submodules of a model that is not megasdc's, recomputed in fp64: by class, or by its own code.

Known, as any model has them, are linear layers, norms of the last dimension, activations and embeddings of PyTorch's
own classes, and of transformers' and DeepSpeed's that compute the same. With automatic mixed precision a linear layer
rounds what it is given to the type of its output, and computes in it. A norm of a class of its own is taken for an
RMSNorm, or a LayerNorm where it has a bias, by its weight and eps; that is believed where results on which ranks agree
are within its bounds.

Of any other submodule it is its own code in fp64, and what went in between submodules. A copy of the submodule without
hooks has parameters and buffers in fp64, and is given what the device's had been given, with random generators as they
were. What its class computes is trusted only where the results on which ranks agree are what it says, and where those
of one rank are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megasdc.common.addresses import BACKWARD, FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.determinism import capture_rng, restore_rng
from megasdc.sdc.referee.recompute import (
    LIKELY,
    Call,
    Exhibit,
    bias_gradient,
    estimated,
    linear_input,
    linear_weight,
    norm_bias,
    norm_input_exhibit,
    norm_output,
    norm_weight_exhibit,
    one_call,
    rows_as_matrix,
    taken,
    word_output,
    word_weight,
)
from megasdc.sdc.referee.rounding import NARROW, Exact, Unfit, activated, activated_input, estimate, product, rounded
from megasdc.tensors.nested import tensors_in

Maker = Callable[[Call, Tensor], Exhibit | None]
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(module: nn.Module) -> bool:
    """Whether results of a submodule can be recomputed: it has its weight, if any, and computes as its class."""
    kind = _class_of(module)
    if kind is None:
        return False
    held = module._parameters.get("weight")
    return kind in ACTIVATIONS or isinstance(held, nn.Parameter)


def make_plain(address: Address, calls: Sequence[Call], result: Tensor, used_once: bool = False) -> Exhibit | None:
    """The exhibit of a result that was computed in one of these calls of a plain submodule.

    Args:
        used_once: whether one operation has used the parameter, if this is its gradient; others are sums.

    Returns:
        None: such results are not computed, or what they were made of was not seen, or was not of one call.
    """
    call = one_call(address, calls)
    if isinstance(call, str) or not _takes_one_tensor(call) or (address.phase == WEIGHT_GRAD and not used_once):
        return None
    make = MAKERS.get(_class_of(call.module) or "", {}).get((address.phase, address.slot))
    return None if make is None else make(call, result)


def _takes_one_tensor(call: Call) -> bool:
    """Whether a call has a tensor as its first argument, and no arguments by name."""
    return bool(call.args) and isinstance(call.args[0], Tensor) and not call.options


def _class_of(module: nn.Module) -> str | None:
    """Key of ``MAKERS`` for a module, the name of the class that computes as it does; None: it is not known."""
    forward = type(module).forward
    name = f"{forward.__module__}.{forward.__qualname__}".removesuffix(".forward")
    if name in MAKERS:
        return name
    return OWN_NORM if _is_norm(module) else None


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has the parameters and eps of a norm of the last dimension, and nothing else."""
    own = module._parameters
    weight = own.get("weight")
    alone = not module._modules and not module._buffers and not own.keys() - {"weight", "bias"}
    return alone and weight is not None and weight.dim() == 1 and _eps_of(module) is not None


def _eps_of(module: Any) -> float | None:
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((one for one in found if isinstance(one, float)), None)


# --- linear layers ----------------------------------------------------------------------------------------------------


def _linear(make: Maker) -> Maker:
    """Maker for a linear layer, with input, weight and bias in the type of its operation."""

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
    """Exhibit of the input times the weight; a bias is added by the same operation, as one more term, or after it."""
    given, weight, *biases = call.args
    left = rows_as_matrix(given)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        factors = taken(left, rows), taken(weight, columns)
        if not biases:
            return product(*factors, result.dtype)
        bias = taken(biases[0], columns)
        after = product(*factors, result.dtype, bias)
        ones, added = torch.ones_like(bias[:, None]), bias[:, None]
        inside = product(torch.cat((factors[0], ones), -1), torch.cat((factors[1], added), -1), result.dtype)
        return Exact(after.values, after.bounds.maximum(inside.bounds) + (after.values - inside.values).abs())

    return Exhibit(rows_as_matrix(result), (left, weight, *biases), compute, is_product=True)


def _turned(make: Maker) -> Maker:
    """Maker for a linear layer whose weight is [K, C]."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        own = SimpleNamespace(weight=call.module.weight.detach().T, bias=call.module.bias)
        return make(replace(call, module=own), result.T if make is _WEIGHT else result)

    return made


def _of_rank(make: Maker) -> Maker:
    """Maker for a layer of DeepSpeed's AutoTP that gathers no output, in one type: mixed precision leaves bias wide."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        kinds = {one.dtype for one in (call.args[0], call.module.weight, result, call.output) if one is not None}
        return None if len(kinds) > 1 or getattr(call.module, "gather_output", False) else make(call, result)

    return made


# --- norms, activations and embeddings --------------------------------------------------------------------------------


def _norm(make: Maker) -> Maker:
    """Maker for a norm of the last dimension alone, all in one type."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module, given = call.module, call.args[0]
        kinds = {one.dtype for one in (given, module.weight, result, *call.gradients)}
        if len(kinds) > 1 or result.dtype not in TYPES or module.eps is None or len(module.normalized_shape) != 1:
            return None
        return make(call, result)

    return made


def _own_norm(make: Maker) -> Maker:
    """Maker for a norm of a class of its own.

    It may add up gradients of parameters in the type of the result, and round each operation to it.
    """

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module, given = call.module, call.args[0]
        kinds = {one.dtype for one in (given, module.weight, result, *call.gradients)}
        overflows = result.dtype == torch.float16  # squares, and powers of the factor, do in its own operations
        if len(kinds) > 1 or result.dtype not in TYPES or overflows or module.weight.shape != given.shape[-1:]:
            return None
        bias = getattr(module, "bias", None)
        like = SimpleNamespace(weight=module.weight, bias=bias, eps=_eps_of(module), centred=bias is not None)
        found = make(replace(call, module=like), result)
        return None if found is None else replace(found, trust=LIKELY)

    return made


def _activation(call: Call, result: Tensor) -> Exhibit | None:
    function = _function(call.module)
    if function is None or call.args[0].dtype != result.dtype or result.dtype not in TYPES:
        return None
    given = rows_as_matrix(call.args[0])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        gate = taken(given, rows, columns)
        return _of_several(function, activated(function, gate, None, None, result.dtype), gate.double().abs(), result)

    return Exhibit(rows_as_matrix(result), (given,), compute)


def _activation_input(call: Call, result: Tensor) -> Exhibit | None:
    function, kinds = _function(call.module), {call.args[0].dtype, result.dtype, call.gradients[-1].dtype}
    if function is None or len(kinds) > 1 or result.dtype not in TYPES:
        return None
    given, slopes = rows_as_matrix(call.args[0]), rows_as_matrix(call.gradients[-1])

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        gate, slope = taken(given, rows, columns), taken(slopes, rows, columns)
        found = activated_input(function, slope, gate, None, None, result.dtype, steps=function is F.relu)
        size = gate.double().abs()
        return _of_several(function, found, slope.double().abs() * (1 + size + size**3 / 16), result)

    return Exhibit(rows_as_matrix(result), (given, slopes), compute)


def _of_several(function: Callable[[Tensor], Tensor], found: Exact, reach: Tensor, result: Tensor) -> Exact:
    """Elements with the bounds of devices that use several operations of the result's type; ReLU is one operation.

    With unit roundoff u: of ``x s(x)`` the logistic function is off by u, of ``x (1 + t(a)) / 2`` the argument by 8 u,
    which t makes at most 0.45 of (the largest ``a / cosh(a)^2``), t by u, the sum by 2 u, products by 2 u: less than
    4 u of |x|. In derivatives these are times |x| or, where ``1 - t^2``, which is off by 2 u, meets that of a, times
    0.8 |x| + 0.11 |x|^3. All are doubled.
    """
    share = 0.0 if function is F.relu else 4 * torch.finfo(result.dtype).eps
    return Exact(found.values, found.bounds + share * reach)


def _function(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Function that an activation computes by one operation; None: by several, or in place."""
    name = _class_of(module)
    if name in (_SILU, f"{_HF}.SiLUActivation"):
        return None if getattr(module, "inplace", False) else F.silu
    if name == _RELU:
        return None if module.inplace else F.relu
    if name == _GELU:
        return partial(F.gelu, approximate=module.approximate)
    act = getattr(module, "act", None)  # of transformers
    if act is F.gelu:
        return F.gelu
    return act if isinstance(act, partial) and act.func is F.gelu else None


def _words(make: Maker) -> Maker:
    """Maker for an embedding that changes no weights and scales no gradient."""

    def made(call: Call, result: Tensor) -> Exhibit | None:
        module = call.module
        odd = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        return None if odd or result.dtype not in TYPES else make(call, result)

    return made


def tied_words(of_words: Sequence[Call], of_head: Sequence[Call], result: Tensor) -> Exhibit | str | None:
    """Exhibit of the gradient of a weight that an embedding and a linear layer share: the sum of both parts.

    Args:
        of_words: calls of the embedding.
        of_head: calls of the linear layer.
    """
    address = Address(0, 0, WEIGHT_GRAD, "", "weight")
    calls = [one_call(address, one) for one in (of_words, of_head)]
    parts = []
    for call, kind in zip(calls, (_EMBEDDING, _LINEAR), strict=True):
        if isinstance(call, str):
            return call
        if _class_of(call.module) != kind or not _takes_one_tensor(call):
            return None
        part = MAKERS[kind][WEIGHT_GRAD, "weight"](call, result)
        if part is None:
            return None
        parts.append(part)

    def compute(rows: Tensor, columns: Tensor) -> Exact:
        first, second = (one.compute(rows, columns) for one in parts)
        values = first.values + second.values
        return Exact(values, rounded(first.bounds + second.bounds, values, result.dtype))

    return Exhibit(rows_as_matrix(result), tuple(one for part in parts for one in part.factors), compute)


def _both(make: Maker) -> dict[tuple[str, str], Maker]:
    return {(phase, "output"): make for phase in (FORWARD, RECOMPUTE)}


def _norms(known: Callable[[Maker], Maker]) -> dict[tuple[str, str], Maker]:
    return {
        **_both(known(norm_output)),
        (BACKWARD, "input"): known(norm_input_exhibit),
        (WEIGHT_GRAD, "weight"): known(norm_weight_exhibit),
        (WEIGHT_GRAD, "bias"): known(norm_bias),
    }


_NN, _HF = "torch.nn.modules", "transformers.activations"
_TP = "deepspeed.module_inject.layers"
"""Module of AutoTP's layers, whose sums over ranks and gathered outputs are no results of one layer."""
_LINEAR, _EMBEDDING = f"{_NN}.linear.Linear", f"{_NN}.sparse.Embedding"
_SILU, _GELU, _RELU = (f"{_NN}.activation.{name}" for name in ("SiLU", "GELU", "ReLU"))
OWN_NORM = "a norm of a class of its own"
ACTIVATIONS = frozenset(
    (_SILU, _GELU, _RELU, *(f"{_HF}.{name}" for name in ("SiLUActivation", "GELUActivation", "GELUTanh")))
)
"""Classes that compute an activation and nothing else."""
_WEIGHT = _linear(linear_weight)
_LAYER = {
    **_both(_linear(_output)),
    (BACKWARD, "input"): _linear(linear_input),
    (WEIGHT_GRAD, "weight"): _WEIGHT,
    (WEIGHT_GRAD, "bias"): _linear(bias_gradient),
}
MAKERS: Mapping[str, Mapping[tuple[str, str], Maker]] = {
    _LINEAR: _LAYER,
    "transformers.pytorch_utils.Conv1D": {place: _turned(make) for place, make in _LAYER.items()},
    f"{_TP}.LinearLayer": {place: _of_rank(make) for place, make in _LAYER.items() if place[0] != BACKWARD},
    f"{_TP}.LinearAllreduce": {place: _of_rank(make) for place, make in _LAYER.items() if place[1] != "output"},
    **dict.fromkeys((f"{_NN}.normalization.LayerNorm", f"{_NN}.normalization.RMSNorm"), _norms(_norm)),
    OWN_NORM: _norms(_own_norm),
    **{name: {**_both(_activation), (BACKWARD, "input"): _activation_input} for name in ACTIVATIONS},
    _EMBEDDING: {**_both(_words(word_output)), (WEIGHT_GRAD, "weight"): _words(word_weight)},
}
"""Makers by name of the class, phase and tensor."""


LARGEST = 2**31
"""Largest number of products of a parameter and a token: about 27 passes over them take a core some ten seconds."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward", "_compiled_call_impl")
"""Methods that a submodule may have of its own, in place of its class's."""
SHARED = (dist.ProcessGroup, ModuleType, type)
"""Types that computing does not change and that cannot be copied."""

Path = Sequence[str]
"""Names of a submodule inside another one, from the outside in."""


def own_result(address: Address, calls: Sequence[Call], result: Tensor, used_once: bool = True) -> Exhibit | str:
    """The exhibit of a result of a submodule, by its own code.

    Args:
        used_once: whether the parameter, if this is its gradient, is used in one operation.

    Returns:
        A text: why there is none.
    """
    call = one_call(address, calls)
    if isinstance(call, str):
        return call
    if address.phase == WEIGHT_GRAD and not used_once:
        return "the parameter is used more than once"
    backward = address.phase in (BACKWARD, WEIGHT_GRAD)
    slopes = call.gradients[-1:] if backward else []

    def compute(copied: nn.Module, given: Any) -> Tensor:
        args, options = given
        output = next(tensors_in(copied(*args, **options)))
        if not backward:
            return output
        wanted = _wanted(copied, given, address)
        return torch.autograd.grad(output, wanted, slopes[0].cpu().double())[0]

    return _exhibit(call, result, slopes, compute)


def result_between(address: Address, outer: Sequence[Call], inner: Sequence[Call], path: Path) -> Exhibit | str:
    """The exhibit of a submodule's input inside another one; backward: of its output's gradient.

    Args:
        outer: calls of the submodule around it.
        inner: calls of the submodule itself.
        path: path from the outer one to it.
    """
    around, own = one_call(address, outer), one_call(address, inner)
    for one in (around, own):
        if isinstance(one, str):
            return one
    assert isinstance(around, Call) and isinstance(own, Call), "texts are returned"
    backward = address.phase in (BACKWARD, WEIGHT_GRAD)
    first = own.gradients[-1] if backward else next(tensors_in((own.args, own.options)))
    slopes = around.gradients[-1:] if backward else []

    def compute(copied: nn.Module, given: Any) -> Tensor:
        (args, options), seen = given, list[Tensor]()
        inside = copied.get_submodule(".".join(path))

        def before(_module: nn.Module, args: Any, options: Any) -> None:
            if not backward:
                seen.append(next(tensors_in((args, options))))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if backward:
                seen.append(next(tensors_in(output)))

        handles = inside.register_forward_pre_hook(before, with_kwargs=True), inside.register_forward_hook(after)
        try:
            output = next(tensors_in(copied(*args, **options)))
        finally:
            for one in handles:
                one.remove()
        if len(seen) != 1:
            raise Unfit(f"{'.'.join(path)} is computed {len(seen)} times in it")
        return torch.autograd.grad(output, seen, slopes[0].cpu().double())[0] if backward else seen[0]

    return _exhibit(around, first, slopes, compute)


def _exhibit(
    call: Call, result: Tensor, slopes: Sequence[Tensor], compute: Callable[[nn.Module, Any], Tensor]
) -> Exhibit | str:
    module = call.module
    held = _tensors_of(module)
    factors = tuple(one.detach() for one in (*tensors_in((call.args, call.options)), *slopes, *held.values()))
    kind = _coarsest(call, result, factors)
    if kind is None or result.dtype not in NARROW:
        return "it does not compute in fp32, bf16 or fp16 alone"
    if not result.numel():
        return "it has no elements"
    given = next(tensors_in((call.args, call.options)))
    tokens = given.numel() // max(given.shape[-1] if given.is_floating_point() and given.dim() else 1, 1)
    if tokens * sum(one.numel() for one in module.parameters()) > LARGEST:
        return "its own code in fp64 would take too long"
    shape = result.reshape(-1, result.shape[-1] if result.dim() > 1 else max(result.numel(), 1))

    def taken(rows: Tensor, columns: Tensor) -> Exact:
        before = capture_rng()
        try:
            with torch.enable_grad():  # whatever the training is at
                values, off = estimate(lambda: compute(*_in_fp64(call, bool(slopes))), kind)
        except Unfit:
            raise
        except Exception as error:  # of any class: the code is not ours
            raise Unfit(f"its own code does not run in fp64: {type(error).__name__}: {error}") from error
        finally:
            restore_rng(before)
        values, off = values.reshape(shape.shape), off.reshape(shape.shape)
        return Exact(values[rows, columns], off[rows, columns])

    return Exhibit(shape.detach(), factors, taken, trust=estimated(kind), held=tuple(held))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a submodule and of those in it, by kind and name."""
    found = {f"parameter {name}": one for name, one in module.named_parameters()}
    return found | {f"buffer {name}": one for name, one in module.named_buffers()}


def _coarsest(call: Call, result: Tensor, factors: Sequence[Tensor]) -> torch.dtype | None:
    kinds = {one.dtype for one in (result, *factors) if not _is_whole(one.dtype)} | {call.autocast} - {None}
    if kinds - {*NARROW, torch.float64}:
        return None
    return max((one for one in kinds if one in NARROW), key=lambda one: torch.finfo(one).eps, default=None)


def _is_whole(kind: torch.dtype) -> bool:
    return kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _wanted(copied: nn.Module, given: Any, address: Address) -> Tensor:
    """Tensor whose gradient an address is of: a parameter, or one of the submodule's inputs."""
    if address.phase == WEIGHT_GRAD:
        return copied.get_parameter(address.slot)
    number = int(address.slot.partition(".")[2] or 0)
    return list(tensors_in(given))[number]


def _in_fp64(call: Call, backward: bool) -> tuple[nn.Module, Any]:
    """A copy of the submodule and of its inputs in fp64, with random generators as they were in the call."""
    assert call.chance is not None, "calls are copied"
    restore_rng(dict(call.chance))
    with _disable_current_modes():  # copies have no errors of rounding
        return _Copies(call.module).of(call.module), _widened((call.args, dict(call.options)), backward)


def _widened(value: Any, backward: bool) -> Any:
    """Copy of inputs on the host, in fp64; backward: with gradients."""
    if isinstance(value, Tensor):
        wide = _wide(value)
        return wide.requires_grad_(backward) if wide.is_floating_point() else wide
    if type(value) is dict:
        return {key: _widened(one, backward) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_widened(one, backward) for one in value)
    if isinstance(value, SHARED):
        return value
    return None if type(value).__name__.endswith("Cache") else deepcopy(value)  # which has taken keys of this call


def _wide(tensor: Tensor) -> Tensor:
    """Copy of a tensor on the host, in fp64, with memory of its own."""
    kind = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True)


class _Copies:
    """Copies of a submodule and of all that is in it, each made once, so that what is shared in it stays shared.

    Args:
        module: the whole submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._inside = {id(one) for one in module.modules()}
        self._made: dict[int, Any] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """A module of the same classes with tensors in fp64 on the host, and without hooks.

        Raises:
            Unfit: it has a module that is no submodule, or is compiled.
        """
        if id(module) in self._made:
            found: nn.Module = self._made[id(module)]
            return found
        if isinstance(module, torch.jit.ScriptModule) or id(module) not in self._inside:
            raise Unfit(f"it uses {type(module).__name__}, which cannot be copied as its submodule")
        copied = self._made[id(module)] = module.__class__.__new__(module.__class__)
        own, blank = vars(copied), vars(nn.Module())
        own.update(blank, training=module.training)
        own["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        own["_parameters"] = {name: self._tensor(one) for name, one in module._parameters.items()}
        own["_buffers"] = {name: self._tensor(one) for name, one in module._buffers.items()}
        own["_modules"] = {name: None if one is None else self.of(one) for name, one in module._modules.items()}
        for name, value in vars(module).items():
            if name not in blank and name not in METHODS:
                own[name] = self._apart(value)
        return copied

    def _tensor(self, one: Tensor | None) -> Tensor | None:
        if one is None or id(one) in self._made:
            return None if one is None else self._made[id(one)]
        wide = _wide(one)
        self._made[id(one)] = nn.Parameter(wide, one.requires_grad) if isinstance(one, nn.Parameter) else wide
        return self._made[id(one)]  # type: ignore[no-any-return]

    def _apart(self, value: Any) -> Any:
        """Copy of an attribute, which code may change without changing the submodule's own."""
        kind = type(value)
        if isinstance(value, SHARED):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self.of(value)
        if kind is MethodType:
            return MethodType(value.__func__, self._apart(value.__self__))
        if id(value) in self._made:
            return self._made[id(value)]
        if kind in (dict, OrderedDict, defaultdict):
            copied = self._made[id(value)] = copy(value)
            copied.update({key: self._apart(one) for key, one in value.items()})
        elif kind in (list, deque):
            copied = self._made[id(value)] = copy(value)
            for place, one in enumerate(value):
                copied[place] = self._apart(one)
        elif kind in (tuple, set, frozenset):
            copied = self._made[id(value)] = kind(self._apart(one) for one in value)
        else:
            copied = deepcopy(value, self._made)
        return copied
