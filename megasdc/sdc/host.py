"""What checks need of the training that they look at, whoever wrote its loop, and what they find out of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.vote import Position, comparable_positions, differing_names

logger = logging.getLogger(__name__)


class Host(Protocol):
    """A training: a run of our own (``engine.hooks.Run``), or an attached one (``attached.training.Training``)."""

    @property
    def engine(self) -> Any:
        """The engine of DeepSpeed."""

    @property
    def dims(self) -> ParallelDims:
        """Layout of the training, and this rank's place."""

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for decisions that must not wait for a device."""

    @property
    def events(self) -> EventLog:
        """This rank's event log."""

    @property
    def folder(self) -> Path:
        """The run folder."""


def find_comparable(host: Host, key: Mapping[str, Any]) -> set[Position]:
    """Positions (pp_rank, tp_rank) of which all replicas have the same key; the others are reported.

    Args:
        key: properties of this rank that may change a bit of its results, such as hardware and versions.

    Collective: all ranks of the world.
    """
    keys = gather_objects(dict(key), host.host_group)
    found, everywhere = comparable_positions(keys, host.dims), host.dims.pipeline * host.dims.tensor
    if len(found) < everywhere:
        left_out, names = everywhere - len(found), differing_names(keys)
        host.events.emit_on_rank_0("sdc", "not_comparable", positions=left_out, differing=names)
        if host.dims.rank == 0:
            logger.warning(
                "%d of %d positions have replicas that differ in %s: their results cannot be compared, and audits "
                "verify no checkpoint",
                *(left_out, everywhere, ", ".join(names)),
            )
    return found
