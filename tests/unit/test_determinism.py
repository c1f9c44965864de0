"""Are PyTorch's switches set and put back, and the global generators seeded repeatably for each rank and step?"""

import random

import numpy as np
import pytest
import torch

from megasdc.config.sections import DeterminismSection
from megasdc.determinism import seed_generators, set_deterministic


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


def _switches() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        matmul.allow_tf32,
        matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.get_float32_matmul_precision(),
    )


def _put_twice() -> torch.Tensor:
    """An operation that PyTorch knows to be without a deterministic form, on every device."""
    return torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_switches_are_set_and_put_back() -> None:
    """On, all switches are as stated and an operation that cannot repeat raises; undone, all are as before."""
    before = _switches()
    torch.set_float32_matmul_precision("high")
    try:
        undo = set_deterministic(DeterminismSection(enabled=True))
        try:
            assert _switches() == (True, False, False, False, True, False, False, False, False, False, "highest")
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                _put_twice()
        finally:
            undo()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(str(before[-1]))
    assert _switches() == before
    _put_twice()


def test_off_sets_no_switch() -> None:
    """Without the mode nothing is set, and undoing changes nothing."""
    before = _switches()
    undo = set_deterministic(DeterminismSection())
    assert _switches() == before
    undo()
    assert _switches() == before


def test_new_memory_is_filled_if_asked_for() -> None:
    """With the second switch a read of memory that nobody wrote gives NaN."""
    undo = set_deterministic(DeterminismSection(enabled=True, fill_uninitialized_memory=True))
    try:
        assert torch.empty(1000).isnan().all()
    finally:
        undo()
