"""Start and completion times of a replica's micro-batches, with one pipeline stage or several.

With several stages, forwards and backwards follow 1F1B, the schedule of DeepSpeed's `TrainSchedule`: a
stage starts its next pass once it is free and the stage before it (forward) or after it (backward) has ended the same
one. Messages between stages take no time, and sends do not block.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@functools.cache
def order_of_work(micro_batches: int, stages: int) -> tuple[tuple[int, int, bool], ...]:
    """All forwards and backwards of a replica, each after the passes that it depends on.

    (stage, micro-batch, whether it is a backward), 2 M stages of them; those of one stage in 1F1B order.
    """
    todo = [_order_of_stage(micro_batches, stages, stage) for stage in range(stages)]
    done: set[tuple[int, int, bool]] = set()
    order: list[tuple[int, int, bool]] = []
    while len(order) < 2 * micro_batches * stages:
        for stage in range(stages):
            while todo[stage]:
                micro_batch, backward = todo[stage][0]
                needed = stage + 1 if backward else stage - 1
                if 0 <= needed < stages and (needed, micro_batch, backward) not in done:
                    break
                order.append((stage, micro_batch, backward))
                done.add(order[-1])
                todo[stage].pop(0)
    return tuple(order)


def _order_of_stage(micro_batches: int, stages: int, stage: int) -> list[tuple[int, bool]]:
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(number, False) for number in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [(ahead + number, False), (number, True)]
    return order + [(number, True) for number in range(micro_batches - ahead, micro_batches)]


def micro_batch_times(latencies_s: Seconds, forward_share: float, finish: bool) -> tuple[Seconds, Seconds]:
    """Starts and ends of micro-batches, in seconds since the step began.

    Args:
        latencies_s: of forward and backward together, [replica, micro-batch, stage].
        forward_share: of the forward in them, in [0, 1]; without effect for one stage.
        finish: which ends are returned, see Returns.

    Returns:
        Starts on the first stage, [replica, micro-batch], which depend on no later micro-batch. Ends,
        [replica, micro-batch]: with ``finish`` the end of the replica's step if no later one is started; else that
        of the micro-batch if all are started.
    """
    _, micro_batches, stages = latencies_s.shape
    if stages == 1:
        ends = np.cumsum(latencies_s[:, :, 0], axis=1)
        starts = np.zeros_like(ends)
        starts[:, 1:] = ends[:, :-1]
        return starts, ends
    work = np.ascontiguousarray(latencies_s.transpose(2, 1, 0))
    starts, ends = _walk(work, micro_batches, forward_share)
    if finish:
        for started in range(1, micro_batches):
            ends[started - 1] = _walk(work, started, forward_share)[1][-1]
    return starts.T, ends.T


def _walk(work: Seconds, micro_batches: int, forward_share: float) -> tuple[Seconds, Seconds]:
    """Starts of forwards and ends of backwards on the first stage, [micro-batch, replica]."""
    stages, _, replicas = work.shape
    free = np.zeros((stages, replicas))
    ended: dict[tuple[int, int, bool], Seconds] = {}
    starts, ends = np.empty((2, micro_batches, replicas))
    for stage, number, backward in order_of_work(micro_batches, stages):
        before = ended.pop((stage + 1 if backward else stage - 1, number, backward), None)
        start = free[stage] if before is None else np.maximum(free[stage], before)
        if stage == 0 and not backward:
            starts[number] = start
        share = 1 - forward_share if backward else forward_share
        free[stage] = start + share * work[stage, number]
        ended[stage, number, backward] = free[stage].copy()
        if stage == 0 and backward:
            ends[number] = free[0]
    return starts, ends
