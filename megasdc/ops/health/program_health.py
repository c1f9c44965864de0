"""Health of a training that is not megasdc's own, on this rank; what it does is seen by its collectives.

Ranks gather nothing here, since it is not known when they could: the launch tells each who is where. Without a guard
(``megasdc.attach``), which tells more, a rank is in the phase ``training`` from its first collective on, and moves
whenever it has joined another one, or a transfer; its step is the number that DeepSpeed's engine has.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.common.host import NAME_VARIABLE, make_own_folder, started_at
from megasdc.ops.health.agent import AgentOptions
from megasdc.ops.health.agent_process import AgentProcess
from megasdc.ops.health.front.address import claim_front
from megasdc.ops.health.phases import SLOW, Phase
from megasdc.ops.health.rank_watch import Leave, RankWatch
from megasdc.ops.health.record import HeartbeatWriter, WatchedIdentity, record_path
from megasdc.ops.health.record_folder import record_folder, remove_old_records

logger = logging.getLogger(__name__)

DISTRIBUTED, ENGINE = "torch.distributed.distributed_c10d", "deepspeed.runtime.engine"
_current: list[ProgramHealth] = []


class ProgramHealth:
    """The record of this rank, what keeps it, and on the first rank of each host the agent.

    Args:
        slots: of each host of the launch, in the order of ranks.
        rank: this one.
        run_dir: folder of the run.
        launch_id: of this launch.
        limits: ``hang_floor_s``, ``slow_floor_s`` and ``hang_factor``, see ``megasdc.config.sections``.
        alert_command: see ``megasdc.common.user_code``.
        leave: ends this process with an exit code, and the reason.

    Raises:
        StorageError: shared memory cannot be written.
        OSError: likewise.
    """

    def __init__(
        self,
        slots: Mapping[str, Sequence[int]],
        rank: int,
        run_dir: Path,
        launch_id: str,
        limits: tuple[float, float, float],
        alert_command: Sequence[str],
        leave: Leave,
    ) -> None:
        nodes = tuple(slots)
        host_of_rank = [node for node, own in enumerate(slots.values()) for _ in own]
        node = host_of_rank[rank]
        here = tuple(other for other, on in enumerate(host_of_rank) if on == node)
        run = f"{launch_id}.1.0"  # as names of starts are, with the number of the start and a random part
        identity = WatchedIdentity(
            *(run, rank, here.index(rank), len(host_of_rank), 0, 0, rank, nodes[node], node),
            pid=os.getpid(),
            started_at=started_at(os.getpid()),
        )
        random = os.environ.get(NAME_VARIABLE)
        self._folder, self._here = record_folder(run if random is None else f"{run}.{random}", node), here
        if identity.local_rank == 0:
            remove_old_records()
        make_own_folder(self._folder)
        self._record = HeartbeatWriter(self._folder, identity)
        self._record.enter(Phase.START, 0)
        self._joined, self._step = 0, 0
        self._counts_steps = False
        self._tellers, self._phase = 0, Phase.START
        self._agent, self._starts = None, False
        if identity.local_rank == 0:
            front = claim_front(run_dir / "health", f"{launch_id}.{node}")
            floor_s, slow_s, factor = limits
            own = (min(floor_s, slow_s), slow_s, factor, tuple(alert_command))
            options = AgentOptions(self._folder, run_dir.resolve(), node, here, nodes, *own, launch_id)
            self._agent, self._starts = AgentProcess(options, front, run), True
        self._watch = RankWatch(self._record, leave, self._check)
        _current.append(self)

    @property
    def is_reported(self) -> bool:
        """Whether a caller reports what this rank does."""
        return self._tellers > 0

    def acquire(self, **place: int) -> None:
        """A caller reports what this rank does, from now until ``release``; ``place``: pp_rank, tp_rank, dp_rank."""
        self._tellers += 1
        self._watch.also.update(place)

    def recorder(self, phase: Phase) -> Callable[[int, int], None]:
        """What records a change to a phase, given step and micro-batch."""
        enter = self._record.recorder(phase)

        def record(step: int, micro_batch: int) -> None:
            self._step, self._phase = step, phase
            enter(step, micro_batch)

        return record

    def release(self) -> None:
        """A caller that has acquired it reports no more what this rank does."""
        self._tellers -= 1

    def close(self) -> None:
        """Say that this rank watches no more."""
        self._tellers += 1
        self._record.enter(Phase.DONE, self._step)
        self._watch.close()
        if self._agent is not None:
            self._agent.close()
        self._record.close()
        if self._agent is not None and self._starts:  # the program was over before the agent, which removes them
            shutil.rmtree(self._folder, ignore_errors=True)
        _current.clear()

    def _check(self) -> None:
        if self._agent is not None:
            if self._starts and all(record_path(self._folder, rank).exists() for rank in self._here):
                self._starts = False
                self._agent.start()
            elif not self._starts:
                self._agent.check()
            while self._agent.news:
                logger.warning("health: %s: %s", *self._agent.news.popleft())
        if not self._counts_steps:
            self._counts_steps = count_steps(self._count_step)
        if (joined := joined_collectives()) == self._joined:
            return
        self._joined = joined
        if not self.is_reported:
            self._record.enter(Phase.TRAINING, self._step)
        elif self._phase in SLOW:  # of an engine without a guard, or of the user's own
            self._record.enter(self._phase, self._step)

    def _count_step(self, step: int) -> None:
        self._step = step + 1


def current_health() -> ProgramHealth | None:
    """That of this process; None: it was not started by ``megasdc run``, or its health is not watched."""
    return _current[0] if _current else None


def count_steps(took: Callable[[int], None]) -> bool:
    """Have all engines of DeepSpeed tell the number of each step that they have taken, once it was imported.

    Returns:
        Whether it was, and they do.
    """
    engine = getattr(sys.modules.get(ENGINE), "DeepSpeedEngine", None)
    take_step = getattr(engine, "_take_model_step", None)
    if engine is None or take_step is None:
        return False

    @functools.wraps(take_step)
    def taking(self: Any, *args: Any, **options: Any) -> Any:
        result = take_step(self, *args, **options)
        took(int(self.global_steps))
        return result

    engine._take_model_step = taking
    return True


def joined_collectives() -> int:
    """How many collectives and transfers this rank has joined, in groups that still exist; 0 before the first."""
    world = getattr(sys.modules.get(DISTRIBUTED), "_world", None)  # None also while it is being imported
    if world is None:
        return 0
    found = 0
    for group in list(world.pg_map):
        try:
            found += group._get_sequence_number_for_group()
        except (RuntimeError, AttributeError):  # it has no numbers, or is the mark of groups that this rank is not in
            continue
    return found
