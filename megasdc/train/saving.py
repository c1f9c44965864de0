"""When is a checkpoint written, what is in it besides DeepSpeed's part, and how does a run go on from it?"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megasdc.checkpoint.load import load_checkpoint
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.checkpoint.save import save_checkpoint
from megasdc.config import RunConfig
from megasdc.data.loader import merge_positions, position_for
from megasdc.determinism import capture_rng, restore_rng
from megasdc.engine.engine import StepResult
from megasdc.metrics.writer import MetricsWriter, cut_back, set_aside
from megasdc.parallel.collectives import gather_objects
from megasdc.train.run import Run, StepHook

logger = logging.getLogger(__name__)


def checkpoint_folder(config: RunConfig) -> Path:
    """Where a run's checkpoints are."""
    sections = config.megasdc
    return Path(sections.checkpoint.folder or Path(sections.logging.run_dir) / "checkpoints")


class Saver(StepHook):
    """Saves every ``checkpoint.interval`` steps and when the run ends or stops.

    Args:
        config: the run's configuration; its resolved form is stored in each checkpoint.
        writer: where rank 0 writes metrics; null on other ranks.
    """

    def __init__(self, config: RunConfig, writer: MetricsWriter | None) -> None:
        self.config = config
        self.section = config.megasdc.checkpoint
        self.folder = checkpoint_folder(config)
        self.writer = writer

    def after_step(self, run: Run, result: StepResult) -> None:
        """Save when it is due."""
        due = self.section.interval and run.step % self.section.interval == 0
        if not due and not run.is_last_step:
            return
        saved = save_checkpoint(
            run.engine,
            self.folder,
            run.step,
            dims=run.dims,
            storage=self.section.storage,
            shared_state=self._shared_state(run),
            rank_state={"rng": capture_rng()},
            events=run.events,
            keep_last=self.section.keep_last,
            keep_every=self.section.keep_every,
            group=run.host_group,
        )
        run.paused_s += saved.duration_s
        if self.writer is not None:
            self.writer.write(run.step, {"checkpoint/save_s": saved.duration_s, "checkpoint/bytes": saved.size_bytes})
            logger.info("step %d | saved %s in %.1f s", run.step, saved.path, saved.duration_s)

    def _shared_state(self, run: Run) -> dict[str, Any]:
        # The first stage reads every micro-batch; stages in the middle read none.
        states = gather_objects(run.loader.state_dict() if run.dims.is_first_stage else None, run.host_group)
        return {
            "step": run.step,
            "tokens": run.tokens,
            "samples": run.samples,
            "skipped_steps": run.skipped_steps,
            "loader": merge_positions([state for state in states if state is not None]),
            "vocab_size": run.loader.dataset.vocab_size,
            "hooks": {type(hook).__name__: hook.state_dict() for hook in run.hooks},
            "config": self.config.resolved(),
        }

    def close(self) -> None:
        """Close the metrics file, which this last hook writes to."""
        if self.writer is not None:
            self.writer.close()


def resume(run: Run, config: RunConfig) -> dict[str, Any]:
    """Go on from the newest usable checkpoint, if there is one and the configuration wants it.

    Args:
        run: at step 0; on return at the step that was loaded.
        config: the run's configuration.

    Returns:
        States of the hooks by class name, for hooks that are not built yet; empty at step 0.

    Raises:
        CheckpointError: none is usable, one is of another model or layout, or the configuration demands what is not
            there.

    Collective: all ranks of the world.
    """
    section = config.megasdc.checkpoint
    folder = checkpoint_folder(config)
    found = find_checkpoint(
        folder,
        dims=run.dims,
        storage=section.storage,
        verify=section.verify,
        resume=section.resume,
        events=run.events,
        group=run.host_group,
    )
    if found is None:
        if run.dims.rank == 0 and (kept := set_aside(run.folder)) is not None:
            run.events.emit("start", "metrics_set_aside", path=str(kept))
            logger.warning("no checkpoint in %s, so the run starts anew; the metrics found are now %s", folder, kept)
        return {}
    loaded = load_checkpoint(run.engine, found, run.dims, events=run.events, group=run.host_group)
    state = loaded.shared_state
    run.step, run.tokens, run.samples = state["step"], state["tokens"], state["samples"]
    run.skipped_steps = state["skipped_steps"]
    run.loader.consumed = position_for(state["loader"], run.dims.dp_rank, run.dims.data, run.loader.dataset)
    restore_rng(loaded.rank_state["rng"])
    if run.dims.rank == 0:
        dropped = cut_back(run.folder, run.step)
        run.events.emit("resume", "metrics_cut_back", step=run.step, lines=dropped)
        logger.info("resumed from %s", found.path)
    return state["hooks"]
