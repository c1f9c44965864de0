"""Results of any submodule: its own code in fp64, and what went in between submodules.

A copy of the submodule without hooks has parameters and buffers in fp64, and is given what the device's had been given,
with random generators as they were. What its class computes is trusted only where the results on which ranks agree
are what it says, and where those of one rank are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megasdc.common.addresses import BACKWARD, WEIGHT_GRAD, Address
from megasdc.determinism import capture_rng, restore_rng
from megasdc.sdc.exhibits.calls import Call, Exhibit, estimated, one_call
from megasdc.sdc.fp64.noise import NARROW, Unfit, estimate
from megasdc.sdc.fp64.rounding_bounds import Exact
from megasdc.tensors.nested import tensors_in

LARGEST = 2**31
"""Most products of a parameter and a token: they are computed about 27 times, which takes a core some ten seconds."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
METHODS = ("forward", "_compiled_call_impl")
"""Of a submodule alone, in place of its class's."""
SHARED = (dist.ProcessGroup, ModuleType, type)
"""What computing changes nothing of, and cannot be copied."""

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
    """The exhibit of what a submodule was given inside another one; backward: of its output's gradient.

    Args:
        outer: calls of the one around it.
        inner: of itself.
        path: to it.
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
    held = _held(module)
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


def _held(module: nn.Module) -> dict[str, Tensor]:
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
    """What a gradient is of: a parameter, or one of the tensors that the submodule is given."""
    if address.phase == WEIGHT_GRAD:
        return copied.get_parameter(address.slot)
    number = int(address.slot.partition(".")[2] or 0)
    return list(tensors_in(given))[number]


def _in_fp64(call: Call, backward: bool) -> tuple[nn.Module, Any]:
    """A copy of the submodule, and of what it was given, with random generators as they were then."""
    assert call.chance is not None, "calls are copied"
    restore_rng(dict(call.chance))
    with _disable_current_modes():  # copies have no errors of rounding
        return _Copies(call.module).of(call.module), _widened((call.args, dict(call.options)), backward)


def _widened(value: Any, backward: bool) -> Any:
    """On the host, in fp64; of which gradients are taken."""
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
    """A copy on the host, in fp64, which nothing else is written to by."""
    kind = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True)


class _Copies:
    """Copies of a submodule and of all that is in it, each made once, so that what is shared in it stays shared.

    Args:
        module: the whole one.
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
        """An attribute that code may change without changing the submodule's own."""
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
