"""Check of the optimizer: a slice of Adam's step recomputed in float64.

Source: Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization (arXiv 1711.05101), algorithm 2, as
``torch.optim.adam._single_tensor_adam`` (torch 2.13) has it: decay first, then the moments, then the step with eps
added to the root of the corrected second moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamSlice:
    """Some elements of a shard of weights and moments.

    Args:
        master: weights, [n].
        exp_avg: first moment, [n].
        exp_avg_sq: second moment, [n].
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master weights, first and second moment."""
        return self.master, self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True)
class AdamSettings:
    """Hyper-parameters of a group at a step.

    Args:
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        decoupled: whether weight decay is decoupled (AdamW) instead of added to the gradient.
    """

    learning_rate: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool


def adam_step(
    before: AdamSlice, gradient: Tensor, step: float | Tensor, settings: AdamSettings
) -> tuple[AdamSlice, AdamSlice]:
    """The expected slice after a step, and the magnitude of the terms that are summed.

    Args:
        gradient: [n], after unscaling and clipping.
        step: step of the optimizer, the first is 1.

    Returns:
        The slice after the step, fp64; and for each element the sum of the magnitudes of its terms, fp64, to which
        rounding errors are proportional.

    Sync: none.
    """
    (beta1, beta2), rate, decay = settings.betas, settings.learning_rate, settings.weight_decay
    master, first, second = (one.double() for one in before.tensors)
    gradient = gradient.double()
    kept = master * (1 - rate * decay) if settings.decoupled else master
    if not settings.decoupled:
        gradient = gradient + decay * master
    exp_avg = beta1 * first + (1 - beta1) * gradient
    exp_avg_sq = beta2 * second + (1 - beta2) * gradient * gradient
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + settings.eps
    size = rate / (1 - beta1**step)
    terms = beta1 * first.abs() + (1 - beta1) * gradient.abs()
    return (
        AdamSlice(kept - size * exp_avg / denominator, exp_avg, exp_avg_sq),
        AdamSlice(master.abs() + size * terms / denominator, terms, exp_avg_sq),
    )


def adam_bounds(before: AdamSlice, gradient: Tensor, step: float | Tensor, settings: AdamSettings) -> AdamSlice:
    """Largest differences of a slice after a step from ``adam_step`` by rounding to fp32; arguments as there.

    With unit roundoff u, and in the order master, first and second moment of ``torch.optim.adam``:

    - ``lerp`` is m + w (g - m) or g - (g - m) (1 - w): three roundings, each of at most |m| + |g|, and that of w.
    - v is a product and ``addcmul``, a sum of two terms of one sign: four roundings of it, and those of its factors.
    - The root of v, its quotient by the root of the correction, and eps: half of v's share and five roundings more. The
      quotient of the moments and the step size come to three, the last sum and the decay to three of the master.

    - Where v is below a million times the smallest normal number its share is not known. The quotient is at most that
      by eps, so that result and exact value are no farther apart than twice that; without eps there is no bound.

    Each count is doubled, and coupled decay adds one rounding to the gradient.
    """
    (beta1, beta2), rate, decay = settings.betas, settings.learning_rate, settings.weight_decay
    unit, tiny = torch.finfo(torch.float32).eps / 2, torch.finfo(torch.float32).tiny
    after, _ = adam_step(before, gradient, step, settings)
    master, first = before.master.double().abs(), before.exp_avg.double().abs()
    reach = gradient.double().abs() + (0.0 if settings.decoupled else decay * master)
    exp_avg = 10 * unit * (first + reach) + tiny
    exp_avg_sq = 16 * unit * (beta2 * before.exp_avg_sq.double().abs() + (1 - beta2) * reach * reach) + tiny
    root = (after.exp_avg_sq / (1 - beta2**step)).sqrt()
    denominator = root + settings.eps
    size = rate / (1 - beta1**step)
    change = size * after.exp_avg.abs() / denominator
    # A second moment near the smallest normal number is known badly: there only eps keeps the quotient small.
    largest = 3 * size * after.exp_avg.abs() / settings.eps if settings.eps else torch.full_like(change, torch.inf)
    spread = torch.where(after.exp_avg_sq > 1e6 * tiny, 24 * unit * change, largest)
    divisor = torch.where(after.exp_avg_sq > 1e6 * tiny, denominator, settings.eps or 0.0)
    moved = torch.where(change > 0, spread, 0.0) + 2 * size * exp_avg / divisor
    return AdamSlice(6 * unit * (master + change) + moved + tiny, exp_avg, exp_avg_sq)


def roundings(expected: AdamSlice, magnitude: AdamSlice, actual: AdamSlice) -> Tensor:
    """The largest difference between actual and expected values, in units of rounding of their terms.

    Args:
        expected: from ``adam_step``.
        magnitude: likewise.
        actual: the optimizer's result, in the type that it keeps.

    Returns:
        [3], fp64: of master, exp_avg, exp_avg_sq; a few units where the optimizer was right.

    Sync: none.
    """
    worst = []
    for wanted, size, got in zip(expected.tensors, magnitude.tensors, actual.tensors, strict=True):
        kind = torch.finfo(got.dtype)
        worst.append(((got.double() - wanted).abs() / (kind.eps * size + kind.tiny)).max())
    return torch.stack(worst)
