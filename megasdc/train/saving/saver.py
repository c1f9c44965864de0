"""Saving checkpoints, and the content besides DeepSpeed's part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import Fence
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.save import Retention, SavedState, SaveResult, save_checkpoint
from megasdc.checkpoint.snapshots.disk_saver import DiskSaver
from megasdc.checkpoint.snapshots.memory_budget import GIB, why_not
from megasdc.common import durable as room
from megasdc.common.errors import ConfigError, CorruptionError, NonFiniteError, StorageError
from megasdc.config.load import RunConfig
from megasdc.config.sections import StudySection
from megasdc.data.position import merge_positions
from megasdc.determinism import capture_rng
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sharding import UNIVERSAL_INFO_KEY, universal_info
from megasdc.model.sizes import padded_vocab_size
from megasdc.parallel.collectives import MIN, Field, gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.train.stop import stop_without_room, where_to_go_on

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Seconds between two looks whether there is room for a save that had none."""


def checkpoint_folder(config: RunConfig) -> Path:
    """Folder of a run's checkpoints."""
    sections = config.megasdc
    return Path(sections.checkpoint.folder or Path(sections.logging.run_dir) / "checkpoints")


def wanted_dims(config: RunConfig, run: Run) -> ParallelDims | None:
    """The layout that a run can go on from; None: any."""
    return None if config.megasdc.checkpoint.other_layout == "convert" else run.dims


@dataclass(frozen=True)
class RunState:
    """What is saved besides DeepSpeed's part.

    Args:
        config: stored as resolved.
        tokenizer_checksum: of the tokenizer that the data were prepared with.
        study: that the run is a replica of; None: none.
    """

    config: RunConfig
    tokenizer_checksum: str
    study: StudySection | None

    def of(self, run: Run) -> SavedState:
        """The state of a run after its last step.

        Collective: all ranks of the world.
        """
        return SavedState(self._shared_state(run), {"rng": capture_rng()}, self._client_state(run))

    def _client_state(self, run: Run) -> dict[str, Any]:
        model = self.config.megasdc.model
        padded = padded_vocab_size(run.loader.dataset.vocab_size, model.vocab_multiple)
        return {UNIVERSAL_INFO_KEY: universal_info(model, padded)}

    def _shared_state(self, run: Run) -> dict[str, Any]:
        # The first stage reads every micro-batch; stages in the middle read none.
        states = gather_objects(run.loader.state_dict() if run.dims.is_first_stage else None, run.host_group)
        return {
            "step": run.step,
            "tokens": run.progress.tokens,
            "samples": run.progress.samples,
            "uncounted_samples": run.progress.uncounted_samples,
            "skipped_steps": run.progress.skipped_steps,
            "finite_step": run.progress.finite_step,
            "loader": merge_positions([state for state in states if state is not None]),
            "vocab_size": run.loader.dataset.vocab_size,
            "tokenizer_checksum": self.tokenizer_checksum,
            "hooks": {hook.saved_as: hook.state_dict() for hook in run.hooks if hook.saved_as},
            "config": self.config.resolved(),
            "study": None if self.study is None else self.study.model_dump(mode="json"),
        }


class WaitForSnapshots(Hook):
    """Waits until all snapshots are whole, before another hook, or the update, changes what they copy.

    Args:
        waits: of those that take snapshots.
    """

    def __init__(self, waits: Sequence[Callable[[], None]]) -> None:
        self._waits = waits

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Wait; what is found in this step is repaired after that."""
        for wait in self._waits:
            wait()


class OncePerStep:
    """Settles what is found in the state that is saved, once in a step, whoever saves first.

    Args:
        settle: called on all ranks; None: there is nothing to settle.
    """

    def __init__(self, settle: Callable[[Run], None] | None) -> None:
        self._settle, self._step = settle, -1

    def __call__(self, run: Run) -> None:
        """Settle; a collective of the world where there is something to."""
        if self._settle is not None and run.step != self._step:
            self._step = run.step
            self._settle(run)


class Saver(Hook):
    """Saves every ``checkpoint.interval`` steps and when the run ends or stops.

    ``before_save`` is called on all ranks, and so is ``after_save`` once a checkpoint is whole; None: it is not needed.
    ``writer`` is None on other ranks than 0. The last checkpoint is always written while the run waits, since nothing
    is left that could go on. A hook before it must call ``wait_for_copy``.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        writer: MetricsWriter | None,
        state: RunState,
        before_save: OncePerStep,
        after_save: Callable[[], None] | None,
        fence: Fence | None,
    ) -> None:
        self.state = state
        self.before_save, self.after_save = before_save, after_save
        self.section = config.megasdc.checkpoint
        self.folder = checkpoint_folder(config)
        self.writer = writer
        self._ranks = CheckpointGroup(self.section.storage, run.host_group, run.events, fence=fence)
        self._keep = Retention(self.section.keep_last, self.section.keep_every)
        self._skipped = self._failed = 0
        self._without_room_since: float | None = None
        self._again_at = 0.0
        self._again = Field(self._own_again, MIN)
        self.fields: tuple[Field, ...] = (self._again,)
        self._has_looked = False
        self._background: DiskSaver | None = None
        damaged = any(fault.phase == "checkpoint" for fault in state.config.megasdc.faults)  # whole after its step
        if self.section.interval and self.section.writing != "sync" and not damaged:
            self._background = DiskSaver(self.folder, run.dims, self._ranks, run.engine.device, self._keep)
            self.fields = (self._again, *self._background.fields)

    @property
    def under_way(self) -> int | None:
        """Step of the save that goes on beside training; None: there is none."""
        return None if self._background is None else self._background.step

    def _own_again(self) -> float:
        """Whether a save that had no room may have some now."""
        if self._without_room_since is None or time.monotonic() < self._again_at:
            return 0.0
        try:
            room.probe(self.folder)
        except OSError:
            self._again_at = time.monotonic() + AGAIN_S
            return 0.0
        return 1.0  # until all ranks say so in one step

    def _look(self, run: Run) -> None:
        """Look whether memory has room for snapshots, and take it; after a step, since moments begin with the first.

        Raises:
            ConfigError: it has none, and the configuration demands them; on all ranks.
        """
        interval = self.section.interval
        if self._background is None or -(-run.step // interval) * interval >= run.steps:
            return
        size = self._background.measure(run.engine, self.state.of(run))
        problem = why_not(size, run.host_group, is_asked=self.section.writing == "async")
        if problem is None:
            self._background.reserve(run.engine, self.state.of(run))
            self._background.start()
            self._tell(run, "async", f"a snapshot takes {size / GIB:,.2f} GiB of memory a rank")
        elif self.section.writing == "async":
            raise ConfigError(f"megasdc.checkpoint.writing is async, but {problem}; or set it to auto or sync")
        else:
            self._tell(run, "sync", problem)
            self._background.close()
            self._background, self.fields = None, (self._again,)

    def _tell(self, run: Run, writing: str, why: str) -> None:
        if run.dims.rank == 0:
            run.events.emit("start", "checkpoint_writing", writing=writing, why=why)
            logger.info("checkpoints are written %s: %s", {"async": "beside training"}.get(writing, writing), why)

    def wait_for_copy(self) -> None:
        """Wait until the snapshot under way is whole; before anything changes in a step."""
        if self._background is not None:
            self._background.wait_for_copy()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Go on with the save under way, and save when due."""
        if self._background is not None and not self._has_looked and result.skipped is None:
            self._has_looked = True
            self._look(run)
        due = bool(self.section.interval) and run.step % self.section.interval == 0
        if self._background is not None:
            failed = self._background.failed
            self._report(run, self._background.advance())
            if self._background.step is not None and (run.is_last_step or due):
                due = self._meet_late(run, self._background) and due
            if self._background.failed > failed:
                self._failed += 1
                self._count(run, "failed", self._failed)
                if self._background.no_room:
                    self._wait_for_room(run, None)
        due = due or (bool(self._again.value) and self.under_way is None)
        if not due and not run.is_last_step:
            return
        run.enter("SAVE")
        self.before_save(run)
        started = time.monotonic()
        if self._background is None or not self._has_looked or run.is_last_step:
            state = self.state.of(run)
            saved = self._save(run, state)
            self._report(run, saved)
            if saved is not None and run.end.error is None:
                self._judge_last(run, saved, state)
        else:
            self._background.begin(run.engine, run.step, self.state.of(run))
        run.progress.paused_s += time.monotonic() - started
        run.enter("BETWEEN")

    def _judge_last(self, run: Run, saved: SaveResult, state: SavedState) -> None:
        """Let a run end with an error whose last checkpoint leads nowhere.

        Collective: all ranks of the world where it does.
        """
        if run.is_last_step and saved.non_finite is not None:
            way = where_to_go_on(run, self.folder)
            run.end.error = NonFiniteError(f"{saved.path} is the last checkpoint, and {saved.non_finite}; {way}")
        elif run.step >= run.steps and state.wrong_place is not None:
            way = where_to_go_on(run, self.folder)
            run.end.error = CorruptionError(f"{saved.path} is the last checkpoint, and {state.wrong_place}; {way}")

    def _save(self, run: Run, state: SavedState) -> SaveResult | None:
        """Save while training waits; None: there was no room, and training goes on.

        Raises:
            StorageError: another problem; or no room for too long, or for a last checkpoint that cannot wait; on all
                ranks.

        Collective: all ranks of the world.
        """
        while True:
            try:
                saved = save_checkpoint(run.engine, self.folder, run.step, state, run.dims, self._ranks, self._keep)
            except StorageError as error:
                if not error.no_room:
                    raise
                is_over = self._wait_for_room(run, error)
                if run.is_last_step and (is_over or run.end.must_stop_soon or run.end.error is not None):
                    if run.dims.rank == 0 and not is_over:
                        logger.warning("the last checkpoint is not waited for: the run is to end")
                    raise
                if not run.is_last_step:
                    self._failed += 1
                    self._count(run, "failed", self._failed)
                    return None
                run.enter("SAVE")  # again: it waits, and is not stuck
                time.sleep(AGAIN_S)
            else:
                return saved

    def _wait_for_room(self, run: Run, error: Exception | None) -> bool:
        """Note that a save had no room, and that it is owed; returns whether that has lasted for too long.

        The run then stops after this step, with all that can be saved elsewhere. It is in a hurry from when a rank is
        asked to end, which steps look at, but a last save that waits does not.

        Collective: all ranks of the world.
        """
        now = time.monotonic()
        if self._without_room_since is None:
            self._without_room_since = now
        self._again_at = now + AGAIN_S
        told = gather_objects((now - self._without_room_since, room.is_asked_to_end()), run.host_group)
        waited_s: float = told[0][0]
        run.end.must_stop_soon = run.end.must_stop_soon or any(asked for _, asked in told)
        if error is not None and run.dims.rank == 0:
            logger.warning("%s; it is tried again for up to %g s", error, room.limit_s())
        if waited_s < room.limit_s():
            return False
        stop_without_room(run, self.folder, waited_s)
        return True

    def _meet_late(self, run: Run, background: DiskSaver) -> bool:
        """A save is due or the run ends, while one is under way; returns whether the new one may begin."""
        if self.section.when_late == "skip" and not run.is_last_step:
            self._skipped += 1
            if run.dims.rank == 0:
                run.events.emit("skip", "checkpoint_save", step=run.step, under_way=background.step)
                self._count(run, "skipped", self._skipped)
                logger.warning("step %d is not saved: the save of step %d is under way", run.step, background.step)
            return False
        run.enter("SAVE")
        started = time.monotonic()
        self._report(run, background.finish())
        run.progress.paused_s += time.monotonic() - started
        run.enter("BETWEEN")
        return True

    def _report(self, run: Run, saved: SaveResult | None) -> None:
        """Log, and write as metrics, a save that is done."""
        if saved is None:
            return
        run.skipped_checkpoint_steps.discard(saved.step)
        self._without_room_since = None
        if self.after_save is not None:
            self.after_save()
        if self.writer is not None:
            self.writer.write(
                run.step,
                {
                    "checkpoint/save_s": saved.stalled_s,
                    "checkpoint/written_s": saved.duration_s,
                    "checkpoint/bytes": saved.size_bytes,
                },
            )
            stood = "" if saved.stalled_s == saved.duration_s else f", {saved.stalled_s:.2f} s of them standing still"
            logger.info("step %d | saved %s in %.1f s%s", run.step, saved.path, saved.duration_s, stood)

    def _count(self, run: Run, what: str, number: int) -> None:
        if self.writer is not None:
            self.writer.write(run.step, {f"checkpoint/{what}": number})

    def close(self) -> None:
        """Close the metrics file, since this is the last hook that writes to it; a save under way is lost."""
        if self._background is not None:
            self._background.close()
        if self.writer is not None:
            self.writer.close()
