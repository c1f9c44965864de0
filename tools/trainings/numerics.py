"""Right ways to compute what another device, library or kernel computes in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.tensors.nested import map_in, tensors_in

WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""By name, the place of the first factor."""
LEFT = ("clone", "native_dropout", "bernoulli", "rand_like")
"""What is copied or drawn."""
ORDER, FUSED = "other order of sums", "wider within an operation"


class Other(TorchDispatchMode):
    """Inside, some operations are computed in another right way.

    Args:
        way: ``ORDER``: terms of products and sums are added up in another order; ``FUSED``: what an operation has in
            between is a wider type.
        which: number of the one operation that is, among those that it concerns; None: all are.

    Attributes:
        count: of the operations that it concerns.
    """

    def __init__(self, way: str, which: int | None = None) -> None:
        super().__init__()
        self._way, self._which, self.count = way, which, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        options, other = dict(kwargs or {}), None
        returned = [one.alias_info for one in func._schema.returns]
        left = func.overloadpacket.__name__ in LEFT
        if not left and not any(one is not None for one in returned):
            other = _reordered(func, args, options) if self._way == ORDER else _wider(func, args, options)
        if other is None:
            return func(*args, **options)
        self.count += 1
        return func(*args, **options) if self._which not in (None, self.count - 1) else other()


def _reordered(func: Any, args: Any, options: Any) -> Callable[[], Any] | None:
    name = func.overloadpacket.__name__
    if name in PRODUCTS:
        place = PRODUCTS[name]
        first, second = args[place], args[place + 1]
        order = torch.randperm(first.shape[-1], generator=torch.Generator().manual_seed(first.numel()))
        factors = first.index_select(-1, order), second.index_select(-2, order)
        return lambda: func(*args[:place], *factors, *args[place + 2 :], **options)
    if name in ("sum", "mean") and len(args) > 1 and args[1]:
        return lambda: func(args[0].flip(tuple(args[1])), *args[1:], **options)
    return None


def _wider(func: Any, args: Any, options: Any) -> Callable[[], Any] | None:
    given = {one.dtype for one in tensors_in((args, options)) if one.is_floating_point()}
    if len(given) != 1 or not given <= WIDER.keys() or options.get("dtype") is not None:
        return None
    (kind,) = given

    def widened(tensor: Tensor) -> Tensor:
        return tensor.to(WIDER[kind]) if tensor.is_floating_point() else tensor

    def compute() -> Any:
        as_it_is = func(*args, **options)
        kinds = iter([one.dtype for one in tensors_in(as_it_is)])
        try:
            found = func(*map_in(Tensor, tuple(args), widened), **map_in(Tensor, options, widened))
        except RuntimeError:  # it is for one type alone
            return as_it_is
        return map_in(Tensor, found, lambda one: one.to(next(kinds)))

    return compute


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """So many threads for torch's operations on the host, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def other_threads() -> Iterator[None]:
    """With two threads."""
    with cpu_threads(2):
        yield


@contextmanager
def other_attention() -> Iterator[None]:
    """With attention of several operations, each rounded to the type."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


@contextmanager
def without_library() -> Iterator[None]:
    """Without oneDNN."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


# --- submodules of one kernel, or of several ---------------------------------------------------------------------


def _rms_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda given: F.rms_norm(given, given.shape[-1:], module.weight.to(given.dtype), module.variance_epsilon)


def _narrow_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda given: F.rms_norm(given, given.shape[-1:], module.weight.to(given.dtype), module.eps)


def _inner_cast(_module: Any) -> Callable[[Tensor], Tensor]:
    """As a compiler does: in fp32, without the casts between."""
    return lambda given: (given.float().square() * torch.sigmoid(given.float())).to(given.dtype)


def _inner_autocast(module: Any) -> Callable[[Tensor], Tensor]:
    """Without it."""

    def compute(given: Tensor) -> Tensor:
        with torch.autocast(given.device.type, enabled=False):
            return F.linear(given, module.weight)

    return compute


def _layer_norm(module: Any) -> Callable[[Tensor], Tensor]:
    def compute(given: Tensor) -> Tensor:
        wide = given.float()
        centred = wide - wide.mean(-1, keepdim=True)
        unit = centred * (centred.square().mean(-1, keepdim=True) + module.eps).rsqrt()
        return (unit * module.weight.float() + module.bias.float()).to(given.dtype)

    return compute


def _silu(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda given: given * torch.sigmoid(given)


def _gelu(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda given: F.gelu(given.float()).to(given.dtype)


def _new_gelu(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda given: F.gelu(given, approximate="tanh")


KERNELS: Mapping[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "LlamaRMSNorm": _rms_norm,
    "NarrowNorm": _narrow_norm,
    "InnerCast": _inner_cast,
    "InnerAutocast": _inner_autocast,
    "LayerNorm": _layer_norm,
    "SiLU": _silu,
    "SiLUActivation": _silu,
    "GELUActivation": _gelu,
    "NewGELUActivation": _new_gelu,
}
"""By class of submodule: the same in another kernel, or in several."""


def use_kernel(module: nn.Module) -> bool:
    """Let a submodule compute with another kernel; whether there is one."""
    make = KERNELS.get(type(module).__name__)
    if make is not None:
        module.forward = make(module)
    return make is not None
