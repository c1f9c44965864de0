"""A finding with its rulings: as people read it, as events hold it, and what an incident says of its ranks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.addresses import Address
from megasdc.common.origin import this_launch
from megasdc.sdc.evidence import Counts
from megasdc.sdc.incidents.incident import DisputedRank, FlaggedRank, Incident, IncidentEvidence, RankPlace, how_often
from megasdc.sdc.incidents.opinion import Opinion
from megasdc.sdc.verdict import INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, RankVerdict

SEVEREST = (PERSISTENT, INTERMITTENT, INCONCLUSIVE, NOT_REPRODUCED)
"""Verdicts by falling severity; the most severe is the incident's."""
DONE = {"halt": "halted", "isolate": "isolated", "repair": "repaired", "warn": "committed"}
"""What was done, by what was to be."""


@dataclass(frozen=True)
class Finding:
    """A finding with its rulings; the same on all ranks.

    ``tier`` and ``micro_batch``: as of ``incident.Incident``; ``compared``: results over all ranks; ``differing``: how
    many by phase, submodule and rank; ``opinions``: the referee's; ``unrepaired``: why putting right what was found
    would not put right the step.
    """

    tier: str
    micro_batch: int | None
    rulings: tuple[RankVerdict, ...]
    compared: int = 0
    differing: Counts = field(default_factory=dict)
    opinions: tuple[Opinion, ...] = ()
    unrepaired: str = ""

    @property
    def worst(self) -> RankVerdict:
        """The ruling with the most severe verdict."""
        return min(self.rulings, key=lambda one: SEVEREST.index(one.verdict))

    @property
    def text(self) -> str:
        """The rulings as a sentence for people."""
        return "; ".join(map(_say, self.rulings))

    def incident(self, run_dir: Path, step: int, action: str, ranks: Sequence[RankPlace], **more: Any) -> Incident:
        """The incident that a report describes.

        Args:
            action: of ``DONE``.
            ranks: places of all.
            **more: fields of ``Incident`` that a finding does not know.
        """
        return Incident(
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            run_dir=str(run_dir),
            step=step,
            micro_batch=self.micro_batch,
            tier=self.tier,  # type: ignore[arg-type]
            verdict=self.worst.verdict,  # type: ignore[arg-type]
            basis=self.worst.basis,  # type: ignore[arg-type]
            policy=action,  # type: ignore[arg-type]
            done=DONE[action],  # type: ignore[arg-type]
            flagged=self.flagged(ranks, step),
            disputed=self.disputed(ranks, step),
            ranks=tuple(ranks),
            evidence=IncidentEvidence(self.compared, self.differing),
            opinions=self.opinions,
            launch=this_launch(),
            **more,
        )

    def flagged(self, ranks: Sequence[RankPlace], step: int) -> tuple[FlaggedRank, ...]:
        """Ranks named as wrong, in a step; ``ranks``: places of all."""
        return tuple(
            FlaggedRank(
                **vars(ranks[one.rank]),
                verdict=one.verdict,  # type: ignore[arg-type]
                first=one.address or Address(step, self.micro_batch, "forward", "", ""),
                expected=_hex(one.expected),
                got=_hex(one.got.get(one.rank)),
                repeats=one.repeats,
                wrong_repeats=one.wrong,
                rate_bound=one.rate_bound,
            )
            for one in self.rulings
            if one.rank is not None
        )

    def disputed(self, ranks: Sequence[RankPlace], step: int) -> tuple[DisputedRank, ...]:
        """Ranks of which none can be named, in a step; ``ranks``: places of all."""
        return tuple(
            DisputedRank(
                **vars(ranks[rank]),
                first=one.address or Address(step, self.micro_batch, "forward", "", ""),
                got=_hex(one.got.get(rank)),
            )
            for one in self.rulings
            if one.rank is None
            for rank in one.suspects or range(len(ranks))
        )


def describe_ruling(ruling: RankVerdict) -> dict[str, object]:
    """A ruling in plain values, for events; checksums as in the incident report."""
    plain = {name: value for name, value in vars(ruling).items() if name != "address"}
    got = {rank: _hex(value) for rank, value in ruling.got.items()}
    address = None if ruling.address is None else str(ruling.address)
    return {**plain, "address": address, "expected": _hex(ruling.expected), "got": got}


def _say(ruling: RankVerdict) -> str:
    who = f"rank {ruling.rank}" if ruling.rank is not None else f"one of ranks {list(ruling.suspects)}"
    where = "" if ruling.address is None else f" at {ruling.address}"
    often = how_often(ruling.verdict, ruling.wrong, ruling.repeats)
    return f"{who}{where}: {ruling.verdict}{f' ({often})' if often else ''}, {ruling.basis}"


def _hex(value: int | None) -> str | None:
    return None if value is None else f"{value:016x}"
