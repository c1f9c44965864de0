"""Parameters that depend on their name and a seed alone, in the place of a model's own while something is computed.

Each element is a function of integers, and rounded at most three times: its bits are the same on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor, nn

NOISE = 0.02
"""Standard deviation of biases, and of other vectors around 1."""
ZERO_MEAN = ("bias", "beta")
"""How names of vectors end that are around 0."""
_CHUNK = 1 << 22
_LOW = 0xFFFFFFFF


def seed_problems(model: nn.Module) -> list[str]:
    """Parameters that cannot be seeded, a sentence each."""
    return [
        f"parameter {name} is of type {one.dtype}; needed: real floating point"
        for name, one in model.named_parameters()
        if not one.is_floating_point()
    ]


@contextmanager
def seeded_parameters(model: nn.Module, seed: int) -> Iterator[None]:
    """Fill all parameters in a ``with`` block; then each has its own bits again.

    Matrices have the variance 1 / inputs, so that results are neither tiny nor large whatever the sizes are.
    """
    kept = [(one, one.detach().clone()) for _, one in model.named_parameters()]
    try:
        for name, one in model.named_parameters():
            _fill(one.detach(), name, seed)
        torch.clear_autocast_cache()  # type: ignore[no-untyped-call]
        yield
    finally:
        for one, value in kept:
            one.detach().copy_(value)
        torch.clear_autocast_cache()  # type: ignore[no-untyped-call]


def _fill(target: Tensor, name: str, seed: int) -> None:
    salt = xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) & _LOW
    whole = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    flat, matrix = whole.view(-1), target.dim() > 1
    deviation = (target.numel() / max(1, target.shape[0])) ** -0.5 if matrix and target.numel() else NOISE
    around_zero = matrix or name.endswith(ZERO_MEAN)
    for start in range(0, flat.numel(), _CHUNK):
        some = flat[start : start + _CHUNK]
        values = _spread(salt, start, start + some.numel(), target.device) * (3**0.5 * deviation)
        some.copy_(values if around_zero else values + 1.0)
    if whole is not target:
        target.copy_(whole)


def _spread(salt: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Numbers between -1 and 1, [stop - start] fp32, of mean 0 and variance 1 / 3.

    Source: the hash of 32 bits with the least bias known, https://github.com/skeeto/hash-prospector (lowbias32).
    """
    x = (torch.arange(start, stop, dtype=torch.int64, device=device) + salt) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-23 - 1.0
