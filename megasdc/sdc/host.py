"""What checks need of the training that they look at, whoever wrote its loop, and what they find out of its ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.common.errors import ConfigError, MegasdcError, StorageError, TraceError
from megasdc.events import EventLog
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.vote import Position, comparable_positions, differing_names

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


class StepEngine(Protocol):
    """What checks of the optimizer's step need of an engine: ``engine.TrainingEngine``, or a view of an attached one.

    Attributes:
        optimizer: DeepSpeed's optimizer.
        data_parallel_group: ranks whose gradients are summed.
        step_number: number of the running step, or of the next one; the first is 1.
        is_skipped: whether the optimizer has skipped the step.
        used_norm: norm by which this rank has clipped in the last step, loss scale included; None: by none.
        communication_data_type: type in which gradients are sent, unless the optimizer has one of its own.
    """

    optimizer: Any
    dims: ParallelDims
    device: torch.device
    data_parallel_group: Any
    lr_scheduler: Any
    communication_data_type: torch.dtype

    @property
    def step_number(self) -> int: ...  # noqa: D102

    @property
    def is_skipped(self) -> bool: ...  # noqa: D102

    @property
    def used_norm(self) -> Any: ...  # noqa: D102

    def fp16_enabled(self) -> bool: ...  # noqa: D102

    def gradient_factor_of(self, parameter: Tensor) -> Tensor:
        """Factor of the mean of the replicas' gradients of one parameter, 0-d, fp64."""
        ...


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


def on_all_ranks(host: Host, action: Callable[[], T], counted: str = "") -> T:
    """Result of this rank's action; an error on one rank is raised on all, so that none waits for it.

    Args:
        counted: what ranks with an error cannot do, for their number in the message; empty: it is not in it.

    Raises:
        ConfigError: the first error, which is of settings, and so of all ranks.
        TraceError: the first error, with the rank and its host; likewise ``StorageError``.

    Collective: all ranks of the world.
    """
    done: list[T] = []
    problem: tuple[type[MegasdcError], str] | None = None
    try:
        done.append(action())
    except (ConfigError, TraceError, StorageError) as error:
        problem = type(error), str(error)
    problems = gather_objects((problem, socket.gethostname()), host.host_group)
    failed = [(rank, name, *of_rank) for rank, (of_rank, name) in enumerate(problems) if of_rank is not None]
    if failed:
        rank, name, kind, text = failed[0]
        number = f"; {len(failed)} of {len(problems)} ranks {counted}" if counted else ""
        raise kind(text if kind is ConfigError else f"rank {rank} on {name}: {text}{number}")
    return done[0]
