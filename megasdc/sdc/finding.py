"""Findings with their rulings: as people read them, as events hold them, and what an incident says of their ranks.

A rank is named with its host, device and place in the layout. Devices found wrong in a run are remembered by host and
device (``Suspects``), since a restart or a change of layout may move ranks.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megasdc.common.addresses import Address
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.host import Host
from megasdc.sdc.incident import (
    DisputedRank,
    FlaggedRank,
    Opinion,
    RankPlace,
    RoundEvidence,
    how_often,
    place_of,
)
from megasdc.sdc.trace import Counts
from megasdc.sdc.verdict import INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, RankVerdict

SEVEREST = (PERSISTENT, INTERMITTENT, INCONCLUSIVE, NOT_REPRODUCED)
"""Verdicts by falling severity; the most severe of a finding is its incident's."""
DONE = {"warn": "committed", "repair": "repaired", "isolate": "isolated", "halt": "halted"}
"""Action as an incident reports it, by the policy's name, in the order of rising severity."""
LEAVE_OUT = "leave out"
"""What a round of Local-SGD does with a wrong replica, whatever the policy."""


@dataclass(frozen=True)
class Finding:
    """A finding with its rulings; the same on all ranks.

    ``tier``: name of the check; ``micro_batch``: number of the micro-batch, None: of none; ``compared``: number of
    results compared, over all ranks; ``differing``: number of differing results, by phase, submodule and rank;
    ``opinions``: the referee's opinions; ``unrepaired``: why a repair of the finding would not repair the step;
    ``round``: the round of Local-SGD that was made without this replica.
    """

    tier: str
    micro_batch: int | None
    rulings: tuple[RankVerdict, ...]
    compared: int = 0
    differing: Counts = field(default_factory=dict)
    opinions: tuple[Opinion, ...] = ()
    unrepaired: str = ""
    round: RoundEvidence | None = None

    @property
    def worst(self) -> RankVerdict:
        """The ruling with the most severe verdict."""
        return min(self.rulings, key=lambda one: SEVEREST.index(one.verdict))

    @property
    def text(self) -> str:
        """The rulings as a sentence for people."""
        return "; ".join(_describe(one, self.tier) for one in self.rulings)

    def flagged(self, ranks: Sequence[RankPlace], step: int) -> tuple[FlaggedRank, ...]:
        """Ranks named as wrong, in a step; ``ranks``: places of all ranks."""
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
        """Suspected ranks of which none can be named, in a step; ``ranks``: places of all ranks."""
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


def _describe(ruling: RankVerdict, tier: str) -> str:
    who = f"rank {ruling.rank}" if ruling.rank is not None else f"one of ranks {list(ruling.suspects)}"
    where = "" if ruling.address is None else f" at {place_of(tier, ruling.address)}"
    often = how_often(ruling.verdict, ruling.wrong, ruling.repeats)
    return f"{who}{where}: {ruling.verdict}{f' ({often})' if often else ''}, {ruling.basis}"


def _hex(value: int | None) -> str | None:
    return None if value is None else f"{value:016x}"


def device_id(device: torch.device) -> str:
    """Identifier of a rank's device on its host: a GPU's UUID, or ``cpu-`` and the rank's local number."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu-{os.environ.get('LOCAL_RANK', '0')}"


def device_name(device: torch.device) -> str:
    """Name of a rank's device: the GPU's, or the processor's with the instruction set that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


class Suspects:
    """Devices that computed wrong results before, whatever rank they had.

    Attributes:
        places: the place of every rank.
    """

    def __init__(self) -> None:
        self.places: list[RankPlace] = []
        self._found: set[tuple[str, str]] = set()
        self._of_rank: list[tuple[str, str]] = []

    def on_start(self, host: Host) -> None:
        """Gather the host, device and place of every rank.

        Collective: all ranks of the world.
        """
        device, dims = host.engine.device, host.dims
        place = (socket.gethostname(), device_name(device), dims.dp_rank, dims.pp_rank, dims.tp_rank)
        found = gather_objects((place, device_id(device)), host.host_group)
        self.places = [RankPlace(rank, *place) for rank, (place, _) in enumerate(found)]
        self._of_rank = [(place[0], identifier) for place, identifier in found]

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that are now on a device that was wrong before."""
        return frozenset(rank for rank, place in enumerate(self._of_rank) if place in self._found)

    def add(self, ranks: Iterable[int]) -> None:
        """Add the devices of wrong ranks."""
        self._found |= {self._of_rank[rank] for rank in ranks}

    def state(self) -> list[list[str]]:
        """Pairs of host and device, the same on all ranks."""
        return sorted(map(list, self._found))

    def load_state(self, state: Iterable[Any]) -> list[Any]:
        """Restore ``state``; returns ignored entries: rank numbers of earlier versions, which identify no device."""
        entries = list(state)
        self._found = {(one[0], one[1]) for one in entries if not isinstance(one, int)}
        return [one for one in entries if isinstance(one, int)]
