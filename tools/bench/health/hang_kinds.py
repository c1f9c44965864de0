"""Kinds of hangs that a campaign brings about, and what must be found of each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megasdc.parallel.dims import ParallelDims
from tools.bench.campaign import Layout

PHASES = ("forward", "backward", "collective", "update")
"""Where in a step a rank stops or hangs."""
SAVE_INTERVAL = 10


@dataclass(frozen=True)
class Strike:
    """One hang.

    Args:
        kind: of ``KINDS``.
        ranks: that cause it.
        step: in which it begins.
        phase: where in the step, of ``PHASES``; empty: the kind says where.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    phase: str = ""


def every_rank(layout: Layout) -> list[int]:
    """All ranks of a layout."""
    return list(range(math.prod(layout)))


def ranks_that_read(layout: Layout) -> list[int]:
    """Ranks that take samples from the loader: stages in between get activations instead."""
    ranks = [ParallelDims(*layout, rank) for rank in every_rank(layout)]
    return [one.rank for one in ranks if one.is_first_stage or one.is_last_stage]


@dataclass(frozen=True)
class Kind:
    """A kind of hang.

    Args:
        num_ranks: that cause it.
        phases: where it may begin.
        among: ranks of a layout that can cause it.
        is_hang: whether a rank that lives is stuck; else the run ends by itself, and no hang may be told.
    """

    title: str
    num_ranks: int = 1
    phases: Sequence[str] = ("",)
    is_hang: bool = True
    among: Callable[[Layout], Sequence[int]] = every_rank

    def draw(self, name: str, layout: Layout, chance: random.Random) -> Strike:
        """A hang of this kind in a run of a layout."""
        step = chance.randrange(30, 60)
        if name == "save":
            step = SAVE_INTERVAL * (step // SAVE_INTERVAL)
        causes = sorted(chance.sample(self.among(layout), self.num_ranks))
        return Strike(name, tuple(causes), step, chance.choice(list(self.phases)))


KINDS = {
    "stopped": Kind("stopped by SIGSTOP", phases=PHASES),
    "loop": Kind("endless loop in a hook", phases=PHASES),
    "data": Kind("data loader blocks", among=ranks_that_read),
    "save": Kind("disk blocks in a save"),
    "skip": Kind("one rank skips a collective"),
    "order": Kind("two ranks call two collectives in opposite order", num_ranks=2),
    "killed": Kind("killed by SIGKILL", phases=PHASES, is_hang=False),
}


@dataclass(frozen=True)
class Drill:
    """What came of a hang.

    Args:
        happened: whether the hang began; where it did not, the drill has failed, and tells nothing of who is named.
        found: kind that the incident tells; empty: there is none.
        named: ranks that it names.
        limit_s: that the phases of the ranks had, the longest that elapsed last.
        seconds: from the hang until all ranks had ended; None: they had to be ended by the campaign.
        codes: exit codes by rank.
    """

    strike: Strike
    layout: Layout
    happened: bool
    found: str
    named: tuple[int, ...]
    limit_s: float
    seconds: float | None
    codes: tuple[int, ...]

    @property
    def right(self) -> bool:
        """Whether those are named that cause it, and nobody else; of two that cause it one is enough."""
        if not KINDS[self.strike.kind].is_hang:
            return not self.wrong
        return bool(self.named) and set(self.named) <= set(self.strike.ranks)

    @property
    def wrong(self) -> bool:
        """Whether somebody is named who does not cause it."""
        return not set(self.named) <= set(self.strike.ranks)

    @property
    def in_time(self) -> bool:
        """Whether all had ended ten seconds after the limit."""
        return self.seconds is not None and self.seconds <= self.limit_s + 10
