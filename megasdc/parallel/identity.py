"""Identity of a rank's launch: properties that distinguish launches, on one host and across hosts; no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megasdc.common.errors import LaunchError
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.common.program import printable
from megasdc.common.run_lock import process_space, start_ticks
from megasdc.parallel.stores import REMEDY

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` where the process that starts the ranks hosts their store itself."""
NODE_RANK_VARIABLE = "CROSS_RANK"
"""Set by DeepSpeed's launcher (0.19.8) for the ranks that it starts: the index of its host in the launch."""
MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class Identity:
    """Identity of a rank, which it publishes at the rendezvous.

    Attributes:
        rank: in the launch.
        world_size: of the launch.
        launch: id set by ``megasdc launch`` or by the user; None: none.
        job: id of the scheduler's step that started the rank; None: none is known.
        run_dir: run folder as configured; None where there is none.
        processes: boot id and PID namespace in which ``parent`` is valid.
        node: index of the host in the launch; None: not started by DeepSpeed's launcher.
        parent: id and start time (clock ticks after boot; 0: not visible) of the process that started the rank.
    """

    rank: int
    world_size: int
    launch: str | None
    job: str | None
    run_dir: str | None
    host: str
    processes: str
    node: str | None
    parent: tuple[int, int]

    @classmethod
    def own(cls, rank: int, world_size: int, run_dir: str | None, environ: Mapping[str, str] = os.environ) -> Identity:
        """The identity of this process; rank and world size are the launch's, ``run_dir`` is as configured."""
        host, boot, namespace = process_space()
        return cls(
            rank=rank,
            world_size=world_size,
            launch=environ.get(LAUNCH_ID_VARIABLE) or None,
            job=_scheduler_step(environ),
            run_dir=run_dir,
            host=host,
            processes=f"{boot} {namespace}",
            node=None if environ.get(AGENT_STORE_VARIABLE) == "True" else environ.get(NODE_RANK_VARIABLE),
            parent=(os.getppid(), start_ticks(os.getppid()) or 0),
        )

    def encode(self) -> str:
        """Return the identity as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Identity:
        """Return the identity that ``encode`` wrote.

        Raises:
            LaunchError: it is none.
        """
        try:
            if len(text) > MOST_BYTES:
                raise ValueError(f"it has {len(text):,} bytes")
            raw = json.loads(text)
            found = cls(**{**raw, "parent": tuple(raw["parent"])})
            numbers, texts = (found.rank, found.world_size, *found.parent), (found.host, found.processes)
            named = [one for one in (found.launch, found.job, found.run_dir, found.node) if one is not None]
            if len(found.parent) != 2 or not all(type(one) is int for one in numbers):
                raise ValueError("a number is none")
            if not all(isinstance(one, str) for one in (*texts, *named)):
                raise ValueError("a text is none")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LaunchError(f"the ranks' store holds no identity for a rank ({error}); {REMEDY}") from error
        return found

    def __str__(self) -> str:
        name = f"launch {self.launch}" if self.launch else f"a launch without {LAUNCH_ID_VARIABLE}"
        place = f"rank {self.rank} of {self.world_size} on {self.host}, started by process {self.parent[0]}"
        return printable(f"{name} ({place}{f', run folder {self.run_dir}' if self.run_dir else ''})")


def differences(one: Identity, other: Identity) -> list[str]:
    """Properties by which two ranks belong to different launches, in words; empty: none differs.

    Without a launch id or a scheduler's step, launches on different hosts differ by run folder and world size alone.
    """
    found = []
    if one.launch != other.launch:
        found.append("launch id")
    if one.job and other.job and one.job != other.job:
        found.append("scheduler's job step")
    if one.world_size != other.world_size:
        found.append("number of ranks")
    if one.run_dir and other.run_dir and one.run_dir != other.run_dir:
        found.append("run folder")
    # Ranks started by hand may have several parents (their node is None); those of one launcher have one.
    same_node = one.processes == other.processes and one.node is not None and one.node == other.node
    if same_node and one.parent != other.parent:
        found.append("launcher process")
    return found


def _scheduler_step(environ: Mapping[str, str]) -> str | None:
    """The SLURM step or MPI job (PMIx namespace) of this process."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"slurm {environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return environ.get("PMIX_NAMESPACE")
