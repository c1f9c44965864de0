"""One replica's part in a study: exchange with the trusted replica in a step, and the study's log."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.config import ParallelSection, StudySection
from megasdc.config.sections.study import COMPUTATION_SYNC, FREE_RUN, PARAMETER_SYNC
from megasdc.data.loader import EvalLoader
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.lab.studies.bridge import Bridge
from megasdc.lab.studies.cut import Cut
from megasdc.lab.studies.norms import NormDifference, ShardNorms
from megasdc.lab.studies.predictions import top_predictions
from megasdc.lab.studies.results import ResultSync
from megasdc.lab.studies.state import overwrite_training_state
from megasdc.lab.studies.tables import describe, summarize_study
from megasdc.model.submodules import list_submodules
from megasdc.ops.run_folder.study_log import STUDY_FOLDER, StudyLog
from megasdc.parallel import groups, meeting
from megasdc.parallel.identity import Identity
from megasdc.parallel.stores import prefix_store
from megasdc.train.detection.observe import Watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyPart:
    """Place of a rank in its study; ``folder`` is the launch's run folder."""

    section: StudySection
    cut: Cut
    folder: Path


def meet(part: StudyPart, section: ParallelSection, on_met: Callable[[], None]) -> Bridge:
    """Join the replica's own process group, and connect to the ranks at the same place in the other replicas.

    ``on_met`` is called when all ranks of the replica have met.

    Collective: all ranks of the launch.
    """
    cut = part.cut
    store = meeting.meet(Identity.own(cut.launch_rank, cut.launch_size, str(part.folder)), section.timeout_s)
    own = prefix_store(f"replica/{cut.replica}", store)
    groups.init_process_group(section.timeout_s, own, on_met=on_met, share_devices=section.share_devices)
    return Bridge(cut, part.section.trusted, store, section.timeout_s)


class Study(Hook):
    """Compares this replica with the trusted one.

    It comes after the hooks that decide to stop and before those that evaluate and save, so that all replicas end at
    the same step, and a rank's log is complete for a saved step.

    Args:
        bridge: to the other replicas.
        eval_loader: this replica's validation samples; None: none.
        save_interval: steps between checkpoints; 0: only at the end.

    Attributes:
        in_step: the hook of mode parameter_sync, which comes after fault injection and before bounds; else None.
    """

    def __init__(
        self, part: StudyPart, bridge: Bridge, run: Run, eval_loader: EvalLoader | None, save_interval: int
    ) -> None:
        self._part = part
        self.section = part.section
        self._bridge = bridge
        self._eval_loader = eval_loader
        self._save_interval = save_interval
        self._log = StudyLog(part.folder, part.cut.launch_rank, part.cut.replica, run.step)
        self._write_start(run)
        self._results: ResultSync | None = None
        self._distances: ShardNorms | None = None
        self.in_step: ParameterSync | None = None
        mode, submodules = part.section.mode, list_submodules(run.engine.module)
        if mode == COMPUTATION_SYNC:
            self._results = ResultSync(part.section, bridge, self._log.tell)
            self._fqns = frozenset(one.fqn for one in submodules)
        else:
            self._distances = ShardNorms(run.engine.optimizer, submodules, run.dims.tp_rank, bridge, run.host_group)
        if mode == PARAMETER_SYNC:
            assert self._distances is not None, "made for every mode but computation_sync"
            self.in_step = ParameterSync(bridge, self._distances, self._tell_distances)

    def watches(self) -> list[Watch]:
        """Watches of the run's results, after fault injection; none in modes that compare states only."""
        if self._results is None:
            return []
        return [Watch(self._results, lambda step: self._fqns, harms=True)]

    def _write_start(self, run: Run) -> None:
        part, dims = self._part, run.dims
        self._log.tell(
            "start",
            run.step,
            mode=part.section.mode,
            replicas=part.cut.replicas,
            trusted=part.section.trusted,
            replica_rank=dims.rank,
            dp_rank=dims.dp_rank,
            pp_rank=dims.pp_rank,
            tp_rank=dims.tp_rank,
            host=socket.gethostname(),
        )
        self._log.flush()

    def on_start(self, run: Run) -> None:
        """Stop all replicas if one stops before its first step."""
        self._agree_to_stop(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log the step's comparison, and agree on stopping."""
        losses = [loss for (loss,) in self._bridge.gather([result.loss])]
        trusted = losses[self._part.section.trusted]
        if run.dims.rank == 0:
            self._log.tell("loss", run.step, loss=result.loss, trusted_loss=trusted)
        self._agree_to_stop(run)
        due = run.step % self._part.section.interval == 0 or run.is_last_step
        saves = bool(self._save_interval) and run.step % self._save_interval == 0
        if self._results is not None and (due or saves):
            self._results.flush(run.step)
        if self._part.section.mode == FREE_RUN and due:
            assert self._distances is not None, "made for every mode but computation_sync"
            self._tell_distances("parameters", run.step, self._distances.measure(lambda fragment: fragment.master))
        if self._part.section.mode == FREE_RUN and run.step >= run.steps:
            self._evaluate(run)
        self._log.flush()

    def _agree_to_stop(self, run: Run) -> None:
        """All replicas stop after the step in which one has a reason."""
        stops = [bool(stop) for (stop,) in self._bridge.gather([float(run.stop_reason is not None)])]
        if not any(stops):
            return
        reasons = self._bridge.gather_text(run.stop_reason or "")
        if run.stop_reason is None:
            first = stops.index(True)
            run.stop_reason = f"{reasons[first]}, of replica {first} of the study"
            run.events.emit("stop", "requested", step=run.step, reason=run.stop_reason)

    def _tell_distances(self, kind: str, step: int, distances: list[NormDifference]) -> None:
        if self._part.cut.rank != 0:
            return
        for one in distances:
            self._log.tell(kind, step, **vars(one), ratio=one.ratio)

    def _evaluate(self, run: Run) -> None:
        """Evaluate this replica's model, and count the tokens that it predicts differently from the trusted one."""
        assert self._eval_loader is not None, "checked when the configuration was read"
        engine: TrainingEngine = run.engine
        last = run.dims.is_last_stage
        start = time.perf_counter()
        with top_predictions(engine.module.loss_fn if last else None) as found:
            loss = engine.evaluate(iter(self._eval_loader), len(self._eval_loader))
        run.paused_s += time.perf_counter() - start
        counts = torch.zeros(4, dtype=torch.float64)
        if last:
            own = torch.stack(found)
            trusted = self._bridge.share(own, "predictions")
            labels, mask = (torch.stack(each) for each in zip(*(pair for _, pair in self._eval_loader), strict=True))
            if run.dims.tp_rank == 0:
                matches = (torch.ones_like(own), own != trusted, own == labels, trusted == labels)
                counts = torch.stack([(one.double() * mask.double()).sum() for one in matches])
        dist.all_reduce(counts, group=run.host_group)
        losses = self._bridge.gather([loss])
        if run.dims.rank != 0:
            return
        tokens, disagreeing, correct, trusted_correct = (round(count) for count in counts.tolist())
        self._log.tell(
            "evaluation",
            run.step,
            loss=loss,
            trusted_loss=losses[self._part.section.trusted][0],
            tokens=tokens,
            disagreeing=disagreeing,
            correct=correct,
            trusted_correct=trusted_correct,
        )

    def on_end(self, run: Run) -> None:
        """End together, since one of the ranks holds the rendezvous store; summarize this host's files."""
        self._log.flush()
        self._bridge.gather([0.0])
        if self._part.cut.launch_rank != 0:
            return
        summary = summarize_study(self._part.folder)
        text = json.dumps(summary.as_dict(), indent=2) + "\n"
        (self._part.folder / STUDY_FOLDER / "summary.json").write_text(text, encoding="utf-8")
        for line in describe(summary):
            logger.info("%s", line)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class ParameterSync(Hook):
    """Compares gradients before the optimizer step, and takes over the trusted replica's state after it.

    ``tell`` is called with (kind, step, distances).
    """

    def __init__(self, bridge: Bridge, distances: ShardNorms, tell: Any) -> None:
        self._bridge = bridge
        self._distances = distances
        self._tell = tell

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Compare the reduced gradients, before they are bounded or clipped."""
        found = self._distances.measure(lambda fragment: fragment.gradient)
        self._tell("gradient", engine.step_number, found)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Overwrite this replica's state with the trusted one's."""
        overwrite_training_state(engine, self._bridge)


def agree_on_checkpoint(bridge: Bridge, step: int) -> int | None:
    """None if all replicas have found a checkpoint of the same step (0: none); else the earliest, to search again from.

    Collective: the ranks of equal place in all replicas.
    """
    steps = [round(found) for (found,) in bridge.gather([float(step)])]
    return None if len(set(steps)) == 1 else min(steps)
