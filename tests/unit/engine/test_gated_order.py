"""Is the gated schedule DeepSpeed's 1F1B order, cut where a replica stops, and can its stages always go on?"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from deepspeed.runtime.pipe import schedule

from megasdc.engine.schedules import GatedSchedule

STAGES = range(1, 7)
MICRO_BATCHES = range(1, 13)
ASK, ANNOUNCE = "ask", "announce"


class CountedSlots(GatedSchedule):
    """Knows how many slots it has come through."""

    slots = 0

    def _step_to_micro_batch(self, step_id: int) -> Any:
        self.slots += 1
        return super()._step_to_micro_batch(step_id)


class Cut(schedule.TrainSchedule):
    """DeepSpeed's step of ``stop`` micro-batches with the buffers of a longer one."""

    def __init__(self, planned: int, stop: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches=stop, stages=stages, stage_id=stage_id)
        self._buffers = schedule.TrainSchedule(planned, stages, stage_id).num_pipe_buffers()

    def num_pipe_buffers(self) -> int:
        return self._buffers


def walk(planned: int, stop: int, stages: int, stage_id: int) -> tuple[list[Any], CountedSlots]:
    """What a stage does when its replica starts ``stop`` micro-batches: instructions, questions and announcements."""
    done: list[Any] = []

    def may_start(micro_batch: int) -> bool:
        done.append((ASK, micro_batch, micro_batch < stop))
        return micro_batch < stop

    def announce(micro_batch: int, starts: bool) -> None:
        done.append((ANNOUNCE, micro_batch, starts))

    walked = CountedSlots(planned, stages, stage_id, may_start, announce)
    for instructions in walked:
        done += instructions
    return done, walked


def instructions_of(done: list[Any]) -> list[str]:
    return [repr(one) for one in done if not isinstance(one, tuple)]


def cases() -> list[tuple[int, int, int]]:
    """(planned, stop, stages): all of them; a replica always starts at least one micro-batch."""
    return [(planned, stop, stages) for stages in STAGES for planned in MICRO_BATCHES for stop in range(1, planned + 1)]


def test_with_nothing_refused_it_is_deepspeed_s_schedule() -> None:
    """Every stage has the instructions of ``TrainSchedule``, in its order, with its buffers."""
    for stages in STAGES:
        for planned in MICRO_BATCHES:
            for stage_id in range(stages):
                plain = schedule.TrainSchedule(planned, stages, stage_id)
                done, walked = walk(planned, planned, stages, stage_id)
                assert instructions_of(done) == [repr(one) for slot in plain for one in slot]
                assert walked.num_pipe_buffers() == plain.num_pipe_buffers()


def test_after_a_stop_it_is_a_shorter_step_and_one_announcement() -> None:
    """Stopped at m: what m micro-batches need in 2 (m + stages - 1) slots, each decision asked for and told once."""
    for planned, stop, stages in cases():
        for stage_id in range(stages):
            place = (planned, stop, stages, stage_id)
            done, walked = walk(*place)
            assert instructions_of(done) == [repr(one) for slot in Cut(*place) for one in slot], place
            empty = stages == 1 and stop < planned  # a single stage is refused in the slot after its last one
            assert walked.slots == 2 * (stop + stages - 1) + empty, place
            decisions = [(number, number < stop) for number in range(min(stop + 1, planned))]
            asked = [one[1:] for one in done if isinstance(one, tuple) and one[0] == ASK]
            told = [one[1:] for one in done if isinstance(one, tuple) and one[0] == ANNOUNCE]
            assert asked == decisions, place
            assert told == (decisions if stage_id < stages - 1 else []), place


class Stage:
    """One stage that works off its list; messages are the numbers of micro-batches.

    Activations and gradients are handed over only when both sides are there, as gloo may do; decisions are left for
    the next stage to read.
    """

    def __init__(self, todo: list[Any]) -> None:
        self.todo = deque(todo)
        self.inbox: deque[tuple[int, bool]] = deque()
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.passed: list[int] = []
        self.returned: list[int] = []

    def meets(self, kind: type, other: Stage | None, wanted: type) -> bool:
        """Whether this stage is at an instruction and its neighbour at the opposite one."""
        return (
            other is not None
            and bool(other.todo)
            and isinstance(self.todo[0], kind)
            and isinstance(other.todo[0], wanted)
        )


def go_on(stages: list[Stage], index: int) -> bool:
    """Let one stage do its next thing, if it can."""
    stage = stages[index]
    before = stages[index - 1] if index else None
    after = stages[index + 1] if index + 1 < len(stages) else None
    match stage.todo[0]:
        case (kind, micro_batch, starts) if kind == ANNOUNCE:
            assert after is not None
            after.inbox.append((micro_batch, starts))
        case (_, micro_batch, starts):
            if before is not None:
                if not stage.inbox:
                    return False
                assert stage.inbox.popleft() == (micro_batch, starts)
        case schedule.SendActivation(buffer_id=buffer):
            if not stage.meets(schedule.SendActivation, after, schedule.RecvActivation):
                return False
            after.inputs[after.todo.popleft().buffer_id] = stage.outputs[buffer]
        case schedule.SendGrad(buffer_id=buffer):
            if not stage.meets(schedule.SendGrad, before, schedule.RecvGrad):
                return False
            before.gradients[before.todo.popleft().buffer_id] = stage.gradients.pop(buffer)
        case schedule.RecvActivation() | schedule.RecvGrad():
            return False
        case schedule.LoadMicroBatch():
            pass
        case schedule.ForwardPass(buffer_id=buffer):
            number = len(stage.passed)
            assert buffer not in stage.outputs, "a buffer is taken that is still needed"
            assert before is None or stage.inputs.pop(buffer) == number
            stage.outputs[buffer] = number
            stage.passed.append(number)
        case schedule.BackwardPass(buffer_id=buffer):
            number = stage.outputs.pop(buffer)
            assert after is None or stage.gradients[buffer] == number
            stage.gradients[buffer] = number
            stage.returned.append(number)
    stage.todo.popleft()
    return True


@pytest.mark.parametrize("first", ["first stage first", "last stage first"])
def test_the_stages_go_on_to_the_end(first: str) -> None:
    """Every message meets the one who waits for it, in order, also if a send returns only when it is received."""
    for planned, stop, count in cases():
        stages = [Stage(walk(planned, stop, count, stage_id)[0]) for stage_id in range(count)]
        order = range(count) if first.startswith("first") else range(count)[::-1]
        moving = True
        while moving:
            moving = False
            for index in order:
                while stages[index].todo and go_on(stages, index):
                    moving = True
        left = [list(stage.todo)[:1] for stage in stages]
        assert not any(left), (planned, stop, count, left)
        for stage in stages:
            assert stage.passed == stage.returned == list(range(stop)), (planned, stop, count)
            assert not (stage.inbox or stage.inputs or stage.outputs)
