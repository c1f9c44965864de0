"""What a run is built from at its start, and what the storeys above the core add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megasdc.checkpoint.fence import Fence
from megasdc.common.run_lock import RunLock
from megasdc.config.load import RunConfig
from megasdc.config.sections.megasdc import MegasdcSection, ParallelSection
from megasdc.config.sections.study import StudySection
from megasdc.data.loader import EvalLoader, StepBatches
from megasdc.data.manifest import Manifest
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.step_times import TimeSplit
from megasdc.parallel.dims import ReplicaWorld
from megasdc.train.process.isolation import SurvivingRanks
from megasdc.train.process.signals import StopSignals
from megasdc.train.process.startup import StartClock

if TYPE_CHECKING:
    from megasdc.faults.delay import DelayReport
    from megasdc.faults.injector import Injector
    from megasdc.faults.process import ProcessFaults


class SharedLaunch(Protocol):
    """Part of a rank in a launch of several whole runs, the replicas of a study.

    Attributes:
        section: of the study.
        world: place of this rank in the launch.
        folder: of the launch.
        store: of all ranks of the launch, once they have met.
    """

    section: StudySection
    world: ReplicaWorld
    folder: Path

    @property
    def store(self) -> Any:
        """See the class."""

    def meet(self, section: ParallelSection, on_met: Callable[[], None]) -> None:
        """Join the process group of this rank's run, and connect to the ranks at the same place of the others.

        Collective: all ranks of the launch.
        """

    def agree_on_checkpoint(self, step: int) -> int | None:
        """None if all runs have found a checkpoint of the same step (0: none); else the earliest, to search again from.

        Collective: the ranks of equal place in all runs.
        """


@dataclass(frozen=True)
class Injection:
    """Fault injection of a run, each None without: in tensors, in this rank's process, and delays with their report."""

    injector: Injector | None
    process_faults: ProcessFaults | None
    delays: DelayReport | None


@dataclass(frozen=True)
class Start:
    """What hooks are built from: a run at the step from which it continues, still without hooks, and its services.

    Attributes:
        manifest: of the training data.
        eval_loader: None without evaluation.
        batches: keeps those of a step where a check may read them again; else None.
        split: on rank 0 only.
        locks: of the run's folders.
        fence: of the folder of its checkpoints.
        remaining: the ranks that are left of the launch; None: all.
        shared: None but in a study.
    """

    config: RunConfig
    run: Run
    manifest: Manifest
    eval_loader: EvalLoader | None
    batches: StepBatches | None
    split: TimeSplit | None
    clock: StartClock
    signals: StopSignals
    injection: Injection
    locks: Sequence[RunLock]
    fence: Fence
    remaining: SurvivingRanks | None
    shared: SharedLaunch | None

    @property
    def sections(self) -> MegasdcSection:
        """The configuration's own sections."""
        return self.config.megasdc


@dataclass(frozen=True)
class Features:
    """What an entry point adds to the core.

    Attributes:
        build_hooks: makes the hooks of a run, in the order in which they are called. All ranks of the world call it.
        share_launch: makes this rank's part in a launch of several runs, from the study, its place and the folder of
            the launch.
    """

    build_hooks: Callable[[Start], list[Hook]]
    share_launch: Callable[[StudySection, ReplicaWorld, Path], SharedLaunch]
