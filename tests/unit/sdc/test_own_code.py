"""A submodule's own code in fp64 tells wrong results from what rounding makes of them, and calls no right one wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.sdc.exhibits.calls import ESTIMATED, Exhibit, kept_calls
from megasdc.sdc.exhibits.own import own_result, result_between
from megasdc.sdc.fp64.noise import Unfit
from megasdc.sdc.fp64.referee import is_within, judge

SAMPLES, TOKENS, WIDTH = 2, 9, 16


class _Attention(nn.Module):
    """Softmax attention in one operation, whose scores are made narrower on the way; the output is one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, given: Tensor, *, scale: Tensor) -> tuple[Tensor, None]:
        """Of one head."""
        query, key = self.query(given), self.key(given)
        weights = F.softmax(query @ key.mT * scale, -1, dtype=torch.float32).to(given.dtype)
        return self.out(F.dropout(weights, 0.25) @ given), None


class _Gated(nn.Module):
    """A norm that is none, with a function between its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.randn(WIDTH))

    def forward(self, given: Tensor) -> Tensor:
        """A Mish between two layers."""
        return self.down(F.mish(self.gate(given * self.factor)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": _Attention,
    "gated": _Gated,
    "convolution": lambda: nn.Conv1d(TOKENS, WIDTH, 3),
    "group_norm": lambda: nn.GroupNorm(3, TOKENS),
}


def _computed(module: Any, kind: torch.dtype, mixed: bool) -> tuple[Any, Any, list[Any], dict[str, Tensor]]:
    """Output, its calls, those of the last submodule, and gradients by slot."""
    given = (torch.randn(SAMPLES, TOKENS, WIDTH) * 2).to(kind).requires_grad_()
    options = {"scale": torch.tensor(0.25, dtype=kind)} if isinstance(module, _Attention) else {}
    inner = getattr(module, "out", getattr(module, "down", None))
    with kept_calls(module) as calls, kept_calls(inner) as inside, torch.autocast("cpu", enabled=mixed):
        found = module(given, **options)
        output = found[0] if isinstance(found, tuple) else found
        wanted = {"input": given, **dict(module.named_parameters(recurse=False))}
        wanted |= {"out": module.out.weight} if isinstance(module, _Attention) else {}
        gradients = torch.autograd.grad(output, list(wanted.values()), torch.randn_like(output))
    return output.detach(), calls, inside, dict(zip(wanted, gradients, strict=True))


def _exact(exhibit: Exhibit | str) -> tuple[Tensor, Any]:
    assert isinstance(exhibit, Exhibit), exhibit
    assert exhibit.trust == ESTIMATED
    rows, columns = (one.flatten() for one in torch.meshgrid(*map(torch.arange, exhibit.result.shape), indexing="ij"))
    return exhibit.result[rows, columns], exhibit.compute(rows, columns)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_right_results_are_within_and_wrong_ones_far_outside(name: str, kind: torch.dtype | None) -> None:
    """Output and gradients of any code, also with dropout and mixed precision; a rank that is between is not judged."""
    torch.manual_seed(5)
    module = MODULES[name]().to(kind or torch.float32)
    module.register_forward_hook(lambda *_: None)
    output, calls, inside, gradients = _computed(module, kind or torch.float32, kind is None)
    state = torch.get_rng_state()
    shown = {"output": own_result(Address(1, 0, FORWARD, "m", "output"), calls, output)}
    for slot, gradient in gradients.items():
        if slot != "out":
            phase = BACKWARD if slot == "input" else WEIGHT_GRAD
            shown[slot] = own_result(Address(1, 0, phase, "m", slot), calls, gradient)
    if inside:
        path = ["out"] if name == "attention" else ["down"]
        for phase in (FORWARD, BACKWARD):
            shown[phase] = result_between(Address(1, 0, phase, "m", ""), calls, inside, path)
    assert len(shown) >= 3
    for slot, exhibit in shown.items():
        values, exact = _exact(exhibit)
        assert is_within(values.double(), exact, ESTIMATED.inner).all(), slot
        wrong = values.double() + 64 * values.double().abs().mean() * (torch.arange(len(values)) == 3)
        told = judge({0: values, 1: wrong}, exact, ESTIMATED.inner, ESTIMATED.outer)
        assert told == {0: True, 1: False}, slot
        near = exact.values + (ESTIMATED.inner + ESTIMATED.outer) / 2 * exact.bounds
        assert judge({0: values, 1: near}, exact, ESTIMATED.inner, ESTIMATED.outer) == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert module(*calls[0].args, **calls[0].options) is not None, "the submodule itself is as it was"


class _Chooses(nn.Module):
    """What it computes jumps where a rounding tips the choice."""

    def forward(self, given: Tensor) -> Tensor:
        """The largest two."""
        return given.square().topk(2).values


class _Talks(nn.Linear):
    """A layer that asks other ranks."""

    def forward(self, given: Tensor) -> Tensor:
        """With a sum over ranks."""
        output = super().forward(given)
        if output.dtype == torch.float64:
            torch.ops._c10d_functional.all_reduce(output, "sum", "0")
        return output


@pytest.mark.parametrize(("kind", "reason"), [(_Chooses, "chooses by values"), (lambda: _Talks(4, 4), "communicates")])
def test_what_is_not_estimated_says_why(kind: Callable[[], nn.Module], reason: str) -> None:
    """A choice by values may tip, and nobody answers a rank that computes alone."""
    module = kind()
    with kept_calls(module) as calls:
        output = module(torch.randn(3, 4)).detach()
    exhibit = own_result(Address(1, 0, FORWARD, "m", "output"), calls, output)
    assert isinstance(exhibit, Exhibit)
    with pytest.raises(Unfit, match=reason):
        exhibit.compute(torch.tensor([0]), torch.tensor([0]))


def test_what_is_computed_several_times_is_not_judged() -> None:
    """Its gradients are of one of them, or sums."""
    module, given = nn.Tanh(), torch.randn(2, 4, requires_grad=True)
    with kept_calls(module) as calls:
        module(module(given)).sum().backward()
    assert given.grad is not None
    found = own_result(Address(1, 0, BACKWARD, "m", "input"), calls, given.grad)
    assert found == "it is computed several times in a micro-batch"
    assert "used more than once" in str(own_result(Address(1, 0, WEIGHT_GRAD, "m", "w"), calls[:1], given, False))
