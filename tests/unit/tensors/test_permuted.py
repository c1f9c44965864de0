"""Does an operation give the same bits with its elements in other places, and does a wrong unit show?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megasdc.tensors.bits import as_bits
from megasdc.tensors.permuted import RULES, Permuted, Trial, as_matrix, is_permuted, roll
from tools.trainings.broken_unit import BrokenUnit

ROWS, WIDTH, HEADS = 24, 32, 2


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, of which a gradient is wanted."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def heads(dtype: torch.dtype) -> Tensor:
    """Queries, keys or values: 3 samples, 2 heads."""
    return draw(3, HEADS, ROWS, WIDTH // HEADS, dtype=dtype)


def words() -> Tensor:
    """Numbers of words, some more than once."""
    return torch.arange(ROWS) % 7


OPERATIONS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "linear": lambda dtype: functional.linear(draw(3, ROWS, WIDTH, dtype=dtype), draw(48, WIDTH, dtype=dtype)),
    "addmm": lambda dtype: torch.addmm(draw(48, dtype=dtype), draw(ROWS, 8, dtype=dtype), draw(8, 48, dtype=dtype)),
    "bmm": lambda dtype: draw(3, ROWS, 8, dtype=dtype) @ draw(3, 8, WIDTH, dtype=dtype),
    "baddbmm": lambda dtype: torch.baddbmm(
        draw(1, ROWS, 1, dtype=dtype), draw(3, ROWS, 8, dtype=dtype), draw(3, 8, WIDTH, dtype=dtype)
    ),
    "layer_norm": lambda dtype: functional.layer_norm(
        draw(3, ROWS, WIDTH, dtype=dtype), (WIDTH,), draw(WIDTH, dtype=dtype), draw(WIDTH, dtype=dtype)
    ),
    "rms_norm": lambda dtype: functional.rms_norm(draw(ROWS, WIDTH, dtype=dtype), (WIDTH,), draw(WIDTH, dtype=dtype)),
    "attention": lambda dtype: functional.scaled_dot_product_attention(*[heads(dtype)] * 3, is_causal=True),
    "softmax": lambda dtype: draw(3, ROWS, WIDTH, dtype=dtype).softmax(-1),
    "loss": lambda dtype: functional.cross_entropy(draw(ROWS, WIDTH, dtype=dtype), words(), reduction="none"),
    "embedding": lambda dtype: functional.embedding(words(), draw(9, WIDTH, dtype=dtype)),
    "words": lambda dtype: draw(9, WIDTH, dtype=dtype)[words()],
    "gelu": lambda dtype: functional.gelu(draw(ROWS, WIDTH, dtype=dtype), approximate="tanh"),
    "silu": lambda dtype: functional.silu(draw(ROWS, WIDTH, dtype=dtype)) * draw(ROWS, WIDTH, dtype=dtype),
    "in place": lambda dtype: (draw(ROWS, WIDTH, dtype=dtype) * 2).mul_(draw(WIDTH, dtype=dtype)).exp_(),
    "sums": lambda dtype: draw(3, ROWS, WIDTH, dtype=dtype).sum((0, 1)) + draw(ROWS, WIDTH, dtype=dtype).amax(0),
    "other strides": lambda dtype: (draw(WIDTH, ROWS, dtype=dtype).t() + draw(1, WIDTH, dtype=dtype)).t().contiguous(),
}


def both_ways(operation: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    """Result of an operation, and all gradients that follow from it, as one row."""
    inputs: list[Tensor] = []
    drawn = draw

    def keep(*shape: int, **named: Any) -> Tensor:
        inputs.append(drawn(*shape, **named))
        return inputs[-1]

    globals()["draw"] = keep
    try:
        result = operation(dtype)
    finally:
        globals()["draw"] = drawn
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result) * 1.5)
    return torch.cat([one.detach().flatten() for one in (result, *gradients)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_same_bits_elsewhere(name: str, dtype: torch.dtype) -> None:
    """Forward and backward; nothing that computes numbers is left as it is."""
    expected = both_ways(OPERATIONS[name], dtype)
    with Trial() as trial:
        assert torch.equal(as_bits(both_ways(OPERATIONS[name], dtype)), as_bits(expected))
    assert trial.tried.moved and not trial.tried.left and not trial.tried.unequal
    with Permuted():
        moved = both_ways(OPERATIONS[name], dtype)
    assert torch.equal(as_bits(moved), as_bits(expected))


class WrongUnit(TorchDispatchMode):
    """A unit that makes one place of each result of an operation wrong, whatever is there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name == f"aten::{self.name}":
            self.calls += 1
            for one in result if isinstance(result, tuple) else (result,):
                if one is not None and one.is_floating_point() and one.numel() > 5:
                    one[tuple(place // 2 for place in one.shape)] += 0.5
        return result


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("mm", "linear"),
        ("native_layer_norm", "layer_norm"),
        ("native_layer_norm_backward", "layer_norm"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("gelu", "gelu"),
        ("gelu_backward", "gelu"),
        ("_log_softmax", "loss"),
        ("sum", "sums"),
    ],
)
def test_a_wrong_unit_makes_other_elements_wrong(name: str, operation: str) -> None:
    """What it computes elsewhere has other bits, and a trial names the operation."""
    with WrongUnit(name) as unit:
        expected = both_ways(OPERATIONS[operation], torch.float32)
        assert unit.calls, "it was used"
        with Permuted():
            assert not torch.equal(both_ways(OPERATIONS[operation], torch.float32), expected)
        with Trial() as trial:
            both_ways(OPERATIONS[operation], torch.float32)
    assert f"aten::{name}" in {signature[0].partition(".")[0] for signature in trial.tried.unequal}
    assert all(one.largest > 0.01 for one in trial.tried.unequal.values())


def test_what_has_no_rule_or_is_random_is_left_and_told() -> None:
    """A sum over all of it, and one along it, are computed as they are; masks of a dropout are the same."""
    data = draw(ROWS, WIDTH).detach()
    with Trial() as trial:
        data.cumsum(0)
        torch.manual_seed(1)
        kept = functional.dropout(data)
    assert dict(trial.tried.left) == {"aten::cumsum": 1, "aten::native_dropout": 1} or "aten::bernoulli_.float" in (
        trial.tried.left
    )
    torch.manual_seed(1)
    with Permuted():
        assert torch.equal(functional.dropout(data), kept)


def test_operations_that_kept_no_bits_are_computed_as_they_are() -> None:
    """By name, types and shapes."""
    with WrongUnit("mm") as unit, Trial() as trial:
        both_ways(OPERATIONS["linear"], torch.float32)
    with WrongUnit("mm") as unit:
        expected = both_ways(OPERATIONS["linear"], torch.float32)
        with Permuted(trial.tried.unequal):
            assert torch.equal(both_ways(OPERATIONS["linear"], torch.float32), expected)
    assert unit.calls == 6


def test_rolls_move_to_other_lanes_and_come_back() -> None:
    """By an odd number, of every dimension that has more than one place; strides stay."""
    data = torch.arange(3 * 32 * 48).view(3, 32, 48).transpose(1, 2)
    moved = roll(data, (0, 2))
    assert moved.stride() == data.stride() and moved[1, 0, 17] == data[0, 0, 0]
    assert torch.equal(roll(moved, (0, 2), back=True), data)
    rows = torch.arange(2 * 5 * 6).view(2, 5, 6)
    assert as_matrix(rows).flatten().tolist() != rows.flatten().tolist()
    assert torch.equal(as_matrix(as_matrix(rows), back=True), rows)
    assert not is_permuted()
    with Permuted():
        assert is_permuted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_queries_stay_with_their_keys(dtype: torch.dtype) -> None:
    """Eight heads of queries share four of keys."""
    query, key, value = (draw(3, count, ROWS, 16, dtype=dtype) for count in (8, 4, 4))

    def attend() -> Tensor:
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(result, [query, key, value], torch.ones_like(result) * 1.5)
        return torch.cat([one.detach().flatten() for one in (result, *gradients)])

    expected = attend()
    with Trial() as trial:
        attend()
    assert not trial.tried.unequal and not trial.tried.left
    with Permuted():
        assert torch.equal(as_bits(attend()), as_bits(expected))


def _gpu_attention(query: Any, key: Any, value: Any, bias: Any, sums: bool, dropout: float, causal: bool) -> Any:
    """As ``_scaled_dot_product_efficient_attention``: values, logarithms of sums, and what dropout began with."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal)
    return *found, torch.tensor(1), torch.tensor(2)


def _gpu_attention_backward(*args: Any) -> Any:
    """As ``_scaled_dot_product_efficient_attention_backward``, which has a mask among its operands and its results."""
    grad, query, key, value, _, output, sums, *_, dropout, _, causal = args
    name = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return *name(grad, query, key, value, output, sums, dropout, causal), None


def test_operations_that_only_a_gpu_has_are_moved_by_their_signatures() -> None:
    """Results that are fewer, and operands between others, have their places."""
    aten, draws = torch.ops.aten, [heads(torch.float32).detach() for _ in range(4)]
    rows, weight = draw(ROWS, WIDTH).detach(), draw(WIDTH).detach()
    forward = draws[0], draws[1], draws[2], None, True, 0.0, True
    output, sums, *_ = _gpu_attention(*forward)
    backward = draws[3], *draws[:3], None, output, sums, torch.tensor(1), torch.tensor(2), 0.0, [True] * 4, True
    cases: list[tuple[str, Any, Any]] = [
        ("_fused_rms_norm", aten._fused_rms_norm, (rows, [WIDTH], weight, 1e-5)),
        ("_scaled_dot_product_efficient_attention", _gpu_attention, forward),
        ("_scaled_dot_product_efficient_attention_backward", _gpu_attention_backward, backward),
    ]
    for name, operation, arguments in cases:
        expected, found = operation(*arguments), RULES[name](operation, *arguments)
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert one is other is None or torch.equal(one, other), name
    masked = (*draws[:3], torch.zeros(()), *forward[4:])
    assert RULES["_scaled_dot_product_efficient_attention"](_gpu_attention, *masked) is NotImplemented


@pytest.mark.parametrize(
    ("kind", "factor", "far"),
    [
        (torch.float32, 1 + 2.0**-20, False),
        (torch.float32, 1 + 2.0**-12, True),
        (torch.bfloat16, 1 + 1.2 * 2.0**-8, False),
        (torch.bfloat16, 1 + 2.0**-4, True),
        (torch.float32, float("nan"), True),
    ],
)
def test_what_another_order_of_summation_explains_is_told(kind: torch.dtype, factor: float, far: bool) -> None:
    """Of a product of which one place is off, with its elements there and elsewhere."""
    torch.manual_seed(4)
    left, right = torch.rand(8, 16).to(kind), torch.rand(16, 8).to(kind)
    with BrokenUnit((None, None, None), (3, 5), factor), Trial() as trial:
        left @ right
    (found,) = trial.tried.unequal.values()
    assert (found.elements, found.of, found.far) == (2, 64, 2 * far)
