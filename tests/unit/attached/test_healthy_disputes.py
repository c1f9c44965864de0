"""Two right ways to compute what differs by much, or jumps, name nobody; a wrong rank is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasdc.attached.batch_replayer import Batch, SentTensor
from megasdc.sdc.referee.rounding import Unfit, estimate
from tools.trainings.modules import InnerAutocast, InnerCast, NarrowNorm, Step
from tools.trainings.numerics import ORDER, Other, use_kernel
from tools.trainings.pair import Judged, Side, judge_pair

WIDTH, TOKENS = 16, 24


class _Model(nn.Module):
    """A submodule between words and a loss."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(TOKENS, WIDTH), middle

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        """The loss."""
        return {"loss": self.middle(self.words(given)).float().square().mean()}


def _judged(make: Callable[[], nn.Module], kind: torch.dtype, change: Callable[[nn.Module], None], seed: int) -> Judged:
    sides = []
    for rank in range(2):
        torch.manual_seed(seed)
        model = _Model(make()).to(kind)
        if rank:
            change(model.middle)
        sides.append(
            Side(rank, model, Batch((), {"given": SentTensor(torch.arange(TOKENS)[None], False, True)}, None, {}))
        )
    judged = judge_pair((sides[0], sides[1]))
    assert judged is not None and judged.address.fqn == "middle", "they differ"
    return judged


def _kernel(module: nn.Module) -> None:
    assert use_kernel(module)


def _order(module: Any) -> None:
    own = type(module).forward

    def forward(given: Tensor) -> Tensor:
        with Other(ORDER):
            found: Tensor = own(module, given)
        return found

    module.forward = forward


class _Wild(nn.Module):
    """A sum that may overflow on the way."""

    def forward(self, given: Tensor) -> Tensor:
        """Of four that cancel."""
        large = given[..., :2] * 0 + 3e38
        return torch.cat((large, -large), -1).sum(-1, keepdim=True) / 3e38


def _wild(module: nn.Module) -> None:
    module.forward = lambda given: given[..., :1] * 0 + torch.inf


HEALTHY: dict[str, tuple[Callable[[], nn.Module], torch.dtype, Callable[[nn.Module], None]]] = {
    "narrow norm, bf16": (lambda: NarrowNorm(WIDTH), torch.bfloat16, _kernel),
    "narrow norm, fp16": (lambda: NarrowNorm(WIDTH), torch.float16, _kernel),
    "cast inside": (InnerCast, torch.float32, _kernel),
    "mixed precision inside": (lambda: InnerAutocast(WIDTH), torch.float32, _kernel),
    "step": (lambda: Step(WIDTH), torch.float32, _order),
    "overflow": (_Wild, torch.float32, _wild),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_right_results_that_are_far_apart_name_nobody(name: str) -> None:
    """Norms that round at each operation, casts that code makes itself, choices, sums that overflow on the way."""
    for seed in range(2):
        judged = _judged(*HEALTHY[name], seed)
        assert not judged.named and judged.opinion.reason, seed


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: NarrowNorm(WIDTH), lambda: nn.GroupNorm(1, TOKENS)], ids=["norm", "code"])
def test_a_wrong_row_is_named(make: Callable[[], nn.Module], kind: torch.dtype) -> None:
    """Ranks agree on the other ones, which are what the submodule computes."""

    def spoil(module: nn.Module) -> None:
        own, wrong = module.forward, torch.zeros(TOKENS, 1, dtype=kind)
        wrong[3] = 64.0
        module.forward = lambda given: own(given) + wrong

    assert _judged(make, kind, spoil, 1).named == [1]


def test_where_ranks_agree_on_nothing_a_small_difference_names_nobody() -> None:
    """The submodule's code may be another one on the ranks; one that is off by half is wrong."""

    class Own(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return F.mish(given)

    def by(factor: float) -> Callable[[nn.Module], None]:
        def change(module: nn.Module) -> None:
            module.forward = lambda given: F.mish(given) * factor

        return change

    small = _judged(Own, torch.float32, by(1 + 2.0**-9), 1)
    assert not small.named and "neither" not in small.opinion.reason
    assert _judged(Own, torch.float32, by(1.5), 1).named == [1]


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "round in place": lambda one: one.clone().round_(),
    "whole numbers": lambda one: (one * 7).to(torch.int32).double(),
    "division": lambda one: torch.div(one, 0.3, rounding_mode="floor"),
    "floor division": lambda one: one // 0.3,
    "remainder": lambda one: one % 0.3,
    "quantized": lambda one: torch.fake_quantize_per_tensor_affine(one, 0.1, 0, -128, 127),
    "a number of Python": lambda one: one * 2 if one.sum().item() > 0.5 else one,
    "given chances": torch.bernoulli,
    "largest": lambda one: (one + one.flip(0)).max(0)[1].double(),
    "comparison": lambda one: (one - one.mul(3).div(3) > 0).double(),
    "places": lambda one: (one - one.mul(3).div(3) > 0).nonzero().double().sum(0),
    "complex": lambda one: torch.fft.fft(one).real,
    "fp8": lambda one: one.to(torch.float8_e4m3fn).double(),
}


@pytest.mark.parametrize("name", JUMPS)
def test_what_jumps_is_not_estimated(name: str) -> None:
    """By its name, or since a choice is another one with errors."""
    given = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(Unfit):
        estimate(lambda: JUMPS[name](given), torch.float32)


def test_the_coarsest_type_that_is_asked_for_counts_and_largest_numbers_overflow() -> None:
    """Casts on the way and mixed precision inside; masks of the largest number do not."""
    given = torch.linspace(1, 2, 8, dtype=torch.float64)

    def mixed() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return given.square() * 1.0

    fine = estimate(given.square, torch.float32)[1].max()
    for compute in (lambda: given.bfloat16().square() * 1.0, mixed):
        assert estimate(compute, torch.float32)[1].max() > 1000 * fine
    large = torch.tensor([3e38, 3e38, -3e38, -3e38], dtype=torch.float64)
    assert estimate(lambda: large.sum(-1, keepdim=True), torch.float32)[1].isinf().all()
    mask = torch.full((8,), torch.finfo(torch.float32).min, dtype=torch.float64)
    assert (
        estimate(lambda: (given + torch.where(given > 1.5, mask, 0.0)).softmax(-1), torch.float32)[1].isfinite().all()
    )
