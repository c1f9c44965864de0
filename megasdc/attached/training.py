"""Facts on a guarded training that all parts of its guard share, and the base class of these parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasdc.attached.record import Watched
from megasdc.config.guard import GuardSettings
from megasdc.events import EventLog
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding, Suspects
from megasdc.tensors.checksum import ChecksumAlgorithm, default_algorithm


@dataclass(frozen=True)
class Training:
    """A training that is guarded.

    Attributes:
        engine: the engine of DeepSpeed.
        watched: submodules whose results are compared.
        host_group: a host group of all ranks.
        copies: a host group of the ranks that hold the same parameters as this one.
        suspects: devices that were wrong before.
        events: this rank's event log.
        hides_losses: whether the log of the training leaves out losses that are not finite.
    """

    engine: Any
    settings: GuardSettings
    dims: ParallelDims
    watched: tuple[Watched, ...]
    host_group: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    suspects: Suspects
    events: EventLog
    hides_losses: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.settings.logging.run_dir)

    @property
    def algorithm(self) -> ChecksumAlgorithm:
        """Algorithm of checksums on the engine's device."""
        return default_algorithm(self.engine.device)

    @property
    def step(self) -> int:
        """Number of the next optimizer step, the first is 1; a loaded checkpoint's steps count."""
        return int(self.engine.global_steps) + 1


class Protection:
    """Base class of a guard's parts. A part attaches where it is made, and acts around optimizer steps until closed."""

    what = "audit"
    """What has made its findings, as messages call it."""
    name = ""
    """What it looks at, in words, of a part that people may want to know of."""
    trained_on = False
    """Whether what it finds is part of the training, and not of a batch beside it."""

    @property
    def acts(self) -> bool:
        """Whether the part does anything around optimizer steps."""
        kind = type(self)
        return kind.before_step is not Protection.before_step or kind.after_step is not Protection.after_step

    def before_step(self, step: int) -> Iterable[Finding]:
        """Act before the optimizer steps; returns findings, each of which is settled once the caller asks for it.

        Collective: all ranks of the world.
        """
        return ()

    def after_step(self, step: int) -> None:
        """Act after the optimizer has stepped.

        Collective: all ranks of the world.
        """

    def close(self) -> None:
        """Undo everything."""
