"""Kinds of faults that a campaign of recoveries brings about, and what came of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SAVE_INTERVAL, STEPS = 5, 36
FIRST_STEP, LAST_STEP = 8, 24
"""Steps after which a fault may come."""
LATEST_S = 0.4
"""After such a step was seen."""


@dataclass(frozen=True)
class Strike:
    """One fault.

    Args:
        kind: of ``KINDS``.
        interval: steps between snapshots in memory; 0: there are none.
        rank: that it hits; a host is that of this rank.
        step: after which it comes.
        delay_s: seconds after that step was seen.
        seed: of what the fault chooses itself.
    """

    kind: str
    interval: int
    rank: int
    step: int
    delay_s: float
    seed: int


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        intervals: between snapshots in memory.
        has_hosts: whether ranks run on several hosts, each with a partner.
        least_hosts: how many are needed.
        destroys: whether it may destroy a checkpoint that was whole.
        needs_disk: whether it needs a small file system of its own.
    """

    title: str
    intervals: Sequence[int] = (1, 2, 3)
    has_hosts: bool = False
    least_hosts: int = 1
    destroys: bool = False
    needs_disk: bool = False

    @property
    def needs_root(self) -> bool:
        """Whether only root can bring it about."""
        return self.has_hosts or self.needs_disk

    def draw(self, name: str, ranks: int, chance: random.Random) -> Strike:
        """A fault of this kind in a run of so many ranks."""
        step, delay_s = chance.randrange(FIRST_STEP, LAST_STEP), chance.uniform(0, LATEST_S)
        if name in ("arena", "disk_full"):  # while a save begins
            step, delay_s = SAVE_INTERVAL * (step // SAVE_INTERVAL + 1), delay_s / 4
        interval, rank = chance.choice(list(self.intervals)), chance.randrange(ranks)
        return Strike(name, interval, rank, step, delay_s, chance.randrange(1 << 30))


KINDS = {
    "rank": Kind("a rank is killed"),
    "again": Kind("a rank is killed, and one in the start after"),
    "host": Kind("all ranks of a host are killed", has_hosts=True, least_hosts=2),
    "writer": Kind("a writer is killed, then a rank", has_hosts=True, least_hosts=2),
    "agent": Kind("a host's agent is killed, then a rank"),
    "stopped": Kind("a writer stands still for a while, then a rank is killed"),
    "host_lost": Kind("a host is replaced", has_hosts=True, least_hosts=2),
    "hosts_lost": Kind("two of three hosts are replaced, one later", has_hosts=True, least_hosts=3),
    "slot": Kind("a bit flips in a slot", destroys=True),
    "guest": Kind("a bit flips at the partner of a lost host", has_hosts=True, least_hosts=2, destroys=True),
    "file": Kind("a bit flips on the disk", intervals=(0, 2), destroys=True),
    "arena": Kind("a bit flips in a snapshot while it is written", intervals=(0, 2)),
    "disk_full": Kind("the disk is full, then a rank is killed", needs_disk=True),
    "slow": Kind("a partner stands still, then a host is replaced", has_hosts=True, least_hosts=2),
}


@dataclass(frozen=True)
class Resumed:
    """How a start went on.

    Args:
        step: 0: from the beginning.
        source: ``memory``, ``partner``, ``disk``, or ``start``.
        lost_steps: that had been done.
    """

    step: int
    source: str
    lost_steps: int


@dataclass(frozen=True)
class Drill:
    """What came of a fault.

    Args:
        layout: tensor, pipeline, data.
        resumed: of each start but the first.
        problems: what was not right, a line each.
        seconds: of the whole drill.
    """

    strike: Strike
    layout: tuple[int, int, int]
    resumed: tuple[Resumed, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def right(self) -> bool:
        """Whether all was."""
        return not self.problems
