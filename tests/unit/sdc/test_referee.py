"""The referee accuses no result that rounding explains, and sees those that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import permutations
from itertools import product as every
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from megasdc.common.addresses import FORWARD, RECOMPUTE, WEIGHT_GRAD, Address
from megasdc.model.gpt import ACTIVATIONS, rotate
from megasdc.model.kinds import NORM
from megasdc.model.loss import TokenLoss
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
from megasdc.sdc.referee.recompute import make_exhibit, record_calls
from megasdc.sdc.referee.referee import agreed, is_within, judge_rounding
from megasdc.sdc.referee.rounding import (
    Exact,
    NormMoments,
    activated,
    activated_input,
    chosen,
    logit_gradients,
    norm_input,
    norm_weight,
    normalized,
    product,
    residual,
    token_losses_fp64,
)

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def exact_dot(left: Tensor, right: Tensor) -> Fraction:
    """Without rounding."""
    return sum((Fraction(a) * Fraction(b) for a, b in zip(left.tolist(), right.tolist(), strict=True)), Fraction(0))


def in_order(left: Tensor, right: Tensor, order: tuple[int, ...], fused: bool) -> Tensor:
    """The sum in fp32 in an order, each product rounded first or together with its addition."""
    total = torch.zeros((), dtype=torch.float32)
    for place in order:
        a, b = left[place].double(), right[place].double()
        total = (total.double() + a * b).float() if fused else total + (a * b).float()
    return total


def adversarial(kind: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Rows of four whose sums are hard: cancellation, small numbers, a huge range, ties of rounding."""
    info = torch.finfo(kind)
    one = torch.tensor([1.0, 1 + info.eps, -1.0, -1.0 - info.eps / 2])
    yield "cancellation", one.to(kind), torch.tensor([1.0, 1.0, 1 + info.eps, 1.0]).to(kind)
    small = torch.tensor([info.tiny, -info.tiny, info.smallest_normal / 8, 3 * info.tiny]).to(kind)
    yield "denormals", small, torch.tensor([1.0, 1.0 + info.eps, 2.0, 0.5]).to(kind)
    wide = torch.tensor([2.0**14, -(2.0**-14), 2.0**10, -(2.0**14)]).to(kind)
    yield "range", wide, torch.tensor([1.0, 1.0, 2.0**-14, 1.0 + info.eps]).to(kind)
    yield "ties", torch.tensor([1.0, info.eps / 2, 0.0, 0.0]).to(kind), torch.ones(4).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_every_order_of_summation_is_within_the_bound(kind: torch.dtype, fused: bool) -> None:
    """Of adversarial and of random rows; the bound of the exact rational value, not only of fp64's."""
    torch.manual_seed(1)
    rows = [*adversarial(kind), *(("random", *torch.randn(2, 4).to(kind)) for _ in range(20))]
    for name, left, right in rows:
        found = product(left[None], right[None], kind)
        truth = exact_dot(left, right)
        slack = abs(Fraction(found.values.item()) - truth)
        for order in permutations(range(4)):
            got = in_order(left, right, order, fused).to(kind)
            assert abs(Fraction(got.item()) - truth) + slack <= Fraction(found.bounds.item()), (name, order)
            assert judge_rounding({0: got[None], 1: torch.full((1,), torch.nan)}, found) == {0: True, 1: False}


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_products_are_never_accused(kind: torch.dtype) -> None:
    """Results of the device's own routines, with one thread and with two, of many shapes and scales."""
    torch.manual_seed(2)
    compared = 0
    for inner, scale in ((16, 1.0), (256, 1e-3), (1024, 30.0), (4096, 1.0)):
        left, weight = (torch.randn(64, inner) * scale).to(kind), torch.randn(48, inner).to(kind)
        pairs = product(left[:, None].expand(64, 48, inner).reshape(-1, inner), weight.repeat(64, 1), kind)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = (left @ weight.T).flatten()
            assert judge_rounding({0: got, 1: torch.full_like(got, torch.nan)}, pairs)[0], (inner, scale)
            compared += len(got)
    torch.set_num_threads(1)
    assert compared == 4 * 2 * 64 * 48


def test_what_a_flip_of_a_bit_shows() -> None:
    """Of sums of 1024 products: a third of the lowest bits of bf16 and nearly all others; the high bits of fp32."""
    torch.manual_seed(3)
    left, right = torch.randn(200, 1024), torch.randn(200, 1024)
    shown: dict[tuple[torch.dtype, int], int] = {}
    for kind, whole in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        one, other = left.to(kind), right.to(kind)
        exact = product(one, other, kind)
        healthy = (one.float() * other.float()).sum(-1).to(kind)
        for bit in range(torch.finfo(kind).bits - 1):
            wrong = (healthy.view(whole) ^ (1 << bit)).view(kind)
            answers = [
                judge_rounding(
                    {0: healthy[n : n + 1], 1: wrong[n : n + 1]},
                    Exact(exact.values[n : n + 1], exact.bounds[n : n + 1]),
                )
                for n in range(200)
            ]
            assert all(answer in ({}, {0: True, 1: False}) for answer in answers), "the healthy one is never accused"
            shown[kind, bit] = sum(map(bool, answers))
    assert shown[torch.bfloat16, 0] > 60 and all(shown[torch.bfloat16, bit] > 190 for bit in range(3, 15))
    assert shown[torch.float32, 0] == 0 and all(shown[torch.float32, bit] > 190 for bit in range(18, 31))


def test_where_all_are_outside_nobody_is_named() -> None:
    """The elements are not what the referee takes them for; likewise where the type may overflow."""
    exact = product(torch.ones(1, 4), torch.ones(1, 4), torch.float32)
    assert judge_rounding({0: torch.tensor([5.0]), 1: torch.tensor([6.0])}, exact) == {}
    assert judge_rounding({0: torch.tensor([5.0]), 1: torch.tensor([4.0])}, exact) == {0: False, 1: True}
    huge = product(torch.full((1, 4), 3e38), torch.ones(1, 4), torch.float32)
    assert (
        huge.bounds.isinf().all() and judge_rounding({0: torch.tensor([torch.inf]), 1: torch.tensor([1.0])}, huge) == {}
    )


def test_a_bias_is_a_sum_of_its_own() -> None:
    """It is added in the type of the result, after a rounding."""
    left, bias = torch.tensor([[1.0, 2.0**-8]]), torch.tensor([2.0**8])
    exact = product(left.bfloat16(), torch.ones(1, 2).bfloat16(), torch.bfloat16, bias.bfloat16())
    assert exact.values.item() == 257 + 2.0**-8
    got = (torch.tensor([1 + 2.0**-8]).bfloat16() + bias.bfloat16()).bfloat16()
    assert judge_rounding({0: got, 1: got * 2}, exact) == {0: True, 1: False}


def test_references_must_be_equal() -> None:
    """A rank may compute the fp64 sum wrong, too."""
    one = product(torch.ones(2, 4), torch.ones(2, 4), torch.float32)
    other = Exact(one.values + torch.tensor([0.0, 1e-12]), one.bounds)
    assert agreed([one, one]) is one and agreed([one, other]) is None


def is_explained(found: Tensor, exact: Exact) -> bool:
    """Whether a healthy device's elements are all within."""
    return not bool(((found.double() - exact.values).abs() > exact.bounds).any())


def by_hand(rows: Tensor, weight: Tensor, bias: Tensor, eps: float, one_pass: bool) -> Tensor:
    """LayerNorm in fp32; the variance as a difference of means of squares, or from differences."""
    mean = rows.mean(-1, keepdim=True)
    apart = (rows - mean).square().mean(-1, keepdim=True)
    variance = rows.square().mean(-1, keepdim=True) - mean.square() if one_pass else apart
    scale = (variance.clamp(min=0) + eps).rsqrt()
    return rows * (scale * weight) + (bias - mean * scale * weight)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centre", [0.0, 30.0, 1e4])
def test_norms_are_within_the_bound(kind: torch.dtype, centre: float) -> None:
    """However the variance is computed, also where the mean is much larger than the deviations."""
    torch.manual_seed(4)
    width, eps = 256, 1e-5
    rows = (torch.randn(40, width) * torch.logspace(-3, 2, 40)[:, None] + centre).to(kind)
    weight, bias = torch.randn(2, width).to(kind)
    columns = torch.arange(width).repeat(40)
    every = rows.repeat_interleave(width, 0)
    own = rows.flatten()
    layer = normalized(own, NormMoments.of(every, eps, centred=True), weight[columns], bias[columns], kind, width)
    shape = (width,)
    found = [torch.nn.functional.layer_norm(rows, shape, weight, bias, eps)]
    found += [by_hand(rows.float(), weight.float(), bias.float(), eps, one_pass).to(kind) for one_pass in (False, True)]
    for got in found:
        assert judge_rounding({0: got.flatten(), 1: torch.full((len(columns),), torch.nan)}, layer).get(
            0, layer.bounds.isinf().any()
        )
    root = normalized(own, NormMoments.of(every, eps, centred=False), weight[columns], None, kind, width)
    got = torch.nn.functional.rms_norm(rows, shape, weight, eps)
    assert is_explained(got.flatten(), root)
    if not centre:
        assert layer.bounds.isfinite().all() and (root.bounds < 0.02 * root.values.abs() + 1e-3).all()
        wrong = got.flatten() * 1.05 + 0.1
        assert judge_rounding({0: got.flatten(), 1: wrong}, root) == {0: True, 1: False}


@pytest.mark.parametrize("kind", KINDS)
def test_residual_sums_are_within_the_bound(kind: torch.dtype) -> None:
    """In each type, with dropout and without, rounded each time or once; one element of the other side is wrong."""
    torch.manual_seed(5)
    branch, bias, other = torch.randn(3, 5000).to(kind)
    mask = (torch.rand(5000) > 0.1).to(kind) / 0.9
    for masked in (None, mask):
        kept = torch.ones((), dtype=kind) if masked is None else masked
        got = other + (branch + bias) * kept
        once = (other.double() + (branch.double() + bias.double()) * kept.double()).to(kind)
        wrong = got.clone()
        wrong[7] = got[7] + 0.5
        assert judge_rounding({0: got, 1: wrong, 2: once}, residual(branch, bias, masked, other, kind)) == {
            0: True,
            1: False,
            2: True,
        }


def test_what_is_copied_has_no_bound() -> None:
    """The lowest bit is seen."""
    values = torch.randn(10)
    wrong = (values.view(torch.int32) ^ 1).view(torch.float32)
    assert judge_rounding({0: values, 1: wrong}, chosen(values)) == {0: True, 1: False}


def test_sums_in_the_type_of_the_result_have_its_bound() -> None:
    """As gradients of an embedding, which are added token by token; terms that are 0 count for nothing."""
    torch.manual_seed(6)
    terms = torch.randn(50, 200).bfloat16()
    here = (torch.rand(50, 200) < 0.1).bfloat16()
    got = torch.zeros(50).bfloat16()
    for place in range(200):
        got = got + here[:, place] * terms[:, place]
    exact = product(here, terms, torch.bfloat16, working=torch.bfloat16)
    assert exact.bounds.isfinite().all()
    assert judge_rounding({0: got, 1: torch.full((50,), torch.nan)}, exact)[0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("centre", [0.0, 3.0, 1e3])
def test_gradients_of_norms_are_within_the_bound(kind: torch.dtype, centred: bool, centre: float) -> None:
    """Of the input and of the weight, as the device computes them; a wrong element is seen."""
    torch.manual_seed(7)
    tokens, width, eps = 60, 128, 1e-5
    rows = (torch.randn(tokens, width) * torch.logspace(-1, 1, tokens)[:, None] + centre).to(kind).requires_grad_()
    weight = torch.randn(width).to(kind).requires_grad_()
    shape, function = (width,), torch.nn.functional
    got = function.layer_norm(rows, shape, weight, torch.zeros(width, dtype=kind), eps)
    if not centred:
        got = function.rms_norm(rows, shape, weight, eps)
    slope = torch.randn(tokens, width).to(kind)
    of_rows, of_weight = (one.flatten() for one in torch.autograd.grad(got, (rows, weight), slope))
    columns, given = torch.arange(width).repeat(tokens), rows.detach()
    every, slopes = given.repeat_interleave(width, 0), slope.repeat_interleave(width, 0)
    exact = norm_input(
        slopes, every, columns, NormMoments.of(every, eps, centred=centred), weight.detach(), kind, centred=centred
    )
    of_all = norm_weight(slope.T, given.T, NormMoments.of(given, eps, centred=centred), kind, width)
    for found, expected in ((of_rows, exact), (of_weight, of_all)):
        assert is_explained(found, expected)
        if centre == 0.0:
            assert expected.bounds.isfinite().all()
            wrong = found.clone()
            wrong[5] += 0.2 * found.abs().max()
            assert judge_rounding({0: found, 1: wrong}, expected) == {0: True, 1: False}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [100, 4000])
def test_long_sums_of_a_layer_norm_are_within_the_bound(kind: torch.dtype, tokens: int) -> None:
    """PyTorch adds them in their own type on a processor, in which 256 tokens of bf16 are as many as 4,000."""
    torch.manual_seed(9)
    module, given = nn.LayerNorm(40).to(kind), (torch.randn(tokens, 40) + torch.arange(40)).to(kind)
    with record_calls(module) as calls:
        module(given.requires_grad_()).backward(torch.ones(tokens, 40, dtype=kind))
    for slot, parameter in module.named_parameters():
        assert parameter.grad is not None
        exhibit = make_exhibit(Address(1, 0, WEIGHT_GRAD, "norm", slot), NORM, calls, parameter.grad)
        assert exhibit is not None
        exact = exhibit.compute(torch.zeros(40, dtype=torch.int64), torch.arange(40))
        assert is_explained(parameter.grad, exact)
        assert exact.bounds.isfinite().all() or kind != torch.float32


@pytest.mark.parametrize("trained", [0, 1])
def test_a_result_is_computed_from_the_call_that_made_it(trained: int) -> None:
    """Of two calls the first is the forward pass, the last the recomputation; gradients are of the one that has one."""
    torch.manual_seed(15)
    module, given = nn.LayerNorm(40), torch.randn(2, 7, 40)
    with record_calls(module) as calls:
        outputs = []
        for place in (0, 1):
            with torch.set_grad_enabled(place == trained):
                outputs.append(module(given[place]))
        outputs[trained].backward(torch.randn(7, 40))
    assert module.weight.grad is not None
    rows, columns = (one.flatten() for one in torch.meshgrid(torch.arange(7), torch.arange(40), indexing="ij"))
    for place, phase in ((0, FORWARD), (1, RECOMPUTE)):
        exhibit = make_exhibit(Address(1, 0, phase, "norm", "output"), NORM, calls, outputs[place])
        assert exhibit is not None
        exact = exhibit.compute(rows, columns)
        assert is_explained(outputs[place].detach().flatten(), exact)
        assert not is_explained(outputs[1 - place].detach().flatten(), exact)
    exhibit = make_exhibit(Address(1, 0, WEIGHT_GRAD, "norm", "weight"), NORM, calls, module.weight.grad)
    assert exhibit is not None
    assert is_explained(module.weight.grad, exhibit.compute(torch.zeros(40, dtype=torch.int64), torch.arange(40)))
    assert make_exhibit(Address(1, 0, WEIGHT_GRAD, "norm", "weight"), NORM, [], module.weight.grad) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_activations_are_within_the_bound(kind: torch.dtype, name: str, gated: bool) -> None:
    """As the device computes them, with a bias, gated and not; a wrong element is seen."""
    torch.manual_seed(8)
    function = ACTIVATIONS[name]
    gate, linear = torch.randn(2, 4000).mul(4).to(kind)
    bias, other = torch.randn(2, 4000).to(kind)
    got = function(gate + bias) * (linear + other if gated else 1)
    exact = activated(function, gate, bias, (linear, other) if gated else None, kind)
    assert is_explained(got, exact) and exact.bounds.isfinite().all()
    wrong = got.clone()
    wrong[9] += 0.3 + 0.1 * got[9].abs()
    assert judge_rounding({0: got, 1: wrong}, exact) == {0: True, 1: False}


def gate_of_megatron(
    function: Callable[[Tensor], Tensor], gate: Tensor, linear: Tensor, clamp: float | None, offset: float
) -> Tensor:
    """Megatron-core's own gated activation, of what its first linear layer gives with its bias."""
    config = SimpleNamespace(
        use_te_activation_func=False, bias_activation_fusion=False, gated_linear_unit=True, activation_func=function,
        activation_func_clamp_value=clamp, glu_linear_offset=offset,
    )  # fmt: skip
    layer = SimpleNamespace(config=config, linear_fc1=lambda x: (x, None), linear_fc2=lambda x: (x, None))
    return MLP.forward(layer, torch.cat((gate, linear), -1))[0]


def worst_of_megatron(
    function: Callable[[Tensor], Tensor],
    given: tuple[Tensor, Tensor],
    has_bias: bool,
    clamp: float | None,
    offset: float,
    kind: torch.dtype,
) -> Tensor:
    """How far Megatron-core's gate is moved in fp64 by roundings to a type, each to whichever side moves it most.

    Of both sums of branch and bias, of the function, of the sum with the offset and of the product; a device may have
    clamp and offset in its type too.
    """
    unit, values = torch.finfo(kind).eps / 2, gate_of_megatron(function, *given, clamp, offset)
    worst = torch.zeros_like(values)
    for a, b, c, d, e in every((-unit, unit), repeat=5):
        gate, linear = (one * (1 + move * has_bias) for one, move in zip(given, (a, b), strict=True))
        for stored in (False, True):
            least, more = ((torch.tensor(x).to(kind).item() if stored and x else x) for x in (clamp, offset))
            moved = gate_of_megatron(lambda x, c=c: function(x) * (1 + c), gate, linear, least, more)
            worst = worst.maximum((moved * (1 + d) * (1 + e) - values).abs())
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("clamp", "offset"), [(None, 0.3), (None, -1.0), (7.0, 1.0), (1.1, -0.3), (0.3, 0.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_clamped_gates_with_an_offset_are_within_the_bound(
    kind: torch.dtype, clamp: float | None, offset: float, has_bias: bool
) -> None:
    """As Megatron-core has them: its formula in fp64 with every rounding moved, and in the type itself.

    The bound is at most a few times the farthest of these where the function has its usual slope, and a wrong sign of
    the offset is outside.
    """
    torch.manual_seed(14)
    function = ACTIVATIONS["silu"]
    gate, linear = torch.randn(2, 1000).mul(4).to(kind)
    linear[:100] = (torch.randn(100) * 0.02 - offset).to(kind)  # which the offset takes away again
    bias, other = torch.randn(2, 1000).to(kind) if has_bias else (None, None)
    exact = activated(function, gate, bias, (linear, other), kind, clamp=clamp, offset=offset)
    pairs = ((gate, bias), (linear, other))
    wide = [one.double() if more is None else one.double() + more.double() for one, more in pairs]
    values = gate_of_megatron(function, wide[0], wide[1], clamp, offset)
    torch.testing.assert_close(exact.values, values, rtol=1e-13, atol=1e-14)
    worst = worst_of_megatron(function, (wide[0], wide[1]), has_bias, clamp, offset, kind)
    assert (exact.bounds >= worst).all()
    narrow = [one if more is None else one + more for one, more in pairs]
    assert is_explained(gate_of_megatron(function, narrow[0], narrow[1], clamp, offset), exact)
    usual = (wide[0] > 0) & (wide[0] < (clamp or torch.inf))
    least = (2.0**-19 * wide[0].abs() + 8 * torch.finfo(kind).tiny) * (1 + wide[1].abs())
    assert (exact.bounds <= 4 * worst + least)[usual].double().mean() > 0.7
    turned = gate_of_megatron(function, wide[0], wide[1], clamp, -offset)
    assert offset == 0 or (~is_within(turned, exact))[usual].double().mean() > 0.99


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations_are_within_the_bound(kind: torch.dtype, gated: bool, name: str) -> None:
    """As autograd computes them, over a wide range; a wrong element is seen."""
    torch.manual_seed(13)
    function = ACTIVATIONS[name]
    gate, linear, slope = torch.randn(3, 4000).mul(3).to(kind)
    bias, other = torch.randn(2, 4000).to(kind)
    leaf = gate.clone().requires_grad_()
    output = function(leaf + bias) * (linear + other if gated else 1)
    (got,) = torch.autograd.grad(output, leaf, slope)
    factor = (linear, other) if gated else None
    exact = activated_input(function, slope, gate, bias, factor, kind, steps=name == "relu")
    assert is_explained(got, exact) and exact.bounds.isfinite().all()
    wrong = got.clone()
    wrong[9] += 4 * exact.bounds[9].to(kind) + 1e-3
    assert judge_rounding({0: got, 1: wrong}, exact) == {0: True, 1: False}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [1.0, 2.0])
def test_rows_of_attention_are_within_the_bound(kind: torch.dtype, turned: bool, size: float) -> None:
    """As the device's kernel computes them, with keys shared by heads, rotated or not; a wrong element is seen."""
    torch.manual_seed(9)
    tokens, heads, width = 300, 2, 32
    query = (torch.randn(tokens, 1, heads, width) * size).to(kind)
    key, value = torch.randn(2, tokens, 1, 1, width).to(kind)
    angles = torch.randn(tokens, 1, 1, width // 2).repeat(1, 1, 1, 2)
    sign = torch.ones(width).index_fill(0, torch.arange(width // 2), -1.0)
    cosine, sine = angles.cos().to(kind), (angles.sin() * sign).to(kind)
    q, k = rotate(query, key, cosine, sine) if turned else (query, key)
    scale = width**-0.5
    got = torch.nn.functional.scaled_dot_product_attention(
        *(one.permute(1, 2, 0, 3) for one in (q, k, value)), is_causal=True, scale=scale, enable_gqa=True
    )
    zero = torch.zeros(tokens, width, dtype=torch.float64)
    for row in (0, 1, 17, 299):
        for head in range(heads):
            asked = query[row : row + 1, 0, head], cosine[row : row + 1, 0, 0], sine[row : row + 1, 0, 0]
            seen = key[: row + 1, 0, 0], cosine[: row + 1, 0, 0], sine[: row + 1, 0, 0]
            one, all_keys = (
                rotated(*given, kind) if turned else (given[0].double(), zero[: len(given[0])])
                for given in (asked, seen)
            )
            exact = attended((one[0][0], one[1][0]), all_keys, value[: row + 1, 0, 0], scale, kind)
            found = got[0, head, row]
            assert is_explained(found, exact) and exact.bounds.isfinite().all()
            wrong = found.clone()
            wrong[3] += 0.3 * size**3
            assert judge_rounding({0: found, 1: wrong}, exact) == {0: True, 1: False}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.5, 1.0])
def test_gradients_of_attention_are_within_the_bound(kind: torch.dtype, size: float) -> None:
    """Rotated, keys shared by two heads, more tokens than a block of rows; a wrong element is seen."""
    torch.manual_seed(10)
    tokens, width, scale = 600, 16, 0.25
    query, key = (torch.randn(tokens, 1, heads, width).mul(size).to(kind) for heads in (2, 1))
    value, slope = torch.randn(tokens, 1, 1, width).to(kind), torch.randn(1, 2, tokens, width).to(kind)
    angles = torch.randn(tokens, 1, 1, width // 2).repeat(1, 1, 1, 2)
    sign = torch.ones(width).index_fill(0, torch.arange(width // 2), -1.0)
    cosine, sine = angles.cos().to(kind), (angles.sin() * sign).to(kind)

    def gradients(*leaves: Tensor, kind: torch.dtype = kind) -> tuple[Tensor, ...]:
        for one in leaves:
            one.requires_grad_()
        q, k = rotate(leaves[0], leaves[1], cosine.to(kind), sine.to(kind))
        turned = (one.permute(1, 2, 0, 3) for one in (q, k, leaves[2]))
        output = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, scale=scale, enable_gqa=True)
        return torch.autograd.grad(output, leaves, slope.to(kind))

    got = gradients(query.clone(), key.clone(), value.clone())
    right = gradients(query.double(), key.double(), value.double(), kind=torch.float64)
    turn = cosine[:, 0, 0], sine[:, 0, 0]
    keys = Off(*rotated(key[:, 0, 0], *turn, kind))
    heads = [
        head_gradients(Off(*rotated(query[:, 0, one], *turn, kind)), keys, value[:, 0, 0], slope[0, one], scale, kind)
        for one in range(2)
    ]
    found = [
        unrotated(heads[1][0].rounded(kind, 2), *turn, kind),
        unrotated(summed([one[1] for one in heads], kind).rounded(kind, 2), *turn, kind),
        summed([one[2] for one in heads], kind),
    ]
    rows, columns = torch.arange(tokens).repeat_interleave(width), torch.arange(width).repeat(tokens)
    for gradient, exact, off in zip(got, right, found, strict=True):
        answer = elements(off, rows, columns, kind)
        assert torch.allclose(off.values, exact[:, 0, -1], rtol=0, atol=1e-11 * size**4)
        healthy = gradient[:, 0, -1].flatten()
        assert is_explained(healthy, answer) and answer.bounds.isfinite().all()
        wrong = healthy.clone()
        wrong[77] += 4 * answer.bounds[77].to(kind)
        assert judge_rounding({0: healthy, 1: wrong}, answer) == {0: True, 1: False}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_attention_with_dropout_is_within_the_bound(kind: torch.dtype) -> None:
    """Scores and weights as tensors of the type: output and gradients; a wrong element is seen."""
    torch.manual_seed(12)
    tokens, width, scale = 80, 16, 0.25
    factors, slope = torch.randn(3, tokens, width).to(kind), torch.randn(tokens, width).to(kind)
    mask = ((torch.rand(tokens, tokens) > 0.1) / 0.9).to(kind)
    leaves = [one.clone().requires_grad_() for one in factors]
    query, key, value = leaves
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (query @ key.T).float() * scale
    output = (scores.masked_fill(future, -torch.inf).softmax(-1).to(kind) * mask) @ value
    asked, seen = from_exact(factors[0]), from_exact(factors[1])
    for row in (0, 5, 79):
        keys = seen.values[: row + 1], seen.bounds[: row + 1]
        one = asked.values[row], asked.bounds[row]
        exact = attended(one, keys, factors[2, : row + 1], scale, kind, mask[row, : row + 1])
        assert is_explained(output[row].detach(), exact) and exact.bounds.isfinite().all()
    gradients = torch.autograd.grad(output, leaves, slope)
    rows, columns = torch.arange(tokens).repeat_interleave(width), torch.arange(width).repeat(tokens)
    found = head_gradients(asked, seen, factors[2], slope, scale, kind, mask)
    for gradient, off in zip(gradients, found, strict=True):
        answer, healthy = elements(off, rows, columns, kind), gradient.flatten()
        assert is_explained(healthy, answer) and answer.bounds.isfinite().all()
        wrong = healthy.clone()
        wrong[77] += 4 * answer.bounds[77].to(kind)
        assert judge_rounding({0: healthy, 1: wrong}, answer) == {0: True, 1: False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("fuse", [False, True])
def test_losses_and_their_gradients_are_within_the_bound(kind: torch.dtype, size: float, fuse: bool) -> None:
    """Of the loss that runs use, with padding; a wrong loss and a wrong gradient are seen."""
    torch.manual_seed(11)
    tokens, samples, real, padded = 20, 3, 250, 256
    logits = torch.randn(tokens, samples, padded).mul(size).to(kind).requires_grad_()
    labels, slopes = torch.randint(0, real, (samples, tokens)), torch.rand(samples, tokens) / 60
    losses = TokenLoss(real, padded, 0, 1, fuse).per_token(logits, labels)
    (gradient,) = torch.autograd.grad(losses, logits, slopes)
    flat, marks = logits.detach()[..., :real].flatten(0, 1), labels.T.flatten()
    exact = token_losses_fp64(flat, marks)
    right = torch.nn.functional.cross_entropy(flat.double(), marks, reduction="none")
    assert torch.allclose(exact.values, right, rtol=1e-12)
    healthy = losses.detach().T.flatten()
    assert is_explained(healthy, exact) and exact.bounds.isfinite().all()
    wrong = healthy.clone()
    wrong[5] += 1e-3 * (1 + size**2)
    assert judge_rounding({0: healthy, 1: wrong}, exact) == {0: True, 1: False}
    rows, columns = torch.arange(tokens * samples).repeat_interleave(padded), torch.arange(padded).repeat(60)
    found = logit_gradients(flat, marks, slopes.T.flatten(), rows, columns, kind)
    healthy = gradient.flatten()
    assert is_explained(healthy, found) and found.bounds.isfinite().all()
    for place in (7, padded - 1, int(marks[0])):  # one that is likely or not, padding, the label
        wrong = healthy.clone()
        wrong[place] += 2e-4
        assert judge_rounding({0: healthy, 1: wrong}, found) == {0: True, 1: False}


@pytest.mark.parametrize("size", [0.1, 1.0, 20.0])
def test_losses_by_inaccurate_functions_are_within_the_bound(size: float) -> None:
    """The formula in fp64, by an exponential and a logarithm that are as wrong as they may be, both to one side.

    Of few logits, so that the allowance for their sum hides nothing; the bound is at most a few times that.
    """
    torch.manual_seed(16)
    logits, labels, off = torch.randn(400, 5).mul(size), torch.randint(0, 5, (400,)), 2.0**-20
    exact = token_losses_fp64(logits, labels)
    wide, largest = logits.double(), logits.double().amax(-1)
    own = wide.gather(-1, labels[:, None])[:, 0]
    for sign in (-1, 1):
        total = ((wide - largest[:, None]).exp() * (1 + sign * off)).sum(-1).log()
        got = total + sign * off * (1 + total) + largest - own
        assert is_explained(got, exact)
        reach = 2.0**-20 * (largest.abs() + own.abs() + wide.abs().amax(-1))
        assert (exact.bounds <= 4 * (got - exact.values).abs() + reach).all()
