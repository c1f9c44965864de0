"""Do the compensations give back what was dropped, as in the paper, and a larger batch all of it?"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from megasdc.config.drop_compute import largest_batch
from megasdc.distributions import BoundedLogNormal
from megasdc.dropcompute.threshold import micro_batch_times
from megasdc.dropcompute.tuning import (
    WorkBalance,
    choose_larger_batch,
    expected_steps,
    extra_steps,
    prolong_steps,
)
from megasdc.lab.planning.environment import DelayEnvironment


def test_the_paper_s_numbers() -> None:
    """Giladi et al., section 4: with a tenth dropped, 11 % more steps."""
    assert expected_steps(100_000, 0.1) == 111_112


@pytest.mark.parametrize(("steps", "per_step", "dropped"), [(9, 10, 1), (100, 64, 13), (50, 8, 6), (7, 3, 0)])
def test_extra_steps_end_when_as_much_is_completed_as_was_planned(steps: int, per_step: int, dropped: int) -> None:
    """A run that loses so many in each step, also in those it runs more, stops at the first step that is enough."""
    for step in itertools.count(1):
        if step >= steps + extra_steps(step * dropped, per_step):
            break
    completed = step * (per_step - dropped)
    assert completed >= steps * per_step > completed - (per_step - dropped)
    assert step == expected_steps(steps, dropped / per_step)


@pytest.mark.parametrize(
    ("micro_batches", "rate", "largest"), [(9, 0.1, 10), (8, 0.1, 8), (8, 1 / 9, 9), (12, 0.0, 12), (5, 1.0, 10)]
)
def test_the_largest_batch_keeps_the_drop_rate(micro_batches: int, rate: float, largest: int) -> None:
    """Of M' planned micro-batches at most the rate is dropped where M are completed; M' is at most 2 M."""
    assert largest_batch(micro_batches, rate) == largest
    assert 1 - micro_batches / largest <= rate + 1e-9


def _steps(seed: int, first: int, count: int, sizes: tuple[int, int, int]) -> tuple[NDArray[np.float64], ...]:
    """Starts and ends in the paper's environment, [replica, step, micro-batch]; sizes: replicas, those, stages."""
    environment = DelayEnvironment(0.45, (BoundedLogNormal(0.225),), seed)
    replicas, micro_batches, stages = sizes
    drawn = [
        micro_batch_times(environment.draw(step, 0, replicas, micro_batches, stages), 1 / 3, True)
        for step in range(first, first + count)
    ]
    return tuple(np.stack(one, axis=1) for one in zip(*drawn, strict=True))


def test_longer_steps_have_the_latencies_of_the_same_replica() -> None:
    """Two micro-batches more last as long as the first two of the replica's next step; nothing recorded changes."""
    starts, ends = _steps(1, 1, 3, (2, 4, 1))
    longer, later = prolong_steps(starts, ends, 6, 1)
    assert np.array_equal(longer[:, :, :4], starts) and np.array_equal(later[:, :, :4], ends)
    latencies = ends - starts
    assert np.allclose(longer[:, :, 4], ends[:, :, 3]) and np.allclose(longer[:, :, 5], later[:, :, 4])
    assert np.allclose(later[:, 0, 4:] - longer[:, 0, 4:], latencies[:, 1, :2])
    assert np.allclose(later[:, 2, 4:] - longer[:, 2, 4:], latencies[:, 0, :2]), "the first step follows the last"


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "rate", "stages", "steps"),
    [(8, 8, 0.2, 1, 200), (64, 12, 0.1, 1, 60), (512, 12, 0.2, 1, 20), (8, 12, 0.2, 2, 200), (64, 16, 0.5, 4, 40)],
)
def test_a_larger_batch_completes_what_was_planned(
    replicas: int, micro_batches: int, rate: float, stages: int, steps: int
) -> None:
    """On steps other than those it was chosen from: the work within 1 %, in less time, within the drop rate."""
    window = _steps(1, 1, 45, (replicas, micro_batches, stages))
    chosen = choose_larger_batch(*window, stages, rate, 1, np.zeros(replicas))
    assert micro_batches < chosen.micro_batches <= micro_batches / (1 - rate)
    assert chosen.completed == pytest.approx(micro_batches, rel=1e-3)
    starts, ends = _steps(1, 1000, steps, (replicas, chosen.micro_batches, stages))
    balance = WorkBalance(micro_batches, replicas, chosen.aims)
    done = np.empty((replicas, steps), dtype=np.int64)
    for step in range(steps):
        done[:, step] = 1 + (starts[:, step, 1:] < balance.tau_s).sum(axis=1)
        balance.count(done[:, step].tolist())
    assert done.mean() == pytest.approx(micro_batches, rel=0.01)
    assert balance.owed == micro_batches * done.size - done.sum()
    last = np.take_along_axis(ends, done[:, :, None] - 1, axis=2)[:, :, 0].max(axis=0).mean()
    plain = _steps(1, 1000, steps, (replicas, micro_batches, stages))[1][:, :, -1].max(axis=0).mean()
    assert last < plain and last == pytest.approx(chosen.compute_s, rel=0.1)


def test_what_a_drift_owes_is_repaid() -> None:
    """Micro-batches that take a tenth longer than the measured ones: thresholds rise until the work is complete."""
    chosen = choose_larger_batch(*_steps(2, 1, 45, (16, 12, 1)), 1, 0.3, 1, np.zeros(16))
    starts = 1.1 * _steps(2, 1000, 200, (16, chosen.micro_batches, 1))[0]
    balance = WorkBalance(12, 16, chosen.aims)
    fixed, repaid = [], []
    for step in range(200):
        fixed.append(1 + (starts[:, step, 1:] < chosen.tau_s).sum(axis=1))
        repaid.append(1 + (starts[:, step, 1:] < balance.tau_s).sum(axis=1))
        balance.count(repaid[-1].tolist())
    assert np.mean(fixed) < 0.95 * 12 and np.mean(repaid) == pytest.approx(12, rel=0.01)


def test_a_given_threshold_is_the_latest() -> None:
    """The smallest batch that completes enough before it; none where it leaves too little time."""
    window = _steps(3, 1, 45, (8, 12, 1))
    free = choose_larger_batch(*window, 1, 0.5, 1, np.zeros(8))
    given = choose_larger_batch(*window, 1, 0.5, 1, np.zeros(8), tau_s=free.tau_s)
    assert given.micro_batches <= free.micro_batches and given.tau_s <= free.tau_s
    none = choose_larger_batch(*window, 1, 0.5, 1, np.zeros(8), tau_s=free.tau_s / 2)
    assert (none.micro_batches, none.tau_s, none.aims) == (12, math.inf, ())


def test_replicas_that_are_alike_need_no_larger_batch() -> None:
    """Without spread a threshold would gain nothing."""
    ends = np.cumsum(np.full((4, 10, 6), 0.5), axis=2)
    chosen = choose_larger_batch(ends - 0.5, ends, 1, 0.5, 1, np.zeros(4))
    assert (chosen.micro_batches, chosen.tau_s, chosen.completed) == (6, math.inf, 6.0)


def test_nothing_lost_nothing_more() -> None:
    """Without drops steps are as planned."""
    assert (extra_steps(0, 8), expected_steps(17, 0.0)) == (0, 17)
    assert math.isfinite(expected_steps(1000, 0.999))
