"""Where in a stage's order of work are its replay and its spare time, and do they leave that order as it is?"""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule

from megasdc.engine.schedules import BubbleSchedule, GatedSchedule, ReplayBackward, ReplayForward, SpareTime

REPLAYS = (ReplayForward, ReplayBackward)
OWN = (*REPLAYS, SpareTime)


def _gated(micro_batches: int, stages: int, stage: int, refused: int) -> schedule.TrainSchedule:
    return GatedSchedule(micro_batches, stages, stage, lambda number: number != refused, lambda *_: None)


def _flat(steps: Any) -> list[Any]:
    return [one for step in steps for one in step]


def _order(whole: Any) -> list[Any]:
    return [one for one in _flat(BubbleSchedule(whole, replays=True)) if type(one) is not schedule.LoadMicroBatch]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("refused", [None, 0, 1, 3])
def test_every_stage_replays_once(stages: int, micro_batches: int, refused: int | None) -> None:
    """Forward, then backward, after those of the first micro-batch, in a buffer that no other has; the rest stays."""
    for stage in range(stages):
        sizes = micro_batches, stages, stage
        plain = [_gated(*sizes, refused) if refused is not None else schedule.TrainSchedule(*sizes) for _ in range(2)]
        found, before = _flat(BubbleSchedule(plain[0], replays=True)), _flat(plain[1].steps())
        assert [repr(one) for one in found if type(one) not in OWN] == [repr(one) for one in before]
        mine = [one for one in found if type(one) in REPLAYS]
        assert [type(one) for one in mine] == list(REPLAYS)
        if refused != 0:
            kinds = [type(one) for one in found]
            assert kinds.index(ReplayForward) > kinds.index(schedule.ForwardPass)
            assert kinds.index(ReplayBackward) > kinds.index(schedule.BackwardPass)
        used = {one.buffer_id for one in before if isinstance(one, schedule.BufferOpInstruction)}
        assert {one.buffer_id for one in mine} == {BubbleSchedule(plain[1], replays=True).num_pipe_buffers() - 1}
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
    following = [next(kind for kind in kinds[place:] if kind not in OWN) for place in (forward, backward)]
    assert following == [forward_at, backward_at]
    if stage == 0 and stages > 1:
        assert kinds[:forward].count(schedule.RecvGrad) == 0
        assert kinds[backward:].count(schedule.RecvGrad) == stages - 1
    else:
        assert kinds[backward:].count(schedule.BackwardPass) == 0


@pytest.mark.parametrize("replays", [False, True])
def test_spare_time_is_where_a_stage_waits(replays: bool) -> None:
    """Before the first gradient, after the passes, on the first stage before its last ones; never with one."""
    found = {}
    for stages, stage in ((1, 0), (2, 0), (2, 1), (4, 0), (4, 2), (4, 3)):
        kinds = [type(one) for one in _flat(BubbleSchedule(schedule.TrainSchedule(8, stages, stage), replays=replays))]
        places = [place for place, kind in enumerate(kinds) if kind is SpareTime]
        found[stages, stage] = [kinds[place + 1] for place in places]
    gradient, end = schedule.RecvGrad, schedule.ReduceTiedGrads
    assert found == {
        (1, 0): [],
        (2, 0): [gradient, gradient],
        (2, 1): [end],
        (4, 0): [gradient, gradient],
        (4, 2): [gradient, end],
        (4, 3): [end],
    }
