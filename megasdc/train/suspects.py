"""Devices that were found wrong in a run: kept by host and device, since after a restart or a change of the layout a
rank may be on another one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megasdc.parallel.collectives import gather_objects


def device_id(device: torch.device) -> str:
    """Which of a host's devices a rank computes on: a GPU by its UUID, a processor by the rank's number on the host."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu-{os.environ.get('LOCAL_RANK', '0')}"


class Suspects:
    """Where something wrong was computed before, whichever rank it was then."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()
        self._of_rank: list[tuple[str, str]] = []

    def on_start(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Learn on which host and device every rank is.

        Args:
            device: of this rank.
            group: a group of all ranks on the host.

        Collective: all ranks of the world.
        """
        self._of_rank = gather_objects((socket.gethostname(), device_id(device)), group)

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that are now on such a device."""
        return frozenset(rank for rank, place in enumerate(self._of_rank) if place in self._found)

    def add(self, ranks: Iterable[int]) -> None:
        """Remember the devices of ranks that were found wrong."""
        self._found |= {self._of_rank[rank] for rank in ranks}

    def state(self) -> list[list[str]]:
        """Pairs of host and device, the same on all ranks."""
        return sorted(map(list, self._found))

    def load_state(self, state: Iterable[Any]) -> list[Any]:
        """Take up what ``state`` gave.

        Returns:
            What is not taken up: numbers of ranks, which versions before kept and which say nothing of a device.
        """
        entries = list(state)
        self._found = {(one[0], one[1]) for one in entries if not isinstance(one, int)}
        return [one for one in entries if isinstance(one, int)]
