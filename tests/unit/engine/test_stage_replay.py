"""Where in a stage's order of work is its replay, and does it leave that order as it is?"""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule

from megasdc.engine.gated_schedule import GatedSchedule
from megasdc.engine.stage_replay import ReplayBackward, ReplayForward, ReplaySchedule

REPLAYS = (ReplayForward, ReplayBackward)


def _gated(micro_batches: int, stages: int, stage: int, refused: int) -> schedule.TrainSchedule:
    return GatedSchedule(micro_batches, stages, stage, lambda number: number != refused, lambda *_: None)


def _flat(steps: Any) -> list[Any]:
    return [one for step in steps for one in step]


def _order(whole: Any) -> list[Any]:
    return [one for one in _flat(ReplaySchedule(whole)) if type(one) is not schedule.LoadMicroBatch]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("refused", [None, 0, 1, 3])
def test_every_stage_replays_once(stages: int, micro_batches: int, refused: int | None) -> None:
    """Forward, then backward, after those of the first micro-batch, in a buffer that no other has; the rest stays."""
    for stage in range(stages):
        sizes = micro_batches, stages, stage
        plain = [_gated(*sizes, refused) if refused is not None else schedule.TrainSchedule(*sizes) for _ in range(2)]
        found, before = _flat(ReplaySchedule(plain[0])), _flat(plain[1].steps())
        assert [repr(one) for one in found if type(one) not in REPLAYS] == [repr(one) for one in before]
        mine = [one for one in found if type(one) in REPLAYS]
        assert [type(one) for one in mine] == list(REPLAYS)
        if refused != 0:
            kinds = [type(one) for one in found]
            assert kinds.index(ReplayForward) > kinds.index(schedule.ForwardPass)
            assert kinds.index(ReplayBackward) > kinds.index(schedule.BackwardPass)
        used = {one.buffer_id for one in before if isinstance(one, schedule.BufferOpInstruction)}
        assert {one.buffer_id for one in mine} == {ReplaySchedule(plain[1]).num_pipe_buffers() - 1}
        assert not used & {one.buffer_id for one in mine}


@pytest.mark.parametrize(
    ("stages", "stage", "forward_at", "backward_at"),
    [
        (1, 0, schedule.ReduceTiedGrads, schedule.ReduceTiedGrads),
        (2, 0, schedule.RecvGrad, schedule.RecvGrad),
        (2, 1, schedule.SendGrad, schedule.ReduceTiedGrads),
        (4, 0, schedule.RecvGrad, schedule.RecvGrad),
        (4, 1, schedule.RecvGrad, schedule.ReduceTiedGrads),
        (4, 3, schedule.ReduceTiedGrads, schedule.ReduceTiedGrads),
    ],
)
def test_it_comes_where_the_stage_would_wait(stages: int, stage: int, forward_at: type, backward_at: type) -> None:
    """Before the first gradient, before the last gradients of the first stage, or at the end."""
    order = _order(schedule.TrainSchedule(8, stages, stage))
    kinds = [type(one) for one in order]
    forward, backward = kinds.index(ReplayForward), kinds.index(ReplayBackward)
    after = [kind for kind in kinds if kind not in REPLAYS]
    assert (after[forward], after[backward - 1]) == (forward_at, backward_at)
    if stage == 0 and stages > 1:
        assert kinds[:forward].count(schedule.RecvGrad) == 0
        assert kinds[backward:].count(schedule.RecvGrad) == stages - 1
    else:
        assert kinds[backward:].count(schedule.BackwardPass) == 0
