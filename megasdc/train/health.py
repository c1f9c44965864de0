"""Health of a run on this rank: its progress record, the answers to its host's agent, and the agent's start."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule

from megasdc.config import HealthSection
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.errors import ERRORS_BY_EXIT_CODE, HangError, StorageError
from megasdc.health.agent import AgentOptions
from megasdc.health.phases import Phase
from megasdc.health.process_state import started_at
from megasdc.health.rank_watch import RankWatch
from megasdc.health.record import Identity, RecordWriter
from megasdc.run_lock import LAUNCH_ID_VARIABLE

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
AGENT_START_S = 60.0
PHASES: Mapping[type, Phase] = {
    schedule.LoadMicroBatch: Phase.DATA,
    schedule.ForwardPass: Phase.FORWARD,
    schedule.BackwardPass: Phase.BACKWARD,
    schedule.SendActivation: Phase.SEND_ACTIVATION,
    schedule.RecvActivation: Phase.RECEIVE_ACTIVATION,
    schedule.SendGrad: Phase.SEND_GRADIENT,
    schedule.RecvGrad: Phase.RECEIVE_GRADIENT,
    schedule.ReduceTiedGrads: Phase.REDUCTION,
    schedule.ReduceGrads: Phase.REDUCTION,
    schedule.OptimizerStep: Phase.OPTIMIZER,
}
"""Phase of each instruction of the pipeline engine."""
LeaveRank = Callable[[int, BaseException | None], None]


class Health(Hook):
    """Records what this rank does, and answers the agent of its host; the first of the hooks.

    Args:
        leave: ends this process with an exit code and the error behind it; None: the agent kills it instead.

    Collective: all ranks of the run.
    """

    def __init__(self, section: HealthSection, run: Run, leave: LeaveRank | None) -> None:
        identity, options = _meet_host(section, run)
        self._record = RecordWriter(options.folder, identity)
        self._record.enter(Phase.START, run.step + 1)
        self._engine = run.engine
        self._evaluates = False
        run.engine.watch_instructions(partial(self._mark, run.engine))
        run.enter = self._enter
        dist.barrier(group=run.host_group)  # the agent reads all records of its host
        if identity.local_rank == 0 and (problem := start_agent(options)):
            logger.warning("health: nothing watches this host: %s", problem)
            run.events.emit("health", "unwatched", step=run.step, problem=problem)
        self._watch = RankWatch(self._record, partial(_leave, leave))

    def _enter(self, phase: str) -> None:
        self._evaluates = phase == Phase.EVALUATION.name
        self._record.enter(Phase[phase], self._engine.step_number)

    def _mark(self, engine: TrainingEngine, instruction: type, micro_batch: int) -> None:
        """An instruction of the schedule begins; those of an evaluation are not told apart: they may take longer."""
        phase = PHASES.get(instruction)
        if phase is not None and not self._evaluates:
            self._record.enter(phase, engine.step_number, micro_batch)

    def before_step(self, run: Run) -> None:
        """Loading of the first micro-batch follows."""
        self._enter("DATA")

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """What all ranks agree on follows."""
        self._enter("AGREEMENT")

    def after_step(self, run: Run, result: StepResult) -> None:
        """Hooks between steps follow."""
        self._enter("BETWEEN")

    def on_end(self, run: Run) -> None:
        """The run has ended without an error; other hooks may still save."""
        self._enter("BETWEEN")

    def close(self) -> None:
        """Say that this rank watches no more: its last hooks have run, or it has failed."""
        self._enter("DONE")
        self._watch.close()
        self._record.close()


def _leave(leave: LeaveRank | None, code: int, message: str) -> None:
    error = ERRORS_BY_EXIT_CODE.get(code, HangError)(message)
    logger.error("%s", error)
    if leave is not None:
        leave(code, error)
    os._exit(code)


def _meet_host(section: HealthSection, run: Run) -> tuple[Identity, AgentOptions]:
    """Agree on a name for this start, and on who is on which host.

    Collective: all ranks of the run.
    """
    dims, host = run.dims, socket.gethostname()
    own = (host, secrets.token_hex(6))
    everyone: list[Any] = [None] * dims.world_size
    dist.all_gather_object(everyone, own, group=run.host_group)
    name = everyone[0][1]
    nodes = tuple(dict.fromkeys(one for one, _ in everyone))
    here = tuple(rank for rank, (one, _) in enumerate(everyone) if one == host)
    folder = _shared_folder() / f"megasdc-{os.getuid()}-{name}-{nodes.index(host)}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made for progress records: {error}") from error
    identity = Identity(
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
    limits = (section.hang_floor_s, section.slow_floor_s, section.hang_factor, tuple(section.alert_command))
    return identity, AgentOptions(folder, run.folder.resolve(), identity.node, here, nodes, *limits)


def _shared_folder() -> Path:
    """Shared memory where the system has it; else the folder of temporary files."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def start_agent(options: AgentOptions) -> str:
    """Start this host's agent; returns why it could not be started, empty: it was.

    It is not one of the launch's processes: the front does not wait for it, and does not end it.
    """
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
    command = [sys.executable, "-m", "megasdc.health.agent", options.encode()]
    path = options.run_folder / "health" / f"agent_{options.node:05d}.log"
    try:
        path.parent.mkdir(exist_ok=True)
        with open(path, "ab") as log:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                timeout=AGENT_START_S,
                check=True,
            )
    except subprocess.SubprocessError:
        return f"its agent could not be started; see {path}"
    except OSError as error:
        return f"its agent could not be started: {error}"
    return ""
