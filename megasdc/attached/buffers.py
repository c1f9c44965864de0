"""Buffers that all replicas hold alike and nothing writes to, such as frequencies of a rotation: do they still?

An audit computes with the buffers of one replica on all, so that a bit that has flipped in one shows in no result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.attached.record import ROOT
from megasdc.common.addresses import PARAMETER, Address
from megasdc.sdc.trace import Trace, digest
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back

MOST_MOVES = 2
"""A buffer that was written to before so many comparisons is none of these any more; a load of a checkpoint is one."""


@dataclass(frozen=True)
class BufferState:
    """A buffer of one rank.

    Args:
        memory: what it is as an object, and how often operations have written to it.
    """

    memory: tuple[int, int, int | None]
    checksum: int


class StillBuffers:
    """Compares buffers with what they were when all replicas had them alike.

    Args:
        gather: returns a value of each rank that holds the same parameters.

    Collective: these ranks.
    Sync: waits for the device.
    """

    def __init__(self, model: nn.Module, algorithm: ChecksumAlgorithm, gather: Callable[[Any], list[Any]]) -> None:
        self._model, self._algorithm, self._gather = model, algorithm, gather
        self._moves: Counter[str] = Counter()
        self._before: dict[str, BufferState] = {}
        self._alike: tuple[str, ...] = ()
        self._now: dict[str, BufferState] = self._read()
        self._keep_alike(gather({name: one.checksum for name, one in self._now.items()}))

    def look(self) -> tuple[int, bool]:
        """A checksum of those that were alike, and whether this rank's have been written to since."""
        self._now = self._read()
        moved = any(one not in self._now or self._now[one].memory != self._before[one].memory for one in self._alike)
        return digest(self.trace(0, self._alike)), moved

    def differing(self) -> list[str]:
        """Those that differ between replicas though nothing has written to them, after a ``look``.

        What was written to on any rank is not counted: statistics of a batch norm. Nor is what has changed on more
        ranks than have it as it was.

        Collective: these ranks.
        """
        present = {name: one for name, one in self._now.items() if name in self._before}
        own = {name: (one.memory == self._before[name].memory, one.checksum) for name, one in present.items()}
        found: Sequence[Mapping[str, tuple[bool, int]]] = self._gather(own)
        lost = {name for name in self._alike if any(name not in of_rank for of_rank in found)}
        written = {name for name in self._alike if name not in lost and any(not one[name][0] for one in found)}
        for name in list(written):  # of a submodule of which one is written to, others may be by operations of a device
            written |= {one for one in self._alike if one.rpartition(".")[0] == name.rpartition(".")[0]}
        self._moves.update(written)
        changed = []
        for name in self._alike:
            if name in lost | written:
                continue
            as_it_was = sum(one[name][1] == self._before[name].checksum for one in found)
            if as_it_was < len(found):
                self._moves[name] = MOST_MOVES  # told once
                changed += [name] if 2 * as_it_was >= len(found) else []
        self._keep_alike(self._gather({name: one.checksum for name, one in self._now.items()}))
        return changed

    def trace(self, step: int, names: Collection[str], *, again: bool = False) -> Trace:
        """Their checksums, addressed as of a step; ``again``: read once more."""
        held = self._read() if again else self._now
        parts = [(name, *name.rpartition(".")[::2]) for name in names if name in held]
        addresses = [Address(step, None, PARAMETER, fqn or ROOT, f"buffer {slot}") for _, fqn, slot in parts]
        return Trace(addresses, [held[name].checksum for name, *_ in parts])

    def _keep_alike(self, found: Sequence[Mapping[str, int]]) -> None:
        names = [name for name in self._now if self._moves[name] < MOST_MOVES]
        self._alike = tuple(name for name in names if len({one.get(name) for one in found}) == 1)
        self._before = {name: self._now[name] for name in self._alike}

    def _read(self) -> dict[str, BufferState]:
        named: list[tuple[str, Tensor]] = [(name, one.detach()) for name, one in self._model.named_buffers()]
        usable = [(name, one) for name, one in named if one.layout == torch.strided and not one.is_meta and one.numel()]
        checksums = read_back([self._algorithm.start(_real(one)) for _, one in usable])
        objects: Mapping[str, Any] = dict(self._model.named_buffers())
        return {
            name: BufferState((id(objects[name]), one.data_ptr(), _version(one)), checksum)
            for (name, one), checksum in zip(usable, checksums, strict=True)
        }


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
