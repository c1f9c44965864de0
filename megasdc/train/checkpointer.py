"""When a run saves, and what besides DeepSpeed's part: the hooks of checkpoints on the disk and in the memory of hosts.

Those in memory are taken every few steps, and stay until the run has ended without an error.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import Fence
from megasdc.checkpoint.host_memory import (
    RESTORE,
    Lineage,
    claim,
    forget,
    mark_verified_up_to,
    memory_folder,
    remove_forgotten,
    write_line,
)
from megasdc.checkpoint.in_memory import InMemoryCheckpoint, MemorySaver, find_in_memory
from megasdc.checkpoint.ranks import CheckpointGroup, RankProblem, describe_error, find_place, raise_on_all_ranks
from megasdc.checkpoint.save import DiskSaver, Retention, SaveResult, save_checkpoint
from megasdc.checkpoint.snapshot import GIB, SavedState
from megasdc.checkpoint.verify import find_corruption
from megasdc.common import durable as room
from megasdc.common.errors import ConfigError, CorruptionError, NonFiniteError, StorageError
from megasdc.common.host import is_own_folder
from megasdc.config.load import RunConfig
from megasdc.config.sections import MemorySection, StudySection
from megasdc.data.position import merge_positions
from megasdc.determinism import capture_rng
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sharding import UNIVERSAL_INFO_KEY, universal_info
from megasdc.model.sizes import padded_vocab_size
from megasdc.parallel.collectives import MIN, Field, gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.train.isolation import own_address
from megasdc.train.stop import stop_without_room, where_to_go_on

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Seconds between two tests for room, while a save is owed that had none."""


def checkpoint_folder(config: RunConfig) -> Path:
    """Folder of a run's checkpoints."""
    sections = config.megasdc
    return Path(sections.checkpoint.folder or Path(sections.logging.run_dir) / "checkpoints")


def wanted_dims(config: RunConfig, run: Run) -> ParallelDims | None:
    """Layout of the checkpoints from which a run can go on; None: any layout."""
    return None if config.megasdc.checkpoint.other_layout == "convert" else run.dims


class RunState:
    """Source of the state that is saved besides DeepSpeed's part.

    Args:
        config: the run's configuration, stored as resolved.
        tokenizer_checksum: checksum of the tokenizer that the data were prepared with.
        study: section of the study that the run is a replica of; None: the run is not of a study.
        own: returns values and tensors of this rank alone that are saved with its random states.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        tokenizer_checksum: str,
        study: StudySection | None,
        own: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        model, vocab_size = config.megasdc.model, run.loader.dataset.vocab_size
        padded = padded_vocab_size(vocab_size, model.vocab_multiple)
        self._data = {"vocab_size": vocab_size, "tokenizer_checksum": tokenizer_checksum}
        self._settings = {
            "config": config.resolved(),
            "study": None if study is None else study.model_dump(mode="json"),
        }
        self._own = own
        self._client_state = {UNIVERSAL_INFO_KEY: universal_info(model, padded)}

    def of(self, run: Run) -> SavedState:
        """The state of a run after its last step.

        Collective: all ranks of the world.
        """
        # The first stage reads every micro-batch; stages in the middle read none.
        states = gather_objects(run.loader.state_dict() if run.dims.is_first_stage else None, run.host_group)
        shared_state = {
            "step": run.step,
            "tokens": run.progress.tokens,
            "samples": run.progress.samples,
            "uncounted_samples": run.progress.uncounted_samples,
            "skipped_steps": run.progress.skipped_steps,
            "finite_step": run.progress.finite_step,
            "loader": merge_positions([state for state in states if state is not None]),
            **self._data,
            "hooks": {hook.saved_as: hook.state_dict() for hook in run.hooks if hook.saved_as},
            **self._settings,
        }
        return SavedState(shared_state, {"rng": capture_rng(), **self._own()}, self._client_state)


class WaitForSnapshots(Hook):
    """Waits until all snapshots are whole, before another hook, or the update, changes what they copy.

    Args:
        waits: functions that wait for a snapshot, of the hooks that take snapshots.
    """

    def __init__(self, waits: Sequence[Callable[[], None]]) -> None:
        self._waits = waits

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Wait for all snapshots; findings of this step are repaired after that."""
        for wait in self._waits:
            wait()


class OncePerStep:
    """Settles findings in the state that is about to be saved, once in a step, before the first save of it.

    Args:
        settle: function that is called on all ranks; None: nothing is checked before a save.
    """

    def __init__(self, settle: Callable[[Run], None] | None) -> None:
        self._settle, self._step = settle, -1

    def __call__(self, run: Run) -> None:
        """Settle findings, once in a step; a collective of the world unless ``settle`` is None."""
        if self._settle is not None and run.step != self._step:
            self._step = run.step
            self._settle(run)


class Saver(Hook):
    """Saves every ``checkpoint.interval`` steps and when the run ends or stops.

    ``before_save`` is called on all ranks before a save, and ``after_save`` once a checkpoint is whole; None: it is not
    needed. ``writer`` is None on ranks other than 0. The last checkpoint is always written while the run waits, since
    nothing is left that could go on. A hook before this one must call ``wait_for_copy``.
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
        damaged = any(fault.phase == "checkpoint" for fault in config.megasdc.faults)  # whole after its step
        if self.section.interval and self.section.writing != "sync" and not damaged:
            self._background = DiskSaver(self.folder, run.dims, self._ranks, run.engine.device, self._keep)
            self.fields = (self._again, *self._background.fields)

    @property
    def under_way(self) -> int | None:
        """Step of the save that goes on beside training; None: no save is under way."""
        return None if self._background is None else self._background.step

    def _own_again(self) -> float:
        """1 if this rank's disk may have room now for a save that had none, else 0; all ranks must agree on 1."""
        if self._without_room_since is None or time.monotonic() < self._again_at:
            return 0.0
        try:
            room.probe(self.folder)
        except OSError:
            self._again_at = time.monotonic() + AGAIN_S
            return 0.0
        return 1.0  # until all ranks say so in one step

    def _reserve_memory(self, run: Run) -> None:
        """Reserve memory for snapshots if there is room, after a step, since moments exist from the first on.

        Raises:
            ConfigError: memory has no room, and the configuration demands snapshots; on all ranks.
        """
        interval = self.section.interval
        if self._background is None or -(-run.step // interval) * interval >= run.steps:
            return
        is_asked = self.section.writing == "async"
        size, problem = self._background.reserve(run.engine, self.state.of(run), is_asked=is_asked)
        if problem is None:
            self._report_writing(run, "async", f"a snapshot takes {size / GIB:,.2f} GiB of memory a rank")
        elif self.section.writing == "async":
            raise ConfigError(f"megasdc.checkpoint.writing is async, but {problem}; or set it to auto or sync")
        else:
            self._report_writing(run, "sync", problem)
            self._background.close()
            self._background, self.fields = None, (self._again,)

    def _report_writing(self, run: Run, writing: str, why: str) -> None:
        if run.dims.rank == 0:
            run.events.emit("start", "checkpoint_writing", writing=writing, why=why)
            logger.info("checkpoints are written %s: %s", {"async": "beside training"}.get(writing, writing), why)

    def wait_for_copy(self) -> None:
        """Wait until the snapshot under way is whole; before anything changes in a step."""
        if self._background is not None:
            self._background.wait_for_copy()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Go on with the save under way, and begin one when due."""
        if self._background is not None and not self._has_looked and result.skipped is None:
            self._has_looked = True
            self._reserve_memory(run)
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
        """Let a run end with an error if its last checkpoint is not finite or has a wrong place in the data.

        Collective: all ranks of the world where it does.
        """
        if run.is_last_step and saved.non_finite is not None:
            way = where_to_go_on(run, self.folder)
            run.end.error = NonFiniteError(f"{saved.path} is the last checkpoint, and {saved.non_finite}; {way}")
        elif run.step >= run.steps and state.wrong_place is not None:
            way = where_to_go_on(run, self.folder)
            run.end.error = CorruptionError(f"{saved.path} is the last checkpoint, and {state.wrong_place}; {way}")

    def _save(self, run: Run, state: SavedState) -> SaveResult | None:
        """Save while training waits; returns None where there was no room and training goes on.

        Raises:
            StorageError: a problem other than room; or no room for too long, or for a last checkpoint that cannot wait;
                on all ranks.

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
        """Note that a save had no room and is owed; returns whether room has been missing for too long.

        The run then stops after this step, with all that can be saved elsewhere. It must stop soon once any rank is
        asked to end, which is tested here too, since a last save that waits takes no more steps.

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
        """Skip a due save while another is under way, or finish that one; returns whether the new one may begin."""
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
        """Log a save that is done, and write its metrics; None: no save is done."""
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


class MemoryCheckpoints(Hook):
    """Takes snapshots into memory of the hosts, where they outlive the ranks.

    Args:
        writer: writer of metrics on rank 0; None on other ranks.
        before_save: called on all ranks before a snapshot. A hook before this one must call ``wait_for_copy``.

    Collective: all ranks of the world.
    """

    def __init__(
        self, section: MemorySection, run: Run, state: RunState, writer: MetricsWriter | None, before_save: OncePerStep
    ) -> None:
        self._interval, self._state, self._writer, self._before_save = section.interval, state, writer, before_save
        self._may_go_on, self._is_off = section.without_room == "go_on", False
        self._folder, self._start = memory_folder(run.events.origin.run), _number_of_start(run)
        self._place = find_place(CheckpointGroup("node_local", run.host_group, run.events))
        self._saver = MemorySaver(
            self._folder,
            run.events.origin.run,
            self._start,
            run.dims,
            self._place,
            run.engine.device,
            self._interval,
        )
        self._partners = section.partners
        self._first = self._taken = run.step
        self._has_old = self._saver.adopt(run.step)
        self._has_looked = False
        self._was_taken = True
        self.fields = self._saver.fields

    @property
    def hosts(self) -> int:
        """Number of hosts of the run."""
        return len(set(self._place.nodes))

    def on_start(self, run: Run) -> None:
        """Find the host that keeps copies of this host's snapshots, where partners are configured."""
        if self.hosts > 1 if self._partners is None else self._partners:
            self._join_partners(run)

    def _reserve_memory(self, run: Run) -> None:
        """Reserve memory for snapshots if there is room, after a step, since moments exist from the first on.

        Raises:
            ConfigError: memory has no room, and the run may not go on without snapshots; on all ranks.
        """
        size, problem = self._saver.reserve(run.engine, self._state.of(run), is_asked=True)
        largest = max(gather_objects(size, run.host_group))
        if run.dims.rank == 0:
            run.events.emit("memory", "needs", step=run.step, rank_bytes=largest)
        if problem is not None:
            if self._may_go_on:
                self._is_off = True
                if run.dims.rank == 0:
                    logger.warning("memory: no snapshots are taken: %s", problem)
                    run.events.emit("warning", "memory_without_room", step=run.step, message=problem)
                return
            if self._place.leader and not self._has_old:
                shutil.rmtree(self._folder, ignore_errors=True)  # it holds nothing
            raise ConfigError(f"megasdc.checkpoint.memory.interval is {self._interval}, but {problem}; or set it to 0")
        if run.dims.rank == 0:
            logger.info("every %d steps a snapshot stays in memory: %.2f GiB a rank", self._interval, size / GIB)

    def _join_partners(self, run: Run) -> None:
        problem = self._saver.join_partners(own_address(run))
        if problem is not None and run.dims.rank == 0:
            logger.warning("memory: no host keeps copies for another: %s", problem)
            run.events.emit("warning", "memory_without_partners", step=run.step, message=problem)

    def wait_for_copy(self) -> None:
        """Wait until the snapshot under way is whole; before anything changes in a step."""
        self._saver.wait_for_copy()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Take a snapshot when due."""
        if not self._has_looked and result.skipped is None:
            self._has_looked = True
            self._reserve_memory(run)
        if self._is_off:
            return
        self._report(run, self._saver.advance())
        if self._has_old and self._saver.whole > self._first:
            self._has_old = False
            self._forget_old(run)
        is_kept = isinstance(run.end.error, StorageError)  # perhaps the only place where the last step can be saved
        if (run.step % self._interval or run.is_last_step) and not is_kept:
            return
        if run.progress.finite_step <= self._taken:  # the state is that of the last snapshot, and may lead nowhere
            return
        run.enter("SAVE")
        self._before_save(run)
        state = self._state.of(run)
        if (wrong := state.wrong_place) is not None:  # of all ranks alike: it leads nowhere
            run.enter("BETWEEN")
            if run.dims.rank == 0:
                logger.warning("memory: step %d is not kept: %s", run.step, wrong)
                run.events.emit("warning", "memory_not_kept", step=run.step, message=wrong)
            return
        if is_kept:
            self._report(run, self._saver.finish())
        taken = self._saver.begin(run.engine, run.step, state)
        run.progress.paused_s += self._saver.stalled_s if taken else 0.0
        self._taken = run.step if taken else self._taken
        if is_kept:
            self._report(run, self._saver.finish())
        run.enter("BETWEEN")
        if self._was_taken and not taken and run.dims.rank == 0:  # the first of several
            run.events.emit("skip", "memory_snapshot", step=run.step, skipped=self._saver.skipped)
            logger.warning(
                "memory: step %d is not kept: those before are still being made whole; a larger interval keeps up",
                run.step,
            )
        self._was_taken = taken
        if self._writer is not None:
            self._writer.write(
                run.step,
                {
                    "memory/step": self._saver.whole,
                    "memory/stalled_s": self._saver.stalled_s,
                    "memory/skipped": self._saver.skipped,
                    "memory/failed": self._saver.failed,
                },
            )

    def _report(self, run: Run, problem: str | None) -> None:
        """Report that snapshots were given up; None: none was."""
        if problem is not None and run.dims.rank == 0:
            logger.warning("memory: no snapshot was kept: %s; training goes on", problem)
            run.events.emit("warning", "memory_not_kept", step=run.step, message=problem)

    def _forget_old(self, run: Run) -> None:
        """Remove snapshots of the run's earlier starts from this host's memory: all ranks have newer ones.

        Collective: all ranks of the world.
        """
        if self._place.leader:
            try:
                forget(self._folder, lambda record: record.start == self._start)
            except OSError as error:
                logger.warning("memory: what is older cannot be removed: %s", error)
                run.events.emit("warning", "memory_not_removed", step=run.step, message=str(error))
        self._place.gather(None)  # no rank uses a slot again before

    def on_end(self, run: Run) -> None:
        """Remove all snapshots of the run, except where it took no step and may hold the only copy of its state.

        Collective: all ranks of the world.
        """
        self._saver.close()
        if self._has_old and run.step == self._first and run.step < run.steps:
            return
        self._place.gather(None)  # a writer that still runs would make the folder again
        if self._place.leader:
            shutil.rmtree(self._folder, ignore_errors=True)

    def before_isolation(self, run: Run) -> None:
        """Wait until the last snapshot is whole, here and at the partner: the run goes on from it."""
        self._report(run, self._saver.finish())

    def close(self) -> None:
        """End the writer; snapshots stay in memory after an error."""
        self._saver.close()


def _number_of_start(run: Run) -> int:
    number = run.events.origin.attempt
    assert number is not None, "the start was counted"
    return number


def find_memory_checkpoint(config: RunConfig, run: Run) -> InMemoryCheckpoint | None:
    """Find the newest step that the hosts of this start hold in memory, and claim that memory for this start.

    Raises:
        StorageError: shared memory of a host cannot be written; on all ranks.

    Collective: all ranks of the world.
    """
    origin, section = run.events.origin, config.megasdc.checkpoint
    ranks = CheckpointGroup("node_local", run.host_group, run.events)
    place = find_place(ranks)
    problem: RankProblem | None = None
    if place.leader:
        folder = memory_folder(origin.run)
        try:
            remove_forgotten(claim(folder, f"{origin.run}.{origin.attempt}", section.memory.linger_s))
        except OSError as error:
            problem = describe_error(error, f"write {folder}")
    raise_on_all_ranks(problem, place, "nothing can be kept in memory")
    corrupt = any(place.gather(find_corruption(checkpoint_folder(config)) if place.leader else None))
    verified_only = section.require_verified == "always" or (section.require_verified == "auto" and corrupt)
    if section.resume == "never":
        return None
    dims, newest = wanted_dims(config, run), section.resume_at_most
    return find_in_memory(
        memory_folder(origin.run), origin.run, dims, ranks, newest=newest, verified_only=verified_only
    )


def discard_other_steps(config: RunConfig, run: Run, found: InMemoryCheckpoint | None) -> None:
    """Remove from this host's memory all steps but the one that the run goes on from; None: no step stays.

    Snapshots of other hosts that hold more do not count from now on.
    """
    folder = memory_folder(run.events.origin.run)
    place = find_place(CheckpointGroup("node_local", run.host_group))
    if not place.leader:
        return
    shutil.rmtree(folder / RESTORE, ignore_errors=True)
    try:
        number = _number_of_start(run)
        line = Lineage(start=number) if found is None else found.line(number, place)
        write_line(folder, line)
        forget(folder, lambda record: (record.start, record.step) == (line.from_start, line.from_step))
    except OSError as error:
        logger.warning("memory: what is not used any more cannot be removed: %s", error)


def remove_step(run: Run, found: InMemoryCheckpoint) -> None:
    """Remove a step from this host's memory, and leave older ones."""
    if find_place(CheckpointGroup("node_local", run.host_group)).leader:
        try:
            forget(memory_folder(run.events.origin.run), lambda record: record.step != found.step)
        except OSError as error:
            logger.warning("memory: step %d cannot be removed: %s", found.step, error)


def mark_memory(folder: Path, step: int) -> None:
    """Mark snapshots up to a step as verified by an audit; if that fails, a restart after corruption reads the disk."""
    if is_own_folder(folder):
        try:
            mark_verified_up_to(folder, step)
        except OSError as error:
            logger.warning("memory: step %d cannot be marked as verified: %s", step, error)
