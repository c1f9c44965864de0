"""Health of a run on this rank: its progress record, the answers to its host's agent, and the agent's start."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megasdc.common.errors import ERRORS_BY_EXIT_CODE, HangError, StorageError
from megasdc.common.host import is_own_folder, make_own_folder, started_at
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.config.sections import HealthSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.ops.health.agent import AgentOptions
from megasdc.ops.health.agent_process import AgentProcess
from megasdc.ops.health.front.address import FrontAddress, claim_front, register_front
from megasdc.ops.health.front.clocks import TOLD_S
from megasdc.ops.health.instructions import PHASES
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_watch import RankWatch
from megasdc.ops.health.record import HeartbeatWriter, WatchedIdentity
from megasdc.ops.health.record_folder import record_folder, remove_old_records
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

NEWS = {
    "unwatched": "nothing watches this host",
    "agent_restarted": "this host is watched again",
    "agent_stopped": "this host was not watched for a while",
}
"""Events that the process beside the ranks has to tell, and what they mean."""
LeaveRank = Callable[[int, BaseException | None], None]


class Health(Hook):
    """Records what this rank does, and answers the agent of its host; the first of the hooks.

    Args:
        leave: ends this process with an exit code and the error behind it; None: the agent kills it instead.

    Raises:
        StorageError: shared memory of a host cannot be written; on all ranks.

    Collective: all ranks of the run.
    """

    def __init__(self, section: HealthSection, run: Run, leave: LeaveRank | None) -> None:
        identity, options, front = _agree_on_hosts(section, run)
        self._record = _open_record(run, identity, options.folder)
        self._step = run.step + 1
        groups = {phase: run.engine.mpu.get_data_parallel_group() for phase in (Phase.REDUCTION, Phase.OPTIMIZER)}
        groups |= dict.fromkeys((Phase.AGREEMENT, Phase.SAVE, Phase.BETWEEN), run.host_group)
        self._recorders = {phase.name: self._recorder_of(phase, groups.get(phase)) for phase in Phase}
        self._enter("START")
        run.engine.watch_instructions(lambda kind: self._recorders[PHASES[kind].name] if kind in PHASES else None)
        run.enter = self._enter
        self._agent = AgentProcess(options, front, identity.run) if identity.local_rank == 0 else None
        if self._agent is not None:
            self._agent.start()
            self._report_news(run)
            self._watch = RankWatch(self._record, partial(_leave, leave), self._agent.check)
        else:
            self._watch = RankWatch(self._record, partial(_leave, leave))

    def _report_news(self, run: Run) -> None:
        """Report what has happened to the agent of this host."""
        while self._agent is not None and self._agent.news:
            name, problem = self._agent.news.popleft()
            logger.warning("health: %s: %s", NEWS[name], problem)
            run.events.emit("health", name, step=run.step, problem=problem)
        while self._agent is not None and self._agent.clocks:
            clock = self._agent.clocks.popleft()
            name = "differs" if abs(clock["ahead_s"]) > TOLD_S + clock["uncertainty_s"] else "measured"
            run.events.emit("clock", name, step=run.step, **clock)

    def _recorder_of(self, phase: Phase, group: Any) -> Callable[..., None]:
        """What records a change to a phase, given its micro-batch, with the number of the last collective of a group.

        Phases within an evaluation are not told apart: they may take longer.
        """
        if group is None:
            enter = self._record.recorder(phase)

            def record(micro_batch: int = -1) -> None:
                if not self._evaluates:
                    enter(self._step, micro_batch)

            return record

        enter_with_group = self._record.recorder(phase, group.group_name.encode("ascii", "replace"))

        def record_with_group(micro_batch: int = -1) -> None:
            if not self._evaluates:
                enter_with_group(self._step, micro_batch, group._get_sequence_number_for_group())

        return record_with_group

    def _enter(self, phase: str) -> None:
        self._evaluates = False
        self._recorders[phase]()
        self._evaluates = phase == Phase.EVALUATION.name

    def before_step(self, run: Run) -> None:
        """Loading of the first micro-batch follows."""
        self._step = run.step + 1
        self._enter("DATA")

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """What all ranks agree on follows."""
        self._enter("AGREEMENT")

    def after_step(self, run: Run, result: StepResult) -> None:
        """Hooks between steps follow."""
        self._step = run.step + 1
        self._enter("BETWEEN")
        self._report_news(run)

    def on_end(self, run: Run) -> None:
        """The run has ended without an error; other hooks may still save."""
        self._enter("BETWEEN")

    def close(self) -> None:
        """Say that this rank watches no more: its last hooks have run, or it has failed."""
        self._enter("DONE")
        self._watch.close()
        if self._agent is not None:
            self._agent.close()
        self._record.close()


def _leave(leave: LeaveRank | None, code: int, message: str) -> None:
    error = ERRORS_BY_EXIT_CODE.get(code, HangError)(message)
    logger.error("%s", error)
    if leave is not None:
        leave(code, error)
    os._exit(code)


def _agree_on_hosts(section: HealthSection, run: Run) -> tuple[WatchedIdentity, AgentOptions, FrontAddress | None]:
    """Agree on a name for this start, on who is on which host, and on the front, which rank 0 has been told.

    Collective: all ranks of the run.
    """
    dims, host = run.dims, socket.gethostname()
    front = claim_front(run.folder / "health", os.environ.get(LAUNCH_ID_VARIABLE)) if dims.rank == 0 else None
    origin = run.events.origin
    # Copies of a folder share a run's id; and other users, who could make the folder of records first, cannot guess it.
    own = (host, f"{origin.run}.{origin.attempt}.{secrets.token_hex(16)}", front)
    everyone = gather_objects(own, run.host_group)
    _, name, front = everyone[0]
    if front is not None:
        register_front(front)
    nodes = tuple(dict.fromkeys(one[0] for one in everyone))
    here = tuple(rank for rank, one in enumerate(everyone) if one[0] == host)
    folder = record_folder(name, nodes.index(host))
    identity = WatchedIdentity(
        run=name,
        rank=dims.rank,
        local_rank=here.index(dims.rank),
        world_size=dims.world_size,
        pp_rank=dims.pp_rank,
        tp_rank=dims.tp_rank,
        dp_rank=dims.dp_rank,
        host=host,
        node=nodes.index(host),
        pid=os.getpid(),
        started_at=started_at(os.getpid()),
    )
    launch = os.environ.get(LAUNCH_ID_VARIABLE)
    settings = (section.hang_floor_s, section.slow_floor_s, section.hang_factor, tuple(section.alert_command))
    options = AgentOptions(folder, run.folder.resolve(), identity.node, here, nodes, *settings, launch)
    return identity, options, front


def _open_record(run: Run, identity: WatchedIdentity, folder: Path) -> HeartbeatWriter:
    """The record of this rank, once all ranks have theirs.

    Raises:
        StorageError: shared memory of a host cannot be written; on all ranks.

    Collective: all ranks of the run.
    """
    record, problem = None, ""
    try:
        if identity.local_rank == 0:
            remove_old_records()
        make_own_folder(folder)
        record = HeartbeatWriter(folder, identity)
    except (OSError, StorageError) as error:
        problem = f"rank {identity.rank} on {identity.host} cannot write progress records: {error}"
    problems = [one for one in gather_objects(problem, run.host_group) if one]
    if record is None or problems:
        if record is not None:
            record.close()
        if is_own_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise StorageError(problems[0])
    return record
