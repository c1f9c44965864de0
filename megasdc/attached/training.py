"""What all parts of a guard know of the training, and what a part is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasdc.attached.record import Watched
from megasdc.common.origin import Origin
from megasdc.config.guard import GuardSettings
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding, Suspects
from megasdc.tensors.checksum import ChecksumAlgorithm, default_algorithm


@dataclass(frozen=True)
class Training:
    """A training that is guarded.

    Attributes:
        engine: of DeepSpeed.
        watched: submodules whose results are compared.
        world: a host group of all ranks.
        copies: a host group of those that hold the same parameters as this one.
        suspects: devices that were wrong before.
        tell: writes an event on rank 0, from its kind, name and fields.
        origin: of events.
        hides_losses: whether the log of the training leaves out losses that are not finite.
    """

    engine: Any
    settings: GuardSettings
    dims: ParallelDims
    watched: tuple[Watched, ...]
    world: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    suspects: Suspects
    tell: Callable[..., None]
    origin: Origin
    hides_losses: bool = False

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.settings.logging.run_dir)

    @property
    def algorithm(self) -> ChecksumAlgorithm:
        """Of checksums."""
        return default_algorithm(self.engine.device)

    @property
    def step(self) -> int:
        """Number of the optimizer step that comes next, the first is 1; a checkpoint may have been loaded."""
        return int(self.engine.global_steps) + 1


class Protection:
    """One protection. It attaches where it is made, and acts around optimizer steps until it is closed."""

    @property
    def acts(self) -> bool:
        """Whether it does anything around optimizer steps."""
        kind = type(self)
        return kind.before_step is not Protection.before_step or kind.after_step is not Protection.after_step

    def before_step(self, step: int) -> Iterable[Finding]:
        """Act before the optimizer steps; what was found, each settled once it is asked for.

        Collective: all ranks of the world.
        """
        return ()

    def after_step(self, step: int) -> None:
        """Act once it has.

        Collective: all ranks of the world.
        """

    def close(self) -> None:
        """Undo everything."""
