"""A sample of `python -m tools.bench guard-disputes`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.bench.guard.disputes import bench_disputes
from tools.bench.guard.options import DisputeOptions


@pytest.fixture
def quiet() -> Iterator[None]:
    """With the threads that there were."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_campaign_of_disputes(quiet: None) -> None:
    """A short run: nobody healthy is named; what is wrong is."""
    before: Any = F.scaled_dot_product_attention
    result = bench_disputes(DisputeOptions(healthy=12, faults=12, seed=3))
    assert result.passed, [*result.report()]
    assert len(result.disputes) == 24 and all(one.address for one in result.disputes)
    assert before is F.scaled_dot_product_attention
