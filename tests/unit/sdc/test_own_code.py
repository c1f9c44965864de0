"""A submodule's own code in fp64 tells wrong results from what rounding makes of them, and calls no right one wrong."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.common.addresses import BACKWARD, FORWARD, WEIGHT_GRAD, Address
from megasdc.sdc.referee.foreign import own_result, result_between
from megasdc.sdc.referee.recompute import ESTIMATED, Exhibit, record_calls
from megasdc.sdc.referee.referee import is_within, judge_rounding
from megasdc.sdc.referee.rounding import Unfit, estimate

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
    with record_calls(module) as calls, record_calls(inner) as inside, torch.autocast("cpu", enabled=mixed):
        found = module(given, **options)
        output = found[0] if isinstance(found, tuple) else found
        wanted = {"input": given, **dict(module.named_parameters(recurse=False))}
        wanted |= {"out": module.out.weight} if isinstance(module, _Attention) else {}
        gradients = torch.autograd.grad(output, list(wanted.values()), torch.randn_like(output))
    return output.detach(), calls, inside, dict(zip(wanted, gradients, strict=True))


def _exact(exhibit: Exhibit | str) -> tuple[Tensor, Any]:
    assert isinstance(exhibit, Exhibit), exhibit
    assert replace(exhibit.trust, alone=ESTIMATED.alone) == ESTIMATED
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
        told = judge_rounding({0: values, 1: wrong}, exact, ESTIMATED.inner, ESTIMATED.outer)
        assert told == {0: True, 1: False}, slot
        near = exact.values + (ESTIMATED.inner + ESTIMATED.outer) / 2 * exact.bounds
        assert judge_rounding({0: values, 1: near}, exact, ESTIMATED.inner, ESTIMATED.outer) == {}
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
    with record_calls(module) as calls:
        output = module(torch.randn(3, 4)).detach()
    exhibit = own_result(Address(1, 0, FORWARD, "m", "output"), calls, output)
    assert isinstance(exhibit, Exhibit)
    with pytest.raises(Unfit, match=reason):
        exhibit.compute(torch.tensor([0]), torch.tensor([0]))


def test_what_is_computed_several_times_is_not_judged() -> None:
    """Its gradients are of one of them, or sums."""
    module, given = nn.Tanh(), torch.randn(2, 4, requires_grad=True)
    with record_calls(module) as calls:
        module(module(given)).sum().backward()
    assert given.grad is not None
    found = own_result(Address(1, 0, BACKWARD, "m", "input"), calls, given.grad)
    assert found == "it is computed several times in a micro-batch"
    assert "used more than once" in str(own_result(Address(1, 0, WEIGHT_GRAD, "m", "w"), calls[:1], given, False))


class _Held:
    """Of no container: what code keeps in an object of its own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(2, dtype=torch.float64)


class _Keeps(nn.Module):
    """Writes what it is given into all that it has, as statistics are kept."""

    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.plain, self.count, self.held = torch.zeros(2), [0], _Held()
        self.inside = {"list": [torch.zeros(2)], "deque": deque([torch.zeros(2)]), "tuple": (torch.zeros(2),)}
        self.norm = nn.BatchNorm1d(2, dtype=torch.float32)
        self.again, self.bound = [self.norm], self.add

    def add(self, given: Tensor) -> None:
        """By a method that is kept bound."""
        with torch.no_grad():
            kept = [self.wide, self.weight, self.plain, self.held.seen]
            for one in [*kept, *self.inside["list"], *self.inside["deque"], *self.inside["tuple"]]:
                one.add_(given.mean(0).to(one.dtype))
            self.count[0] += 1

    def forward(self, given: Tensor, apart: _Held) -> Tensor:
        """Twice what its norm makes of it."""
        self.bound(given)
        apart.seen.add_(1)
        return self.again[0](given) * 2


def _state(value: Any) -> Any:
    """What a module has, as bytes."""
    return pickle.dumps((value.state_dict(), value.plain, value.count, vars(value.held), value.inside))


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_computed_in_fp64_changes_nothing_of_the_submodule(grad: bool) -> None:
    """Buffers of fp64 on the host, tensors in attributes and containers, objects; also without gradients around."""
    torch.manual_seed(3)
    module, apart, given = _Keeps(), _Held(), torch.randn(5, 2, requires_grad=True)
    with record_calls(module) as calls:
        output = module(given, apart)
        (gradient,) = torch.autograd.grad(output, given, torch.randn(5, 2))
    before, seen = _state(module), apart.seen.clone()
    for phase, slot, found in ((FORWARD, "output", output.detach()), (BACKWARD, "input", gradient)):
        with torch.set_grad_enabled(grad):
            values, exact = _exact(own_result(Address(1, 0, phase, "m", slot), calls, found))
        assert is_within(values.double(), exact, ESTIMATED.inner).all(), slot
    assert _state(module) == before and torch.equal(apart.seen, seen)


def test_compiled_calls_are_not_made_for_the_submodule() -> None:
    """A compiled call is bound to the submodule itself, whose statistics it would write."""
    module, given = nn.BatchNorm1d(2), torch.randn(5, 2)
    module._compiled_call_impl = module._call_impl  # type: ignore[assignment]  # as ``compile`` sets it
    with record_calls(module) as calls:
        output = module(given)
    _exact(own_result(Address(1, 0, FORWARD, "m", "output"), calls, output.detach()))
    assert module.num_batches_tracked == 1


def _scripted() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm1d(4))
    module[0] = torch.jit.script(module[0])
    return module


class _Around(nn.Module):
    """Uses a module that is none of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = [nn.BatchNorm1d(4)]

    def forward(self, given: Tensor) -> Tensor:
        """Of the other one."""
        return self.outside[0](given)


@pytest.mark.parametrize("kind", [_scripted, _Around])
def test_modules_that_cannot_be_copied_are_not_used(kind: Callable[[], nn.Module]) -> None:
    """They are the training's own."""
    module = kind()
    with record_calls(module) as calls:
        output = module(torch.randn(3, 4)).detach()
    exhibit = own_result(Address(1, 0, FORWARD, "m", "output"), calls, output)
    assert isinstance(exhibit, Exhibit)
    with pytest.raises(Unfit, match="cannot be copied"):
        exhibit.compute(torch.tensor([0]), torch.tensor([0]))


def test_what_was_in_memory_before_a_mask_was_drawn_is_nobodys() -> None:
    """A dropout draws its mask into new memory, which may hold any number."""

    def compute() -> Tensor:
        torch.manual_seed(3)
        return torch.ones(5, 2, dtype=torch.float64) * torch.full((5, 2), 1e300, dtype=torch.float64).bernoulli_(0.5)

    values, bounds = estimate(compute, torch.float32)
    assert set(values.flatten().tolist()) == {0.0, 1.0} and bounds.max() < 1e-5
