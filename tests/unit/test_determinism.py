"""Are the global generators seeded repeatably, and differently for each rank and step?"""

import random

import numpy as np
import torch

from megasdc.determinism import seed_generators


def _draws(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_generators(seed, step, rank)
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_seeds_are_repeatable_and_distinct() -> None:
    """The same (seed, step, rank) gives the same draws of all three generators; any other gives others."""
    first = _draws(1, 3, 0)
    assert _draws(1, 3, 0) == first
    others = [_draws(1, 3, 1), _draws(1, 4, 0), _draws(2, 3, 0), _draws(3, 1, 0)]
    for other in others:
        assert all(a != b for a, b in zip(first, other, strict=True))
    assert len(set(others)) == len(others)
