"""Are seeded parameters those that integers say, on any memory layout, and does a model get its own bits back?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from megasdc.attached import golden
from megasdc.attached.golden import seed_problems, seeded_parameters


def _wanted(name: str, seed: int, shape: tuple[int, ...], *, around: float) -> torch.Tensor:
    """By NumPy, in unsigned integers of 32 bits."""
    size = int(np.prod(shape))
    x = np.arange(size, dtype=np.uint32) + np.uint32(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    spread = (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    deviation = (size / shape[0]) ** -0.5 if len(shape) > 1 else 0.02
    return torch.from_numpy(spread * np.float32(3**0.5 * deviation) + np.float32(around)).view(shape)


def test_parameters_are_seeded_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and in any order of memory; matrices are of variance 1 / inputs, norms around 1, biases around 0."""
    monkeypatch.setattr(golden, "_CHUNK", 100)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.LayerNorm(8), nn.Linear(300, 200))
    model[0].to(memory_format=torch.channels_last)
    model[2].bfloat16()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with pytest.raises(KeyError), seeded_parameters(model, 7):
        for name, one in model.named_parameters():
            wanted = _wanted(name, 7, tuple(one.shape), around=float(name == "1.weight"))
            assert torch.equal(one, wanted.to(one.dtype)), name
        assert abs(float(model[2].weight.detach().float().var()) * 300 - 1) < 0.02
        raise KeyError
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_what_has_no_fractions_cannot_be_seeded() -> None:
    """Quantized weights, with their name and type."""
    model = nn.Module()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    (problem,) = seed_problems(model)
    assert "codes" in problem and "uint8" in problem
