"""Does every rank choose the same threshold from the times of the ranks that decide, and of no others?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from harness import run_distributed

from megasdc.dropcompute.tuning import TimeWindow, tune
from megasdc.engine.step_times import StepRecord
from megasdc.parallel import groups

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES = 4, 3


def _times_of(rank: int) -> np.ndarray:
    """Ends of micro-batches, [step, micro-batch]."""
    return (0.1 + np.random.default_rng(rank).exponential(0.5, (STEPS, MICRO_BATCHES))).cumsum(axis=1)


def _gather(tensor: int, pipeline: int) -> Any:
    dims = groups.init_model_parallel(tensor, pipeline, 60)
    window = TimeWindow(STEPS, MICRO_BATCHES, dims)
    for ends in _times_of(dims.rank):
        window.add(StepRecord([0.0, *ends[:-1]], list(ends), [0.0] * MICRO_BATCHES, ends[-1], ends[-1] + 0.2))
    found = window.gather(dist.group.WORLD)
    return dims.dp_rank, found.end_s, tune(found, None, 1.0, 1)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_all_ranks_choose_alike(tensor: int, pipeline: int) -> None:
    """Times are those of tensor rank 0 of the first stage of each replica; the choice is the same in every bit."""
    results = run_distributed(_gather, 4, tensor, pipeline)
    deciding = [0, tensor]
    for _, ends, tuning in results:
        assert np.array_equal(ends, np.stack([_times_of(rank) for rank in deciding]))
        assert (tuning.tau_s, tuning.speedup) == (results[0][2].tau_s, results[0][2].speedup)
        assert np.array_equal(tuning.curve.speedup, results[0][2].curve.speedup)
