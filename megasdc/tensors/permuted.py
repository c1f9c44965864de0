"""Operations computed with their elements in other places: redundancy inside one device.

Rows, features, batch and heads of an operation's operands are rolled, the operation is computed, and its result is
rolled back. No dimension that is summed over is rolled, so each element is made of the same numbers in the same order
and has the same bits, wherever a kernel treats all places alike; ``Trial`` finds out where it does not. The same
data pass other units of the device, so that a unit that is wrong makes other elements wrong.

What moves data without computing anything, draws random numbers, or has no rule here is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.tensors.bits import as_bits

Operation = Callable[..., Any]
Signature = tuple[str, ...]
"""Name of an operation, with types and shapes of its tensors."""
Rule = Callable[..., Any]
"""Computes an operation with its arguments' elements in other places; ``NotImplemented``: it has none to move."""
Dims = Sequence[int]

LARGE = 1 << 17
"""Number of elements from which on a copy takes longer than its call."""
ORDER = 2.0**-16
"""Difference, as a share of the largest element, that another order of a sum in fp32 explains."""
_aten = torch.ops.aten
_inside: list[TorchDispatchMode] = []


def is_permuted() -> bool:
    """Whether operations are computed with their elements in other places at the moment."""
    return bool(_inside)


def shift(size: int) -> int:
    """Number of places by which a dimension is rolled: about a half of it, but odd, so that vector lanes change."""
    return size // 2 | 1 if size > 1 else 0


def roll(tensor: Tensor, dims: Dims, *, back: bool = False) -> Tensor:
    """Roll some dimensions of a tensor, each by ``shift`` of its size, and keep the order of its strides."""
    return roll_by(tensor, {dim % tensor.dim(): shift(tensor.shape[dim]) for dim in dims}, back=back)


def roll_by(tensor: Tensor, shifts: Mapping[int, int], *, back: bool = False) -> Tensor:
    """Roll dimensions by given numbers of places, and keep the order of strides; ``back``: the other way."""
    if not tensor.numel():
        return tensor
    places = sorted(dim for dim, by in shifts.items() if by % tensor.shape[dim])
    if not places:
        return tensor
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    sign = -1 if back else 1
    by = {order.index(dim): sign * shifts[dim] % tensor.shape[dim] for dim in places}
    moved = _rolled(tensor.permute(order), by)
    return moved.permute([order.index(dim) for dim in range(tensor.dim())])


def _rolled(tensor: Tensor, by: Mapping[int, int]) -> Tensor:
    """Rolled tensor, as by ``torch.roll``, which copies all once a dimension: a large one once, block by block."""
    if len(by) == 1 or tensor.numel() < LARGE:
        return tensor.roll(list(by.values()), list(by))
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for wraps in product((False, True), repeat=len(by)):
        source, target = tensor, moved
        for wrapped, (dim, places) in zip(wraps, by.items(), strict=True):
            kept = tensor.shape[dim] - places
            source = source.narrow(dim, kept, places) if wrapped else source.narrow(dim, 0, kept)
            target = target.narrow(dim, 0, places) if wrapped else target.narrow(dim, places, kept)
        target.copy_(source)
    return moved


def as_matrix(tensor: Tensor, *, back: bool = False) -> Tensor:
    """Roll the rows (all dimensions but the last) and features of a tensor, as of a matrix product's result."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor
    return roll(rows, range(rows.dim()), back=back).reshape(tensor.shape)


class Permuted(TorchDispatchMode):
    """Context in which operations are computed with their elements in other places.

    Args:
        without: operations that are computed as they are.
    """

    def __init__(self, without: Collection[Signature] = ()) -> None:
        super().__init__()
        self._without = without

    def __enter__(self) -> Permuted:
        """See above."""
        _inside.append(self)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        """See above."""
        _inside.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        kwargs = kwargs or {}
        rule = permutation_rule(func, args)
        if rule is None or signature_of(func, args) in self._without:
            return func(*args, **kwargs)
        result = rule(func, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


@dataclass
class Unequal:
    """Differences of an operation's results when its elements were in other places.

    Args:
        elements: number of elements that differed.
        of: number of elements that were compared.
        largest: largest difference, as a share of the largest element.
        far: number of elements that differed by more than one step of their type and than ``ORDER`` of the largest one.
    """

    elements: int = 0
    of: int = 0
    largest: float = 0.0
    far: int = 0


@dataclass
class Tried:
    """Results of a trial.

    Args:
        moved: number of times that each operation was computed with elements in other places.
        left: number of times that an operation on floating-point numbers was not, but for single numbers, by name.
        unequal: differences of operations whose results had other bits.
    """

    moved: Counter[Signature] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    unequal: dict[Signature, Unequal] = field(default_factory=dict)


class Trial(TorchDispatchMode):
    """Context in which operations are computed as they are, and a second time with their elements in other places.

    Attributes:
        tried: results of the trial.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tried = Tried()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation twice, and compare."""
        kwargs, rule, tried = kwargs or {}, permutation_rule(func, args), self.tried
        changes = rule is not None and func._schema.name.endswith("_")
        moved = NotImplemented
        if rule is not None:  # on a copy of what it would change
            moved = rule(func, *((args[0].clone(), *args[1:]) if changes else args), **kwargs)
        result = func(*args, **kwargs)
        if moved is NotImplemented:
            if _computes(func, args, result):
                tried.left[func.name()] += 1
            return result
        tried.moved[signature_of(func, args)] += 1
        pairs = [pair for pair in zip(_tensors(result), _tensors(moved), strict=True) if pair[0].is_floating_point()]
        if not all(starmap(_same_bits, pairs)):
            found = tried.unequal.setdefault(signature_of(func, args), Unequal())
            for one, other in pairs:
                found.of += one.numel()
                found.elements += int((as_bits(one) != as_bits(other)).sum())
                values, others = one.double(), other.double()
                difference, top = (values - others).abs(), values.abs().max()
                found.largest = max(found.largest, (difference.max() / top).nan_to_num(torch.inf).item())
                step = torch.finfo(one.dtype).eps * values.abs().maximum(others.abs())
                near = difference <= step.maximum(ORDER * top) if top.isfinite() else difference <= step  # NaN is not
                found.far += int((~near & (as_bits(one) != as_bits(other))).sum())
        return result


def signature_of(func: Any, args: Sequence[Any]) -> Signature:
    """Name, types and shapes by which a trial takes two calls for the same operation."""
    return func.name(), *(f"{str(one.dtype)[6:]}{tuple(one.shape)}" for one in args if isinstance(one, Tensor))


def permutation_rule(func: Any, args: Sequence[Any]) -> Rule | None:
    """Rule by which an operation on floating-point numbers is computed elsewhere; None: there is none."""
    if not any(one.is_floating_point() for one in args if isinstance(one, Tensor)):
        return None
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _in_place if name.endswith("_") else _elementwise
    return RULES.get(name)


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if isinstance(one, Tensor)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bits(one), as_bits(other))


def _computes(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an operation computes more than one floating-point number, and does not only move or create them."""
    name = func._schema.name.removeprefix("aten::").strip("_")
    uses, makes = (any(one.is_floating_point() and one.numel() > 1 for one in _tensors(of)) for of in (args, result))
    return uses and makes and name not in MOVES and not func.is_view


# --- rules --------------------------------------------------------------------------------------------------------


def _elementwise(func: Operation, *args: Any, **kwargs: Any) -> Any:
    """Rule that rolls all dimensions, counted from the last; as one dimension where all operands have one shape."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    if max(one.numel() for one in tensors) < 2:
        return NotImplemented
    if all(one.shape == tensors[0].shape and one.is_contiguous() for one in tensors):
        flat = [roll(one.view(-1), (0,)) if isinstance(one, Tensor) else one for one in args]
        result = func(*flat, **kwargs)
        return roll(result, (0,), back=True).view(tensors[0].shape) if isinstance(result, Tensor) else result
    moved = [roll(one, range(one.dim())) if isinstance(one, Tensor) else one for one in args]
    result = func(*moved, **kwargs)
    return roll(result, range(result.dim()), back=True) if isinstance(result, Tensor) else result  # equal: a bool


def _in_place(func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rule as ``_elementwise``, with the result written into the first operand."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    pure = getattr(getattr(_aten, name.removesuffix("_"), None), overload or "default", None)
    result = NotImplemented if pure is None else _elementwise(pure, target, *args, **kwargs)
    return NotImplemented if result is NotImplemented else target.copy_(result)


def _by_dims(*operands: Dims | None, results: Sequence[Dims]) -> Rule:
    """Make a rule that rolls given dimensions of operands, None: none, and of results. Operands may be absent."""

    def rule(func: Operation, *args: Any, **kwargs: Any) -> Any:
        dims = [*operands, *[None] * (len(args) - len(operands))]
        moved = [
            one if which is None or not isinstance(one, Tensor) else roll(one, which)
            for one, which in zip(args, dims, strict=False)
        ]
        if all(one is other for one, other in zip(args, moved, strict=True)):
            return NotImplemented
        return _back(func(*moved, **kwargs), results)

    return rule


def _back(result: Any, dims: Sequence[Dims]) -> Any:
    if isinstance(result, Tensor):
        return roll(result, dims[0], back=True)
    return tuple(
        roll(one, dims[place], back=True) if isinstance(one, Tensor) and place < len(dims) else one
        for place, one in enumerate(result)
    )


def _product_and_sum(func: Operation, added: Tensor, first: Tensor, second: Tensor, **kwargs: Any) -> Any:
    """Rule of ``addmm`` and ``baddbmm``; the added operand is broadcast."""
    last = first.dim() - 1
    batch = range(last - 1)
    moved = roll(first, [*batch, last - 1]), roll(second, [*batch, last])
    result = func(roll(added, range(added.dim())), *moved, **kwargs)
    return roll(result, range(result.dim()), back=True)


def _but_one(tensors: int) -> Rule:
    """Make a rule that rolls all dimensions but the one named after ``tensors`` tensors: softmax and the like."""

    def rule(func: Operation, *args: Any, **kwargs: Any) -> Any:
        dims = [dim for dim in range(args[0].dim()) if dim != args[tensors] % args[0].dim()]
        return _by_dims(*[dims] * tensors, results=[dims])(func, *args, **kwargs)

    return rule


def _reduction(func: Operation, tensor: Tensor, over: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Rule of reductions: the dimensions that are kept are rolled."""
    named = [over] if isinstance(over, int) else over
    summed = {dim % tensor.dim() for dim in named} if named and tensor.dim() else set()
    kept = [dim for dim in range(tensor.dim()) if dim not in summed]
    if not summed or all(tensor.shape[dim] < 2 for dim in kept):
        return NotImplemented
    result = func(roll(tensor, kept), over, keepdim, **kwargs)
    after = kept if keepdim else list(range(len(kept)))
    return _back(result, [after, after])


def _norm(func: Operation, data: Tensor, shape: Sequence[int], *args: Any) -> Any:
    """Rule of norms: rows are rolled; results: values, mean, reciprocal deviation (RMSNorm: at most one of both)."""
    rows = range(data.dim() - len(shape))
    if all(data.shape[dim] < 2 for dim in rows):
        return NotImplemented
    return _back(func(roll(data, rows), shape, *args), [rows] * 3)


def _norm_backward(statistics: int) -> Rule:
    """Make a rule that rolls rows for the input's gradient, and features for those of weight and bias, sums over rows.

    ``statistics``: number of tensors with statistics of rows: mean and reciprocal deviation, or the latter alone.
    """

    def rule(func: Operation, grad: Tensor, data: Tensor, shape: Sequence[int], *rest: Any) -> Any:
        of_rows, affine, mask = rest[:statistics], rest[statistics:-1], rest[-1]
        rows = range(data.dim() - len(shape))
        features = range(len(rows), data.dim())
        by_row = [roll(one, rows) for one in of_rows]
        of_input = func(roll(grad, rows), roll(data, rows), shape, *by_row, *affine, [mask[0], *[False] * len(affine)])
        moved = [roll(one, range(one.dim())) if isinstance(one, Tensor) else one for one in affine]
        of_affine = func(roll(grad, features), roll(data, features), shape, *of_rows, *moved, [False, *mask[1:]])
        weights = [one if one is None else roll(one, range(one.dim()), back=True) for one in of_affine[1:]]
        return of_input[0] if of_input[0] is None else roll(of_input[0], rows, back=True), *weights

    return rule


def _attention(dropout: int, mask: int | None = None) -> Rule:
    """Make a rule that rolls batch, heads and features of values; not with dropout or a mask, whose places are given.

    ``mask`` is None where it is no argument, or a named one.
    """

    def rule(func: Operation, *args: Any, **kwargs: Any) -> Any:
        if any(args[dropout : dropout + 1]) or _is_masked(mask, args, kwargs):
            return NotImplemented
        query, key, value, *rest = args
        of_queries, of_keys = _head_shifts(query, key)
        features = {3: shift(value.shape[3])}
        moved = roll_by(query, of_queries), roll_by(key, of_keys), roll_by(value, {**of_keys, **features})
        output, sums, *more = func(*moved, *rest, **kwargs)
        output = roll_by(output, {**of_queries, **features}, back=True)
        return output, roll_by(sums, of_queries, back=True), *more

    return rule


def _attention_backward(dropout: int, mask: int | None = None) -> Rule:
    """Make a rule that rolls batch and heads of gradient, query, key, value, mask if any, output, log-sums."""

    def rule(func: Operation, *args: Any, **kwargs: Any) -> Any:
        if args[dropout] or _is_masked(mask, args, kwargs):
            return NotImplemented
        of_queries, of_keys = _head_shifts(args[1], args[2])
        kinds = [of_queries, of_queries, of_keys, of_keys, of_queries, of_queries]
        if mask is not None:
            kinds.insert(mask, {})
        moved = [roll_by(one, by) if by else one for one, by in zip(args, kinds, strict=False)]
        if all(one is other for one, other in zip(args, moved, strict=False)):
            return NotImplemented
        found = func(*moved, *args[len(kinds) :], **kwargs)
        return *(roll_by(one, by, back=True) for one, by in zip(found, kinds[1:4], strict=False)), *found[3:]

    return rule


def _is_masked(mask: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("attn_mask") is not None or (mask is not None and args[mask] is not None)


def _head_shifts(query: Tensor, key: Tensor) -> tuple[dict[int, int], dict[int, int]]:
    """Shifts of batch and heads of queries, and of keys: groups of queries share a key's head."""
    batch, heads = shift(key.shape[0]), shift(key.shape[1])
    return {0: batch, 1: heads * (query.shape[1] // key.shape[1])}, {0: batch, 1: heads}


def _rows_of_loss(reduction: int, operands: int) -> Rule:
    """Make a rule that rolls rows whose losses are not summed; ``reduction``: place of the argument that says so."""

    def rule(func: Operation, *args: Any) -> Any:
        if args[reduction]:
            return NotImplemented
        return _by_dims(*[(0,)] * operands, results=[(0,)])(func, *args)

    return rule


def _sum_at_words(func: Operation, table: Tensor, places: Any, values: Tensor, *args: Any) -> Any:
    """Rule that rolls the features of a table into whose rows other rows are added."""
    if len(places) == table.dim():
        return NotImplemented
    result = func(roll(table, (-1,)), places, roll(values, (-1,)), *args)
    return roll(result, (-1,), back=True)


RULES: dict[str, Rule] = {
    "_to_copy": _elementwise,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp", "max"), _reduction),
    "mm": _by_dims((0,), (1,), results=[(0, 1)]),
    "bmm": _by_dims((0, 1), (0, 2), results=[(0, 1, 2)]),
    "addmm": _product_and_sum,
    "baddbmm": _product_and_sum,
    "_softmax": _but_one(1),
    "_log_softmax": _but_one(1),
    "_softmax_backward_data": _but_one(2),
    "_log_softmax_backward_data": _but_one(2),
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "native_layer_norm_backward": _norm_backward(2),
    "_fused_rms_norm_backward": _norm_backward(1),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(6),
    "_scaled_dot_product_flash_attention": _attention(3),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(10),
    "_scaled_dot_product_efficient_attention": _attention(5, mask=3),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(9, mask=4),
    "nll_loss_forward": _rows_of_loss(3, 2),
    "nll_loss_backward": _rows_of_loss(4, 3),
    "index_put": _sum_at_words,
    "embedding_dense_backward": _by_dims((-1,), results=[(-1,)]),
}
"""Rules by name in ``aten``, for operations that PyTorch does not call elementwise."""
_MOVES = """
    clone copy detach cat stack index index_select gather slice_backward select_backward new_zeros zeros_like ones_like
    empty_like new_empty full_like fill zero embedding roll constant_pad_nd masked_fill scatter tril triu repeat
    lift_fresh_copy split_with_sizes unbind new_empty_strided expand unsafe_view
"""
MOVES = frozenset(_MOVES.split())
"""Operations that only move floating-point numbers."""
