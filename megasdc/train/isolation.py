"""Going on without replicas that were found wrong: the other ranks begin again, in the same processes.

A step and its checks know nothing of it. Where a finding names replicas and the policy is to isolate them, every rank
raises the same ``IsolationError``; snapshots in memory are made whole, and all process groups end. The ranks of other
replicas meet anew, as a smaller launch with groups of its own, so that nothing passes through those that are left out,
and go on from memory with the same samples a step (``megasdc.config.checks``). The ranks that are left out end.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megasdc.common.errors import CorruptionError, LaunchError
from megasdc.common.run_lock import LockedFolders
from megasdc.config.checks import BatchLayout
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.events import EventLog
from megasdc.parallel import groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.local_ranks import free_port
from megasdc.parallel.rendezvous import AGENT_STORE_VARIABLE, MEETING_NAME_VARIABLE, own_address_for_ranks

logger = logging.getLogger(__name__)

EVENT_KIND = "isolation"


class IsolationError(CorruptionError):
    """Silent data corruption of replicas without which the others can go on.

    Args:
        step: step in which it was found.
        ranks: ranks that are wrong.
    """

    def __init__(self, message: str, step: int, ranks: Collection[int]) -> None:
        super().__init__(message)
        self.step, self.ranks = step, frozenset(ranks)


@dataclass(frozen=True)
class SurvivingRanks:
    """The ranks of a launch that go on.

    Args:
        ranks: numbers that these ranks had when the launch began, by rank.
        launch_size: number of ranks with which it began.
        wrong: numbers, when it began, of the ranks that were found wrong.
        since: step in which the first replica was found wrong.
        found: step in which the last replica was found wrong.
    """

    ranks: tuple[int, ...]
    launch_size: int
    wrong: tuple[int, ...]
    since: int
    found: int

    @property
    def left_out(self) -> list[int]:
        """Ranks that no longer train, as numbered when the launch began."""
        return sorted(set(range(self.launch_size)) - set(self.ranks))

    def replicas(self, whole: BatchLayout) -> int:
        """Replicas that go on; ``whole``: layout with which the launch began."""
        return len(self.ranks) // (whole.tensor * whole.pipeline)

    def place_of(self, dims: ParallelDims) -> ParallelDims:
        """Place, when the launch began, of a rank that goes on."""
        return ParallelDims.from_world(dims.tensor, dims.pipeline, self.launch_size, self.ranks[dims.rank])

    def report(self, events: EventLog, replicas: int) -> None:
        """Report that the run goes on without some ranks; ``replicas``: number of replicas that are left."""
        logger.warning("the run goes on with %d replicas, without ranks %s of the launch", replicas, self.left_out)
        said: dict[str, Any] = {"since": self.since, "left_out": self.left_out, "wrong": self.wrong}
        said["launch_ranks"] = self.ranks
        events.emit(EVENT_KIND, "begun", step=self.found, replicas=replicas, **said)


class IsolationLimit(Hook):
    """Ends a run that has gone on without some replicas for a number of steps.

    Args:
        remaining: ranks that are left of the launch.
        max_steps: largest number of steps without a replica.
    """

    def __init__(self, remaining: SurvivingRanks, max_steps: int) -> None:
        self._last = remaining.since + max_steps - 1
        self._remaining = remaining

    def after_step(self, run: Run, result: StepResult) -> None:
        """Stop after the last step that may be taken without replicas."""
        if run.step >= self._last and not run.is_last_step:
            run.end.reason = f"sdc.isolation.max_steps without ranks {self._remaining.left_out} of the launch"
            run.events.emit("stop", "requested", step=run.step, reason=run.end.reason)
            run.end.error = CorruptionError(
                f"step {run.step} is saved; since step {self._remaining.since} ranks {self._remaining.left_out} of the "
                f"launch are left out, which were wrong: see the incident in {run.folder / 'reports'}, replace their "
                "hosts, and start again"
            )


def leave_replicas_out(
    run: Run, step: int, wrong: Collection[int], before: SurvivingRanks | None, held: LockedFolders
) -> SurvivingRanks:
    """End the process groups of a run whose hooks are closed, and let the ranks of other replicas meet anew.

    Args:
        step: step in which ranks were found wrong.
        wrong: the wrong ranks, whose replicas are left out.
        before: ranks that had remained until now; None: all.
        held: folders of the launch, which are released: another rank may hold them from now on.

    Returns:
        Which ranks go on; this one may not be among them. The launcher's variables of those that do are changed.

    Raises:
        LaunchError: there is no address at which the others could meet; on all ranks.

    Collective: all ranks of the run.
    """
    dims, launch = run.dims, run.launch_dims
    ranks: Sequence[int] = range(dims.world_size) if before is None else before.ranks
    replicas = {dims.at(rank).dp_rank for rank in wrong}
    stay = [rank for rank in range(dims.world_size) if dims.at(rank).dp_rank not in replicas]
    held.release()  # before the gather, so that no rank takes them earlier
    meeting = own_address(run), free_port(), secrets.token_hex(8)
    host, port, name = gather_objects(meeting, run.host_group)[stay[0]]
    run.events.close()
    if not host:
        raise LaunchError("no replica can be left out: the address of the host where the others meet is not known")
    gather_objects(None, run.host_group)  # all have read it: a rank may end now
    _dismantle(run.engine)
    groups.shutdown()
    if dims.rank in stay:
        place = {"RANK": str(stay.index(dims.rank)), "WORLD_SIZE": str(len(stay))}
        place |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), AGENT_STORE_VARIABLE: "False"}
        os.environ.update({**place, MEETING_NAME_VARIABLE: f"/{name}"})
    found = (*(() if before is None else before.wrong), *(ranks[rank] for rank in sorted(wrong)))
    since = step if before is None else before.since
    return SurvivingRanks(tuple(ranks[rank] for rank in stay), launch.world_size, found, since, step)


def _dismantle(engine: TrainingEngine) -> None:
    """Let an engine hold nothing: hooks in autograd keep it, where no garbage collection finds them (DeepSpeed 0.19.8).

    Its parameters and states would stay in memory, and its process groups would not end: their threads would go on.
    """
    engine.destroy()
    modules, optimizer = list(engine.module.modules()), engine.optimizer
    for parameter in engine.module.parameters():
        parameter.grad, parameter.data = None, torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        vars(parameter).clear()
    for owner in (*modules, optimizer.optimizer, optimizer, engine):
        vars(owner).clear()


def free_previous_run() -> None:
    """Free the objects of the run before, once nothing refers to them: its modules and hooks are in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def own_address(run: Run) -> str:
    """This host's address towards the first one; of the first one, whose name may mean itself alone, towards another.

    Where no other's name is known, its own name for itself stays. Empty where there is no way to the first: then this
    rank cannot listen, and all ranks report that.

    Collective: all ranks of the world.
    """
    names = gather_objects(socket.gethostname(), run.host_group)
    try:
        return own_address_for_ranks(*(name for name in names if name != names[run.dims.rank]))
    except OSError as error:
        logger.warning("this host's address is not known: %s", error)
        return ""
