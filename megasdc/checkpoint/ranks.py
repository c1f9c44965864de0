"""Ranks that share a checkpoint folder, their leader, and agreement of all ranks on errors."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from megasdc.checkpoint.files import Fence
from megasdc.common.durable import lacks_room
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims

Storage = Literal["shared", "node_local"]


@dataclass(frozen=True)
class CheckpointGroup:
    """The ranks that save, look for and load checkpoints together; all of them make each call.

    Attributes:
        storage: ``shared``: all ranks see one folder; ``node_local``: each node has a folder of its own.
        group: process group of all ranks for values on the host; None: the default group.
        events: event log of rank 0; None: no events are written.
        node: name of this rank's node; None: the host's name.
        fence: this launch's claim on the folder, checked before a save changes it; None: no check.
    """

    storage: Storage = "shared"
    group: dist.ProcessGroup | None = None
    events: EventLog | None = None
    node: str | None = None
    fence: Fence | None = None


@dataclass(frozen=True)
class FolderRanks:
    """The checkpoint folder that a rank sees, and the ranks that share it.

    Attributes:
        rank: this global rank.
        node: name of this rank's node.
        nodes: global ranks of each node, by node name.
        ranks: global ranks that see the same folder, ascending.
        save_id: random identifier, new at each call of ``find_place`` and the same on all ranks.
        among: all ranks that save and load together.
    """

    rank: int
    node: str
    nodes: dict[str, list[int]]
    ranks: list[int]
    save_id: str
    among: CheckpointGroup = field(default_factory=CheckpointGroup)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, [world size], in order of rank.

        Collective: all ranks.
        """
        return gather_objects(value, self.among.group)

    def emit(self, kind: str, name: str, **fields: Any) -> None:
        """Emit an event, on rank 0 alone and if there is a log."""
        if self.rank == 0 and self.among.events is not None:
            self.among.events.emit(kind, name, **fields)

    @property
    def leader(self) -> bool:
        """Whether this rank is the first of its folder, which writes the files that are written once per folder."""
        return self.rank == self.ranks[0]

    def lacks(self, then: Mapping[str, Sequence[int]]) -> list[str]:
        """Hosts that run fewer ranks now than at an earlier time; agreement now does not cover those ranks' results.

        Args:
            then: ranks of each host at that time.
        """
        return sorted(name for name, ranks in then.items() if len(self.nodes.get(name, ())) < len(ranks))

    def share(self, count: int) -> range:
        """Indices out of ``count`` items that this rank processes when the ranks of the folder divide them."""
        return range(self.ranks.index(self.rank), count, len(self.ranks))

    def writes_model(self, dims: ParallelDims) -> bool:
        """Whether this rank writes the weights of its pipeline stage and tensor rank into the folder.

        It is the first of all ranks that hold the same weights and see the same folder.
        """
        peers = (replace(dims, rank=rank) for rank in self.ranks)
        same = [peer.rank for peer in peers if (peer.pp_rank, peer.tp_rank) == (dims.pp_rank, dims.tp_rank)]
        return self.rank == same[0]


def find_place(among: CheckpointGroup) -> FolderRanks:
    """Find the ranks that share this rank's checkpoint folder.

    Collective: all ranks.
    """
    rank = dist.get_rank()
    own = among.node or socket.gethostname()
    answers = gather_objects((own, uuid.uuid4().hex), among.group)
    nodes: dict[str, list[int]] = {}
    for other, (name, _) in enumerate(answers):
        nodes.setdefault(name, []).append(other)
    ranks = list(range(len(answers))) if among.storage == "shared" else nodes[own]
    return FolderRanks(rank, own, nodes, ranks, answers[0][1], among)


@dataclass(frozen=True)
class RankProblem:
    """An error on one rank.

    Args:
        text: message.
        storage: whether the disk caused it, not the checkpoint.
        no_room: whether the disk was full, which may pass.
    """

    text: str
    storage: bool
    no_room: bool = False


def describe_error(error: BaseException, doing: str) -> RankProblem:
    """Problem to send to other ranks for an exception; ``doing``: failed action, such as ``write /data/x.pt``."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    full = " (the disk is full)" if lacks_room(error) else ""
    said = f"cannot {doing}: {type(error).__name__}: {text}{full}"
    return RankProblem(said, isinstance(error, OSError), no_room=lacks_room(error))


def raise_on_all_ranks(problem: RankProblem | None, place: FolderRanks, what: str) -> None:
    """Raise on every rank if any rank has a problem.

    Args:
        problem: this rank's problem; None: it has none.
        place: this rank's folder, with all ranks.
        what: first words of the message.

    Raises:
        StorageError: a storage problem on any rank; on all ranks. ``no_room`` is that of the first problem.
        CheckpointError: any other problem; on all ranks.

    Collective: all ranks.
    """
    answers = place.gather((place.node, problem))
    failed = [(rank, node, found) for rank, (node, found) in enumerate(answers) if found is not None]
    if not failed:
        return
    rank, node, first = min(failed, key=lambda entry: (not entry[2].storage, entry[0]))
    kind = partial(StorageError, no_room=first.no_room) if first.storage else CheckpointError
    alike = len(failed) == len(answers) and all(found == first for _, _, found in failed)
    if alike and not first.storage:  # all ranks have the same problem
        raise kind(f"{what}: {first.text}")
    others = "" if len(failed) == 1 else f"; {len(failed) - 1} more failed"
    remedy = (
        "; free space, or check the folder and the rights on it: what was saved before is kept" if first.storage else ""
    )
    raise kind(f"{what}: rank {rank} on {node}: {first.text}{others}{remedy}")
