"""Devices found wrong in a run, by host and device, since a restart or a change of layout may move ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.device import device_id


class Suspects:
    """Devices that computed wrong results before, whatever rank they had."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()
        self._of_rank: list[tuple[str, str]] = []

    def on_start(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Gather the host and device of every rank; all ranks of the world call it together, with their host group."""
        self._of_rank = gather_objects((socket.gethostname(), device_id(device)), group)

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that are now on such a device."""
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
