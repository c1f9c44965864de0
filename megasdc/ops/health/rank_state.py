"""What is known of each rank of a run that does not move: where it is, its process, its process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megasdc.common.host import RUNNING
from megasdc.ops.health.phases import Phase


@dataclass(frozen=True)
class GroupState:
    """What a rank's flight recorder holds of a process group.

    Args:
        ranks: of the group.
        joined: sequence number of the last collective that the rank has joined.
        ended: of the last one that has ended for it.
        recent: last collectives by sequence number, as ``all_reduce [4096] Float``.
    """

    ranks: tuple[int, ...]
    joined: int
    ended: int
    recent: Mapping[int, str] = field(default_factory=dict)

    @property
    def waits_in(self) -> int | None:
        """Number of the collective that the rank waits in; None: in none."""
        return self.joined if self.joined > self.ended else None


@dataclass(frozen=True)
class RankState:
    """A rank when nothing moved any more.

    Args:
        stuck_s: seconds since its last change of phase.
        process: running, stopped, waiting for a disk, or gone.
        groups: by name; empty where the rank did not answer.
        where: innermost line of the run's own code in its main thread; empty: unknown.
        limit_s: seconds that its phase may last.
        silent_peers: addresses that do not acknowledge what it sends, with the number of repetitions.
        group: whose collectives its phase has; empty: it has none.
        sequence: number of the last one that it had joined when its phase began; -1: no group.
        may_wait: whether the innermost line of its main thread, of any library, may wait for another rank or a device.
    """

    rank: int
    host: str
    pp_rank: int
    tp_rank: int
    dp_rank: int
    step: int
    micro_batch: int
    phase: Phase
    stuck_s: float
    process: str = RUNNING
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    where: str = ""
    limit_s: float = math.inf
    silent_peers: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    sequence: int = -1
    may_wait: bool = False

    @property
    def answered(self) -> bool:
        """Whether it has told what it does."""
        return bool(self.groups or self.where)

    def joined(self, name: str) -> int:
        """Number of the last collective of a group that it has joined."""
        return self.groups[name].joined if name in self.groups else 0

    @property
    def label(self) -> str:
        """Rank and host."""
        return f"rank {self.rank} on {self.host}"

    @property
    def doing(self) -> str:
        """Where it is, in words."""
        batch = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        where = f" at {self.where}" if self.where else ""
        step = f" of step {self.step}" if self.step > 0 else ""  # of programs that tell none it is not known
        return f"{self.phase.label}{step}{batch}{where}"
